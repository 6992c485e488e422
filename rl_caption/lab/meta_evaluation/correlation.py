"""How a metric's scores follow ratings: Kendall's tau_b and tau_c, Pearson's and Spearman's r.

With C concordant and D discordant pairs of n items, n_s pairs whose scores differ, n_r pairs whose
ratings differ, and m the smaller of the numbers of distinct scores and ratings,

    tau_b = (C - D) / sqrt(n_s n_r)                  (Kendall, Biometrika 1945)
    tau_c = 2 (C - D) / (n^2 (m - 1) / m)            (Stuart, Biometrika 1953)

both in [-1, 1]; papers print them times 100. Scores and ratings are [N] finite numbers; a
correlation that does not exist is NaN.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats


def kendall_tau_b(scores: ArrayLike, ratings: ArrayLike) -> float:
    return float(stats.kendalltau(scores, ratings).statistic)


def kendall_tau_c(scores: ArrayLike, ratings: ArrayLike) -> float:
    return float(stats.kendalltau(scores, ratings, variant="c").statistic)


def pearson(scores: ArrayLike, ratings: ArrayLike) -> float:
    """The product-moment correlation (Pearson 1895)."""
    return float(stats.pearsonr(scores, ratings).statistic)


def spearman(scores: ArrayLike, ratings: ArrayLike) -> float:
    """The rank correlation (Spearman 1904)."""
    return float(stats.spearmanr(scores, ratings).statistic)


def inverse_r_squared(scores: ArrayLike, ratings: ArrayLike) -> float:
    """1 / r^2 of Pearson's r, at least 1: what the SPECS paper prints as "1 - R^2" in its own rows."""
    correlation = pearson(scores, ratings)
    return 1 / correlation**2 if correlation else math.nan


def unexplained_variance(truth: ArrayLike, predictions: ArrayLike) -> float:
    """1 - R^2 without a fit, sum (t - p)^2 / sum (t - mean t)^2 of [N] values; 0 is perfect, no
    upper bound.
    """
    true, predicted = np.asarray(truth, np.float64), np.asarray(predictions, np.float64)
    spread = float(((true - true.mean()) ** 2).sum())
    return float(((true - predicted) ** 2).sum()) / spread if spread else math.nan


def tau_of_table(table: ArrayLike) -> tuple[float, float]:
    """tau_b and tau_c of a contingency table, for the bootstrap: ``kendalltau`` would sort all
    items again.

    ``table`` is [R, S], the number of items with the r-th smallest rating and the s-th smallest
    score. Ratings and scores without items are ignored.
    """
    counts = np.ascontiguousarray(table, np.float64)
    ratings, scores = counts.sum(axis=1), counts.sum(axis=0)
    smaller = min(int((ratings > 0).sum()), int((scores > 0).sum()))
    if smaller < 2:
        return math.nan, math.nan
    balance, lower_rated = 0.0, np.zeros(counts.shape[1])
    for row in counts:
        up_to = np.cumsum(row)
        # For an item of each score: those rated as this row is that score higher, less those that
        # score lower.
        balance += float(np.dot(lower_rated, (up_to[-1] - up_to) - (up_to - row)))
        lower_rated += row
    total = ratings.sum()
    differing = [total**2 - (margin**2).sum() for margin in (ratings, scores)]
    tau_b = 2 * balance / math.sqrt(differing[0] * differing[1])
    return tau_b, 2 * balance * smaller / (total**2 * (smaller - 1))


class GroupedTau(NamedTuple):
    """Tau_b within groups, averaged over groups."""

    mean: float
    """In [-1, 1]; NaN where no group has different ratings."""
    groups: int
    """Number of groups that were averaged."""
    constant_scores: int
    """Number of averaged groups whose scores are all equal; they count as 0."""


def grouped_tau_b(
    scores: Sequence[float], ratings: Sequence[float], groups: Sequence[Hashable]
) -> GroupedTau:
    """tau_b within each group (the captions of one image), averaged over groups; ``groups`` is [N].

    Groups whose ratings are all equal are left out, for every metric the same ones. Where only the
    scores are equal, tau_b is 0 / 0 and counts as 0: the metric orders nothing, and leaving such
    groups out would reward it.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    taus, constant = [], 0
    for indices in members.values():
        scored = [scores[index] for index in indices]
        rated = [ratings[index] for index in indices]
        if len(set(rated)) > 1:
            is_flat = len(set(scored)) == 1
            constant += is_flat
            taus.append(0.0 if is_flat else kendall_tau_b(scored, rated))
    return GroupedTau(math.fsum(taus) / len(taus) if taus else math.nan, len(taus), constant)


def group_numbers(groups: Sequence[Hashable]) -> NDArray[np.int64]:
    """[N] the number of the group of each item, in order of occurrence."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups])
