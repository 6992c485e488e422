"""Triplets of growing captions for training on specificity (Chen et al., SPECS, EMNLP 2025, section 3)."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rewards.text.detail_units import Tagger, detail_units, detail_units_of
from rl_caption.data.files import read_captions
from rl_caption.data.scenes.draws import Draws

Per = Literal["unit", "row"]
_STOPS = (".", "!", "?", "…")
_SEPARATORS = ",;:"
_CORE = re.compile(r"(\W*)(.*?)(\W*)", re.DOTALL)


class Donor(NamedTuple):
    """A caption that negative units are taken from."""

    image_id: Hashable
    units: Sequence[str]


class Triplet(NamedTuple):
    """A caption of an image that stops early, and the same with one more detail: a true and a false one."""

    base: str
    """The first units of the caption, at least one."""
    positive: str
    """``base`` and the caption's next unit."""
    negative: str
    """``base`` and, in place of that unit, one from another image's caption, perhaps with its words shuffled."""


def make_triplets(
    captions: Sequence[str],
    seed: int,
    shuffle_rate: float = 0.9,
    per: Per = "unit",
    *,
    image_ids: Sequence[Hashable] | None = None,
    donors: Sequence[Donor] | None = None,
    tagger: Tagger | None = None,
) -> list[Triplet | None]:
    """Make one triplet of each of B captions.

    The length of the base is drawn uniformly from 1 to U - 1 of the caption's U units. The negative takes the unit at
    the same place of another caption, its last one where that caption is shorter; it never says what the positive says
    in the same words. Which captions it may come from: the others of the batch (the paper's in-batch negatives), or
    ``donors`` (the released code's, from the whole data set).

    Args:
        captions: [B] captions, whole.
        seed: of all draws; give another one each step. The result is a pure function of the arguments; with given
            ``donors``, a row's triplet does not depend on the other rows.
        shuffle_rate: share of negative units whose words are shuffled, in [0, 1].
        per: ``unit`` shuffles each negative unit with this probability (paper). ``row`` decides by the caption, so that
            a row has shuffled negatives always or never (released code, which shuffles the first rows of the file).
        image_ids: [B] what the captions belong to: no unit is taken from a caption of the same image. None: equal
            captions belong to one image, different ones to different images.
        donors: captions to take negative units from; None takes those of the batch.
        tagger: as for ``detail_units``.

    Returns:
        [B] triplets. None where the caption has fewer than two units, or no other caption has a unit for it.

    Raises:
        ValueError: ``shuffle_rate`` is not within 0 .. 1, ``per`` is neither, or another number of ``image_ids``.
    """
    if not 0 <= shuffle_rate <= 1:
        raise ValueError(f"shuffle_rate = {shuffle_rate}: expected a share in 0 .. 1")
    if per not in ("unit", "row"):
        raise ValueError(f"per = {per!r}: expected 'unit' or 'row'")
    if image_ids is not None and len(image_ids) != len(captions):
        raise ValueError(f"{len(image_ids)} image ids for {len(captions)} captions: expected one for each")
    units = [detail_units(caption, tagger) for caption in captions]
    owners = list(captions) if image_ids is None else list(image_ids)
    if donors is None:
        donors = [Donor(owner, own) for owner, own in zip(owners, units, strict=True)]
    return [
        _triplet(own, owner, donors, Draws("triplet", seed, str(owner), caption), shuffle_rate, per)
        for caption, own, owner in zip(captions, units, owners, strict=True)
    ]


def negative_unit(donors: Sequence[Donor], place: int, owner: Hashable, unlike: str, draws: Draws) -> str | None:
    """Draw a unit of another image's caption, in other words than ``unlike``.

    Args:
        donors: where it may come from.
        place: which unit of the donor, from 0; its last one where it has fewer.
        owner: image that no unit may come from.
        unlike: the true unit.
        draws: which donor is tried first.

    Returns:
        The unit as its caption has it; None where no donor has one.
    """
    start = draws.below(len(donors)) if donors else 0
    taken = _words(unlike)
    for step in range(len(donors)):
        donor = donors[(start + step) % len(donors)]
        if donor.units and donor.image_id != owner:
            unit = donor.units[min(place, len(donor.units) - 1)]
            if _words(unit) != taken:
                return unit
    return None


def _triplet(
    units: Sequence[str], owner: Hashable, donors: Sequence[Donor], draws: Draws, shuffle_rate: float, per: Per
) -> Triplet | None:
    if len(units) < 2:
        return None
    place = 1 + draws.below(len(units) - 1)
    unit = negative_unit(donors, place, owner, units[place], draws)
    if unit is None:
        return None
    # A row's own draw knows nothing of the seed: it is the same in every step.
    shuffled = (draws if per == "unit" else Draws("row", "".join(units))).chance(shuffle_rate)
    if shuffled:
        unit = shuffled_words(unit, draws)
    base = "".join(units[:place])
    return Triplet(base, base + units[place], continued(base, unit))


def continued(base: str, unit: str) -> str:
    """Append a unit of another caption to ``base``: a space where it brings none, no comma after a full stop."""
    if base[-1:] in _STOPS:
        unit = unit.lstrip(_SEPARATORS) or unit
    return base + ("" if unit[0].isspace() or unit[0] in _SEPARATORS else " ") + unit


def read_donors(path: str | Path, processes: int = 1) -> list[Donor]:
    """Read captions to take negative units from: offline negatives, as in the released code.

    Args:
        path: JSON in COCO result format, ``[{"image_id": ..., "caption": ...}, ...]``, one caption an image.
        processes: that cut captions into units.

    Raises:
        DataError: no such file, an image twice, or an empty caption.
        ValueError: ``processes`` is below 1.
    """
    captions = read_captions(path)
    units = detail_units_of(list(captions.values()), processes)
    return [Donor(image_id, own) for image_id, own in zip(captions, units, strict=True)]


def shuffled_words(unit: str, draws: Draws) -> str:
    """Put the words of a unit in random order; punctuation at its two ends stays there."""
    parts = _CORE.fullmatch(unit)
    if parts is None:
        return unit
    lead, core, tail = parts.groups()
    return lead + " ".join(draws.shuffled(core.split())) + tail


def _words(unit: str) -> list[str]:
    return sorted(re.findall(r"\w+", unit.lower()))
