"""The figures that say how well a metric agrees with a set of judgements, and their bootstrap intervals over images.

Judgements of one image are not independent of each other, so images are drawn with replacement, each with all of its
judgements (Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rl_caption.evaluation.confidence import LEVEL, drawn_weights
from rl_caption.meta_evaluation.correlation import (
    UndefinedCorrelation,
    grouped_tau_b,
    kendall_tau_b,
    kendall_tau_c,
    pearson,
    sampled_spearman,
    tau_of_table,
)
from rl_caption.meta_evaluation.sets.base import CaptionPairs, RatedCaptions

Floats = NDArray[np.float64]
Interval = tuple[float, float]
NO_REFERENCES = ""
"""The condition of metrics that see no references."""
MAX_CELLS = 5_000_000
"""Largest table of ratings by scores: 40 MB. Where nearly all ratings differ, resamples are correlated item by item."""


@dataclass(frozen=True)
class Figure:
    """One number of one metric on one set."""

    name: str
    """Such as ``tau_c``, ``HC`` or ``4 references, all pairs``."""
    value: float | None
    """Kendall's tau in [-1, 1], or an accuracy in [0, 1]; None where it is not defined."""
    count: int
    """Judgements or pairs that it is computed from."""
    low: float | None = None
    """Bounds of the 95 % bootstrap interval, as ``high``; None where it was not asked for or is not defined."""
    high: float | None = None
    published: bool = False
    """Whether papers print this one for the set."""
    note: str = ""
    """Why it is not defined, and what one has to know."""


def rated_figures(part: RatedCaptions, scores: Sequence[float], resamples: int = 0, seed: int = 0) -> list[Figure]:
    """Correlate [N] scores with the ratings of a set.

    Args:
        part: the set.
        scores: [N] of its captions.
        resamples: of images, for intervals; 0 computes none.
        seed: of the resamples.

    Returns:
        ``tau_c`` and ``tau_b``, and ``pearson`` or ``spearman`` where that is published, the published one first, and
        ``tau_b within images`` where the set asks for it.

    Raises:
        ValueError: another number of scores, fewer than two, or one that is not finite.
    """
    measures: dict[tuple[str, ...], Callable[..., _Measured]] = {("tau_b", "tau_c"): _taus}
    if part.published == "pearson":
        measures["pearson",] = _pearson
    elif part.published == "spearman":
        measures["spearman",] = _sampled_spearman
    if part.within_images:
        measures["tau_b within images",] = _within_images
    found = []
    for names, measure in measures.items():
        values: Sequence[float | None]
        try:
            values, bounds, note = measure(part, scores, resamples, seed)
        except UndefinedCorrelation as error:
            values, bounds, note = [None] * len(names), [], str(error)
        for name, value, own in zip_longest(names, values, bounds):
            found.append(_figure(name, value, len(part.captions), own, name == part.published, note))
    return sorted(found, key=lambda figure: not figure.published)


_Measured = tuple[Sequence[float], Sequence[Interval | None], str]
"""Values, their intervals (none where they were not asked for), and what one has to know."""


def _taus(part: RatedCaptions, scores: Sequence[float], resamples: int, seed: int) -> _Measured:
    values = kendall_tau_b(scores, part.ratings), kendall_tau_c(scores, part.ratings)
    return values, tau_intervals(scores, part.ratings, part.image_ids, resamples, seed), ""


def _pearson(part: RatedCaptions, scores: Sequence[float], resamples: int, seed: int) -> _Measured:
    both = np.array([scores, part.ratings], np.float64)

    def correlation(weights: NDArray[np.int64]) -> Floats:
        with np.errstate(invalid="ignore"):  # a resample may have one value only: NaN
            return np.asarray(np.corrcoef(np.repeat(both, weights, axis=1)))[:1, 1]

    return [pearson(scores, part.ratings)], intervals(correlation, part.image_ids, resamples, seed), ""


def _sampled_spearman(part: RatedCaptions, scores: Sequence[float], resamples: int, seed: int) -> _Measured:
    found = sampled_spearman(scores, part.ratings, part.captions, seed=seed)
    note = (
        f"spearman is the mean over {len(found)} samples of half of the captions, each with one of its images; their "
        f"standard deviation is {100 * found.std():.1f}"
    )
    return [float(found.mean())], [], note


def _within_images(part: RatedCaptions, scores: Sequence[float], resamples: int, seed: int) -> _Measured:
    grouped = grouped_tau_b(scores, part.ratings, part.image_ids)
    note = f"mean over {grouped.groups} images; {grouped.constant_scores} of them, scored all alike, count 0"
    return [grouped.mean], [], note


def pair_figures(
    part: CaptionPairs,
    first: Mapping[str, Sequence[float]],
    second: Mapping[str, Sequence[float]],
    resamples: int = 0,
    seed: int = 0,
) -> list[Figure]:
    """Compute how often scores prefer the caption that is better.

    Args:
        part: the set.
        first: condition of the references -> [P] scores of the first captions; ``NO_REFERENCES`` alone for a metric
            that sees none.
        second: the same of the second captions.
        resamples: of images, for intervals; 0 computes none.
        seed: of the resamples.

    Returns:
        For each condition (or for their average, where they are draws): the kinds, where the set shows them, and a
        summary: ``all pairs``, or ``mean of kinds``.

    Raises:
        ValueError: other conditions or another number of scores.
    """
    if first.keys() != second.keys() or not first:
        raise ValueError(f"scores of the conditions {list(first)} and {list(second)}: expected the same, at least one")
    won = {name: wins(first[name], second[name], part.preference, part.ties) for name in first}
    if part.averaged:
        won = {NO_REFERENCES: np.mean(list(won.values()), axis=0)}
    found = []
    for name, values in won.items():
        tied = np.mean(np.asarray(first[name]) == np.asarray(second[name])) if name in first else 0.0
        prefix = f"{name}, " if name else ""
        note = f"{prefix}{100 * tied:.1f} % of pairs have equal scores, which count as {part.ties}" if tied else ""
        found += _accuracies(part, values, prefix, note, resamples, seed)
    return found


