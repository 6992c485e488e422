"""Bootstrap intervals of agreement with people, over images.

Source: Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics 1979. Judgements of one image
are not independent of each other, so images are drawn with replacement, each with all of its judgements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from rl_caption.meta_evaluation.correlation import UndefinedCorrelation, kendall_tau_b, kendall_tau_c, tau_of_table

LEVEL = 0.95
MAX_CELLS = 5_000_000
"""Largest table of ratings by scores: 40 MB. Where nearly all ratings differ, resamples are correlated item by item."""
Floats = NDArray[np.float64]
Interval = tuple[float, float]


def drawn_weights(groups: Sequence[Hashable], resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield, for each resample, how often each of [N] items is in it when groups are drawn with replacement.

    Args:
        groups: [N] what each item belongs to (its image).
        resamples: how many.
        seed: of the draws.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    owners = np.array([numbers[group] for group in groups])
    generator = np.random.default_rng(seed)
    count = len(numbers)
    for _ in tqdm(range(resamples), "bootstrap", unit="resample", leave=False, delay=2, disable=None):
        yield np.bincount(generator.integers(count, size=count), minlength=count)[owners]


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
    return [percentiles(column) if np.isfinite(column).all() else None for column in found.T]


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
    levels, score_places = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    rated, rating_places = np.unique(np.asarray(ratings, np.float64), return_inverse=True)
    cells = rating_places * len(levels) + score_places

    def taus(weights: NDArray[np.int64]) -> Sequence[float]:
        """tau_b and tau_c of one resample."""
        try:
            if len(rated) * len(levels) > MAX_CELLS:
                items = np.repeat(np.arange(len(cells)), weights)
                drawn = score_places[items].tolist(), rating_places[items].tolist()
                return kendall_tau_b(*drawn), kendall_tau_c(*drawn)
            table = np.bincount(cells, weights, len(rated) * len(levels))
            return tau_of_table(table.reshape(len(rated), len(levels)))
        except UndefinedCorrelation:
            return np.nan, np.nan

    return intervals(taus, groups, resamples, seed)


def percentiles(values: NDArray[Any]) -> Interval:
    """Return the bounds of the middle 95 % of [M] values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
