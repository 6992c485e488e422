"""How a metric's scores follow ratings: Kendall's tau_b and tau_c, Pearson's and Spearman's r.

With C concordant and D discordant pairs of n items, n_s pairs whose scores differ, n_r pairs whose
ratings differ, and m the smaller of the numbers of distinct scores and ratings,

    tau_b = (C - D) / sqrt(n_s n_r)                  (Kendall, Biometrika 1945)
    tau_c = 2 (C - D) / (n^2 (m - 1) / m)            (Stuart, Biometrika 1953)

both in [-1, 1]; papers print them times 100. Correlations are computed by ``scipy.stats``; where it
returns NaN, ``UndefinedCorrelation`` is raised. Scores and ratings are [N >= 2] finite numbers;
others are a ``ValueError``.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = Sequence[float]


class UndefinedCorrelation(ValueError):
    """A correlation does not exist: all scores or all ratings are equal."""


def _correlation(
    function: Callable[..., Any], name: str, **variant: str
) -> Callable[[Floats, Floats], float]:
    def correlation(scores: Floats, ratings: Floats) -> float:
        """A correlation of [N] scores with [N] ratings, in [-1, 1]."""
        check_scores(scores, ratings)
        for what, values in (("scores", scores), ("ratings", ratings)):
            if len(set(values)) == 1:
                raise UndefinedCorrelation(
                    f"all {len(values)} {what} are {values[0]:g}: {name} is not defined"
                )
        return float(function(scores, ratings, **variant).statistic)

    return correlation


kendall_tau_b = _correlation(stats.kendalltau, "Kendall's tau", variant="b")
kendall_tau_c = _correlation(stats.kendalltau, "Kendall's tau", variant="c")
pearson = _correlation(stats.pearsonr, "Pearson's r")
"""The product-moment correlation (Pearson 1895)."""
spearman = _correlation(stats.spearmanr, "Spearman's r")
"""The rank correlation (Spearman 1904)."""


def check_scores(scores: Sequence[float], ratings: Sequence[float]) -> None:
    """Refuse other numbers of scores than of ratings, fewer than two, and NaN."""
    if len(scores) != len(ratings) or len(scores) < 2:
        raise ValueError(f"{len(scores)} scores and {len(ratings)} ratings: expected equally many")
    if not np.isfinite([scores, ratings]).all():
        raise ValueError("a score or a rating is not a finite number")


def tau_of_table(table: NDArray[Any]) -> tuple[float, float]:
    """Return tau_b and tau_c of a contingency table. The bootstrap uses it: ``kendalltau`` would
    sort all items again.

    ``table`` is [R, S], the number of items with the r-th smallest rating and the s-th smallest
    score. Ratings and scores without items are ignored.
    """
    counts = np.ascontiguousarray(table, np.float64)
    ratings, scores = counts.sum(axis=1), counts.sum(axis=0)
    smaller = min(int((ratings > 0).sum()), int((scores > 0).sum()))
    if smaller < 2:
        raise UndefinedCorrelation(
            "fewer than two different scores or ratings: Kendall's tau is not defined"
        )
    balance, lower_rated = 0.0, np.zeros(counts.shape[1])
    for row in counts:
        up_to = np.cumsum(row)
        # For an item of each score: those rated as this row is that score higher, less those that
        # score lower.
        balance += float(np.dot(lower_rated, (up_to[-1] - up_to) - (up_to - row)))
        lower_rated += row
    total = ratings.sum()
    different = [total**2 - (margin**2).sum() for margin in (ratings, scores)]
    return 2 * balance / math.sqrt(different[0] * different[1]), 2 * balance * smaller / (
        total**2 * (smaller - 1)
    )


class GroupedTau(NamedTuple):
    """Tau_b within groups, averaged over groups."""

    mean: float
    """In [-1, 1]."""
    groups: int
    """Number of groups that were averaged."""
    left_out: int
    """Number of groups whose ratings are all equal, so that there is nothing to order."""
    constant_scores: int
    """Number of averaged groups whose scores are all equal; they count as 0."""


def grouped_tau_b(
    scores: Sequence[float], ratings: Sequence[float], groups: Sequence[Hashable]
) -> GroupedTau:
    """Return tau_b within each group (the captions of one image), averaged over groups; ``groups``
    is [N].

    Groups whose ratings are all equal are left out, for every metric the same ones. Where only the
    scores are equal,
    tau_b is 0 / 0 and counts as 0: the metric orders nothing, and leaving such groups out would
    reward it.
    """
    check_scores(scores, ratings)
    members: dict[Hashable, list[int]] = {}
    for index, (group, _) in enumerate(zip(groups, scores, strict=True)):
        members.setdefault(group, []).append(index)
    taus, constant = [], 0
    for indices in members.values():
        scored, rated = [scores[index] for index in indices], [ratings[index] for index in indices]
        if len(set(rated)) > 1:
            flat = len(set(scored)) == 1
            constant += flat
            taus.append(0.0 if flat else kendall_tau_b(scored, rated))
    if not taus:
        raise UndefinedCorrelation(
            f"none of {len(members)} groups has different ratings: there is nothing to order"
        )
    return GroupedTau(math.fsum(taus) / len(taus), len(taus), len(members) - len(taus), constant)


def inverse_r_squared(scores: Sequence[float], ratings: Sequence[float]) -> float:
    """Return 1 / r^2 of Pearson's r, at least 1: what the SPECS paper prints as "1 - R^2" in its
    own rows.
    """
    correlation = pearson(scores, ratings)
    if correlation == 0:
        raise UndefinedCorrelation("Pearson's r is 0: 1 / r^2 is not defined")
    return 1 / correlation**2


def unexplained_variance(truth: Sequence[float], predictions: Sequence[float]) -> float:
    """Return 1 - R^2 without a fit, sum (t - p)^2 / sum (t - mean t)^2 of [N] values; 0 is perfect,
    no upper bound.
    """
    mean = math.fsum(truth) / len(truth)
    spread = math.fsum((value - mean) ** 2 for value in truth)
    if len(set(truth)) == 1 or spread == 0:
        raise UndefinedCorrelation(f"all {len(truth)} values are {truth[0]:g}: R^2 is not defined")
    return math.fsum((t - p) ** 2 for t, p in zip(truth, predictions, strict=True)) / spread


def group_numbers(groups: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return [N] the number of the group of each item, in order of occurrence."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups])