def wins(first: Sequence[float], second: Sequence[float], preference: Sequence[float], ties: str = "wrong") -> Floats:
    """Return what each of [P] pairs counts: 1 if scores prefer the better caption, 0 if not.

    Pairs on which people are divided evenly (preference 0.5) count 0.5. Equal scores count 0, or 0.5 where ``ties`` is
    ``half``.

    Raises:
        ValueError: other numbers of scores, or one that is not finite.
    """
    left, right, better = (np.asarray(values, np.float64) for values in (first, second, preference))
    if not left.shape == right.shape == better.shape or left.ndim != 1 or not len(left):
        raise ValueError(f"{len(left)} and {len(right)} scores for {len(better)} pairs: expected as many, at least 1")
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        raise ValueError("a score is not finite")
    won = np.where(better == 1, left > right, right > left).astype(np.float64)
    if ties == "half":
        won[left == right] = 0.5
    won[better == 0.5] = 0.5
    return won


def _accuracies(part: CaptionPairs, won: Floats, prefix: str, note: str, resamples: int, seed: int) -> list[Figure]:
    kinds = list(dict.fromkeys(part.kinds))
    numbers = {kind: number for number, kind in enumerate(kinds)}
    kind_indices = np.array([numbers[kind] for kind in part.kinds])

    def rates(weights: NDArray[np.int64]) -> Floats:
        """The accuracy of each kind, then the summary."""
        counts = np.bincount(kind_indices, weights, len(kinds))
        with np.errstate(invalid="ignore"):  # a resample may lack a kind: NaN
            own = np.bincount(kind_indices, weights * won, len(kinds)) / counts
        # A kind that a resample lacks is left out of its mean.
        summary = (weights * won).sum() / weights.sum() if part.summary == "pairs" else np.nanmean(own)
        return np.append(own, summary)

    values = rates(np.ones(len(won), np.int64))
    bounds = intervals(rates, part.image_ids, resamples, seed) or [None] * len(values)
    found = []
    if part.shown_kinds:
        for kind, value, own in zip(kinds, values, bounds, strict=False):
            found.append(_figure(prefix + kind, value, int((kind_indices == numbers[kind]).sum()), own, note=note))
    title = "mean of kinds" if part.summary == "kinds" and len(kinds) > 1 else "all pairs"
    found.append(_figure(prefix + title, values[-1], len(won), bounds[-1], note=note))
    return found


def _figure(
    name: str, value: float | None, count: int, bounds: Interval | None, published: bool = True, note: str = ""
) -> Figure:
    low, high = bounds or (None, None)
    return Figure(name, None if value is None else float(value), count, low, high, published, note)


def intervals(
    statistic: Callable[[NDArray[np.int64]], Sequence[float] | Floats],
    groups: Sequence[Hashable],
    resamples: int = 1000,
    seed: int = 0,
) -> list[Interval | None]:
    """Compute the 95 % percentile intervals of K statistics of weighted items.

    Args:
        statistic: takes [N] whole numbers, how often each item counts, and returns [K] values; NaN is not defined.
        groups: [N] what each item belongs to (its image).
        resamples: 0 computes none.
        seed: of the draws.

    Returns:
        [K] (low, high), or None where a resample has no value; empty without resamples.
    """
    found = np.array([statistic(weights) for weights in drawn_weights(groups, resamples, seed)], np.float64)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    bounds = [np.quantile(column, ends).tolist() if np.isfinite(column).all() else None for column in found.T]
    return [None if own is None else (own[0], own[1]) for own in bounds]


def tau_intervals(
    scores: Sequence[float], ratings: Sequence[float], groups: Sequence[Hashable], resamples: int = 1000, seed: int = 0
) -> list[Interval | None]:
    """Compute the 95 % percentile intervals of tau_b and tau_c of [N] scores and ratings.

    Args:
        scores: [N].
        ratings: [N].
        groups, resamples, seed: as for ``intervals``.

    Returns:
        (low, high) of tau_b and of tau_c, or None where a resample has no correlation; empty without resamples.
    """
    levels, score_ranks = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    rated, rating_ranks = np.unique(np.asarray(ratings, np.float64), return_inverse=True)
    cells = rating_ranks * len(levels) + score_ranks

    def taus(weights: NDArray[np.int64]) -> Sequence[float]:
        """tau_b and tau_c of one resample."""
        try:
            if len(rated) * len(levels) > MAX_CELLS:
                items = np.repeat(np.arange(len(cells)), weights)
                drawn = score_ranks[items].tolist(), rating_ranks[items].tolist()
                return kendall_tau_b(*drawn), kendall_tau_c(*drawn)
            table = np.bincount(cells, weights, len(rated) * len(levels))
            return tau_of_table(table.reshape(len(rated), len(levels)))
        except UndefinedCorrelation:
            return np.nan, np.nan

    return intervals(taus, groups, resamples, seed)
