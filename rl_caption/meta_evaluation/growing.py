"""Captions that grow detail by detail: chains for the specificity rate, and agreement with the oracle by length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tqdm import tqdm

from rewards.text.detail_units import detail_units_of
from rewards.text.pos_tags import Tagger
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import hard_negatives, oracle
from rl_caption.data.scenes.draws import Draws
from rl_caption.meta_evaluation.correlation import UndefinedCorrelation, grouped_tau_b, kendall_tau_b
from rl_caption.meta_evaluation.specificity import Chain
from rl_caption.reward_models.triplets import Donor, continued, negative_unit, shuffled_words

EDGES = (0, 10, 20, 30, 45)
"""Bins of words: 0 to 9, 10 to 19, 20 to 29, 30 to 44, 45 and more."""


def make_chains(
    captions: Sequence[str],
    seed: int = 0,
    shuffle_rate: float = 0.0,
    image_ids: Sequence[Hashable] | None = None,
    donors: Sequence[Donor] | None = None,
    tagger: Tagger | None = None,
    processes: int = 1,
) -> list[Chain | None]:
    """Grow N captions unit by unit, with a negative at each step, for ``rl_caption.meta_evaluation.specificity``.

    Negatives are made as those of ``make_triplets``: the next unit is replaced by one of another image. A chain ends
    early where no other image has a unit for it.

    Args:
        captions: [N] whole captions.
        seed: which units; the result is a pure function of the arguments.
        shuffle_rate: share of negative units whose words are shuffled; none as in the released evaluation, so that a
            metric cannot win by noticing broken English.
        image_ids: [N] no unit is taken from a caption of the same image. None: equal captions are one image's.
        donors: captions to take units from; None takes all N.
        tagger, processes: as for ``detail_units_of``.

    Returns:
        [N] chains of 2 captions or more; None where a caption has one unit, or no step has a negative.

    Raises:
        ValueError: another number of ``image_ids``.
    """
    if image_ids is not None and len(image_ids) != len(captions):
        raise ValueError(f"{len(image_ids)} image ids for {len(captions)} captions: expected one for each")
    units = detail_units_of(captions, processes, tagger)
    owners = list(captions) if image_ids is None else list(image_ids)
    pool = [Donor(owner, own) for owner, own in zip(owners, units, strict=True)] if donors is None else donors
    chains: list[Chain | None] = []
    for caption, own, owner in zip(captions, units, owners, strict=True):
        draws = Draws("chain", seed, str(owner), caption)
        grown, negatives = list(accumulate(own)), []
        for place in range(1, len(own)):
            unit = negative_unit(pool, place, owner, own[place], draws)
            if unit is None:
                break
            shuffled = shuffled_words(unit, draws) if draws.chance(shuffle_rate) else unit
            negatives.append(continued(grown[place - 1], shuffled))
        chains.append(Chain(grown[: len(negatives) + 1], negatives) if negatives else None)
    return chains


@dataclass(frozen=True)
class GrownCaption:
    """A caption of one scene and what the oracle says of it."""

    row: int
    """Which of the scenes."""
    text: str
    source: str
    """``prefix``, ``unit of another scene`` or ``hard negative``."""
    words: int
    f1: float
    """Oracle F1, in [0, 1]."""
    precision: float
    """Oracle precision, in [0, 1]."""


def grown_captions(rows: Sequence[Row], chains: Sequence[Chain | None], seed: int = 0) -> list[GrownCaption]:
    """Judge captions of growing length for R scenes: true ones, and false ones of the same lengths.

    The texts of each scene's chain (its long description cut short after each detail, and the same with a detail of
    another scene), and one hard negative of each true one: one word or number edited, of a kind drawn at random. Every
    text of a scene is judged once.

    Args:
        rows: [R] scenes.
        chains: [R] of the scenes' long descriptions.
        seed: which hard negatives.

    Raises:
        DataError: a row has no scene.
    """
    found: list[GrownCaption] = []
    pairs = list(zip(rows, chains, strict=True))
    for number, (row, chain) in enumerate(tqdm(pairs, desc="judging captions", unit="scene", delay=2, disable=None)):
        if row.get("scene") is None:
            raise DataError(f"image {row['image_id']!r} has no scene: only data.format scenes knows the truth")
        if chain is None:
            continue
        draws = Draws("grown", seed, row["image_id"])
        texts = dict.fromkeys(chain.captions, "prefix")
        for text in chain.negatives:
            texts.setdefault(text, "unit of another scene")
        for text in chain.captions:
            negatives = [negative for _, negative in hard_negatives(row["scene"], text, seed)]
            if negatives:
                texts.setdefault(draws.choice(negatives), "hard negative")
        for text, source in texts.items():
            judged = oracle(text, row["scene"])
            found.append(GrownCaption(number, text, source, len(text.split()), judged.f1, judged.precision))
    return found


@dataclass(frozen=True)
class LengthBin:
    """How a metric agrees with oracle F1 among captions of one length. What is not defined is None."""

    low: int
    """Fewest words."""
    high: int | None
    """Most words; None for the last bin, which has no upper end."""
    captions: int
    tau_b: float | None
    """Over all captions of the bin, in [-1, 1]."""
    within_scene_tau_b: float | None
    """Among the captions of one scene, averaged over scenes, in [-1, 1]."""
    scenes: int
    """Scenes in that mean."""


def tau_by_length(
    scores: Sequence[float], captions: Sequence[GrownCaption], edges: Sequence[int] = EDGES
) -> list[LengthBin]:
    """Compare [N] scores with oracle F1 in bins of words, and over all lengths.

    Longer captions of a description tell more, so a metric that pays for length alone agrees well over all lengths. It
    does less so within a bin, where lengths differ less; give its tau beside that of a metric.

    Args:
        scores: [N] of the captions.
        captions: [N].
        edges: fewest words of each bin, increasing.

    Returns:
        A bin for each edge, then one over all.

    Raises:
        ValueError: another number of scores, one that is not finite, or edges that do not increase.
    """
    if len(scores) != len(captions):
        raise ValueError(f"{len(scores)} scores for {len(captions)} captions: expected as many")
    if not edges or any(after <= before for before, after in pairwise(edges)):
        raise ValueError(f"edges = {list(edges)}: expected increasing numbers of words")
    members: list[list[int]] = [[] for _ in edges]
    for index, caption in enumerate(captions):
        place = bisect_right(edges, caption.words) - 1
        if place >= 0:
            members[place].append(index)
    ends = [*(edge - 1 for edge in edges[1:]), None]
    bins = [_bin(low, high, own, scores, captions) for low, high, own in zip(edges, ends, members, strict=True)]
    return [*bins, _bin(0, None, range(len(captions)), scores, captions)]


def _bin(
    low: int, high: int | None, members: Sequence[int], scores: Sequence[float], captions: Sequence[GrownCaption]
) -> LengthBin:
    own, f1 = [scores[index] for index in members], [captions[index].f1 for index in members]
    if len(own) < 2:
        return LengthBin(low, high, len(own), None, None, 0)
    tau = within = None
    scenes = 0
    try:
        tau = kendall_tau_b(own, f1)
        grouped = grouped_tau_b(own, f1, [captions[index].row for index in members])
        within, scenes = grouped.mean, grouped.groups
    except UndefinedCorrelation:
        pass  # what is not defined stays None
    return LengthBin(low, high, len(own), tau, within, scenes)
