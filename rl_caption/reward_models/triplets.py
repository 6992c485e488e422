"""Triplets of growing captions for training on specificity (Chen et al., SPECS, EMNLP
2025, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rewards.text.detail_units import detail_units
from rl_caption.data.scenes.world import Draws

if TYPE_CHECKING:
    from rewards.clip.pretrained import Texts

_STOPS = (".", "!", "?", "…")
_SEPARATORS = ",;:"
_CORE = re.compile(r"(\W*)(.*?)(\W*)", re.DOTALL)


class Donor(NamedTuple):
    """A caption, cut into detail units, that negative units are taken from."""

    image_id: Hashable
    units: Sequence[str]


class Triplet(NamedTuple):
    """``base``, the first units of a caption, at least one; ``positive``, the base and
    the caption's next unit; ``negative``, the base and a unit of another image's
    caption, perhaps with its words shuffled.
    """

    base: str
    positive: str
    negative: str


def make_triplets(
    captions: Sequence[str],
    image_ids: Sequence[Hashable],
    seed: int,
    shuffle_rate: float = 0.9,
    donors: Sequence[Donor] | None = None,
) -> list[Triplet | None]:
    """Make one triplet of each of B captions; a pure function.

    The length of the base is drawn uniformly from 1 to U - 1 of the caption's U units.
    The negative takes the unit at the same position of another image's caption, or its
    last unit where that caption is shorter. It never has the same words as the
    positive.

    Args:
        captions: [B] whole captions.
        image_ids: [B] image of each caption: no unit is taken from a caption of the same image.
        seed: random seed of all draws; give another one each step. With ``donors``, a
            row's triplet does not depend on the other rows.
        shuffle_rate: fraction of negative units whose words are shuffled, in [0, 1].
        donors: captions to take negative units from, such as the whole data set
            (released code); None takes the other captions of the batch (the paper's
            in-batch negatives).

    Returns:
        [B] triplets. None where the caption has fewer than two units, or no other caption has a
        unit for it.
    """
    units = [detail_units(caption) for caption in captions]
    if donors is None:
        donors = list(map(Donor, image_ids, units))
    triplets: list[Triplet | None] = []
    for caption, details, owner in zip(captions, units, image_ids, strict=True):
        draws = Draws("triplet", seed, str(owner), caption)
        triplets.append(None)
        if len(details) < 2:
            continue
        position = 1 + draws.below(len(details) - 1)
        unit = negative_unit(donors, position, owner, details[position], draws)
        if unit is None:
            continue
        if draws.chance(shuffle_rate):
            unit = shuffled_words(unit, draws)
        base = "".join(details[:position])
        triplets[-1] = Triplet(base, base + details[position], append_unit(base, unit))
    return triplets


def negative_unit(
    donors: Sequence[Donor], position: int, owner: Hashable, unlike: str, draws: Draws
) -> str | None:
    """Draw a caption of another image than ``owner``; return its unit ``position``, or
    its last unit if it has fewer.

    Units with the same words as ``unlike``, the true one, are passed over; None where
    no unit is left. Donors are tried in their order, from a random one on.
    """
    start = draws.below(len(donors)) if donors else 0
    words = _words(unlike)
    for donor in (donors[(start + step) % len(donors)] for step in range(len(donors))):
        if donor.units and donor.image_id != owner:
            unit = donor.units[min(position, len(donor.units) - 1)]
            if _words(unit) != words:
                return unit
    return None


def append_unit(base: str, unit: str) -> str:
    """Append a unit of another caption to ``base``, with a space in between, and no
    comma after a full stop.
    """
    if base[-1:] in _STOPS:
        unit = unit.lstrip(_SEPARATORS) or unit
    return base + ("" if unit[0].isspace() or unit[0] in _SEPARATORS else " ") + unit


def shuffled_words(unit: str, draws: Draws) -> str:
    """Put the words of a unit in random order; punctuation at its two ends stays there."""
    lead, core, tail = _CORE.fullmatch(unit).groups()  # type: ignore[union-attr]
    return lead + " ".join(draws.permute(core.split())) + tail


def _words(unit: str) -> list[str]:
    return sorted(re.findall(r"\w+", unit.lower()))


def triplet_texts(
    triplets: Sequence[Triplet | None], tokens: Texts
) -> tuple[dict[str, list[str]], Tensor]:
    """The texts ``base``, ``positive`` and ``negative`` of B triplets, and float32 [B]:
    1 where a triplet counts, else 0.

    A triplet that is None does not count, nor does one with a text longer than the
    context: truncated, its texts would be equal. Texts of both kinds are "".
    """
    counts = []
    texts = []
    for triplet in triplets:
        counts.append(float(triplet is not None and not tokens.too_long(triplet)))
        texts.append(triplet if triplet and counts[-1] else Triplet("", "", ""))
    columns = {name: [getattr(t, name) for t in texts] for name in Triplet._fields}
    return columns, torch.tensor(counts)
