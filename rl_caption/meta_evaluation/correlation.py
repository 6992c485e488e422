"""How a metric's scores follow ratings: Kendall's tau_b and tau_c, Pearson's r, and accuracy on pairs.

With n rated items, look at all n(n-1)/2 pairs. A pair is concordant (C of them) where scores and ratings order it
alike, discordant (D) where they order it oppositely, and tied where either is equal. With n_s the number of pairs whose
scores differ, n_r of those whose ratings differ, and m the smaller of the numbers of distinct scores and ratings,

    tau_b = (C - D) / sqrt(n_s n_r)                  (Kendall, Biometrika 1945)
    tau_c = 2 (C - D) / (n^2 (m - 1) / m)            (Stuart, Biometrika 1953; also called Stuart's tau_c)

Both are in [-1, 1]. tau_b reaches 1 only where both rankings have the same ties; tau_c is meant for ratings with fewer
steps than the scores have. Papers print both times 100.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class UndefinedCorrelation(ValueError):
    """A correlation does not exist: all scores or all ratings are equal."""


def kendall_tau_b(scores: Sequence[float], ratings: Sequence[float]) -> float:
    """Compute tau_b of [N] scores against [N] ratings, in [-1, 1].

    Raises:
        UndefinedCorrelation: all scores or all ratings are equal.
        ValueError: other numbers of scores than of ratings, fewer than two, or one that is not finite.
    """
    return _tau(scores, ratings, "b")


def kendall_tau_c(scores: Sequence[float], ratings: Sequence[float]) -> float:
    """Compute tau_c of [N] scores against [N] ratings, in [-1, 1].

    Raises:
        UndefinedCorrelation, ValueError: as for ``kendall_tau_b``.
    """
    return _tau(scores, ratings, "c")


def tau_of_table(table: NDArray[Any]) -> tuple[float, float]:
    """Compute tau_b and tau_c of a contingency table: the same as of the items that it counts.

    For the bootstrap: ``scipy.stats.kendalltau`` would sort all items again at every resample.

    Args:
        table: [R, S] numbers of items with the r-th smallest rating and the s-th smallest score. Rows and columns
            without items do not count as values.

    Returns:
        tau_b and tau_c, both in [-1, 1].

    Raises:
        UndefinedCorrelation: fewer than two scores or ratings occur.
    """
    counts = np.ascontiguousarray(table, np.float64)
    ratings, scores = counts.sum(axis=1), counts.sum(axis=0)
    smaller = min(int((ratings > 0).sum()), int((scores > 0).sum()))
    if smaller < 2:
        raise UndefinedCorrelation("fewer than two different scores or ratings: Kendall's tau is not defined")
    balance, lower_rated = 0.0, np.zeros(counts.shape[1])
    for row in counts:
        up_to = np.cumsum(row)
        # For an item of each score: those rated as this row is that score higher, less those that score lower.
        balance += float(np.dot(lower_rated, (up_to[-1] - up_to) - (up_to - row)))
        lower_rated += row
    total = ratings.sum()
    different = [total**2 - (margin**2).sum() for margin in (ratings, scores)]
    return 2 * balance / math.sqrt(different[0] * different[1]), 2 * balance * smaller / (total**2 * (smaller - 1))


def sampled_spearman(
    scores: Sequence[float], ratings: Sequence[float], queries: Sequence[Hashable], samples: int = 1000, seed: int = 0
) -> NDArray[np.float64]:
    """Compute Spearman's correlation of samples of [N] items: half of the queries, one item of each.

    Source: Parekh et al., "Crisscrossed Captions", EACL 2021, section 5, which prints the mean over the samples.

    Args:
        scores: [N].
        ratings: [N].
        queries: [N] what each item belongs to.
        samples: how many.
        seed: of the samples.

    Returns:
        [samples], in [-1, 1].

    Raises:
        UndefinedCorrelation: all scores or all ratings of a sample are equal.
        ValueError: as for ``kendall_tau_b``, or another number of queries.
    """
    from scipy.stats import spearmanr

    check_scores(scores, ratings)
    if len(queries) != len(scores):
        raise ValueError(f"{len(queries)} queries for {len(scores)} scores: expected one for each")
    numbers = {query: number for number, query in enumerate(dict.fromkeys(queries))}
    owners = np.array([numbers[query] for query in queries])
    order, counts = np.argsort(owners, kind="stable"), np.bincount(owners)
    starts = np.cumsum(counts) - counts
    both = np.array([scores, ratings], np.float64)
    generator, found = np.random.default_rng(seed), np.empty(samples)
    for sample in range(samples):
        chosen = generator.permutation(len(counts))[: max(len(counts) // 2, 1)]
        items = order[starts[chosen] + generator.integers(counts[chosen])]
        drawn = both[:, items]
        if (drawn == drawn[:, :1]).all(axis=1).any():
            raise UndefinedCorrelation(
                f"all scores or all ratings of a sample of {len(items)} items are equal: Spearman's r is not defined"
            )
        found[sample] = spearmanr(*drawn).statistic
    return found


class GroupedTau(NamedTuple):
    """Tau_b within groups, averaged."""

    mean: float
    """In [-1, 1]."""
    groups: int
    """Groups averaged: those with different ratings."""
    left_out: int
    """Groups without different ratings: there is nothing to order."""
    constant_scores: int
    """Groups averaged as 0 because all their scores are equal."""


def grouped_tau_b(scores: Sequence[float], ratings: Sequence[float], groups: Sequence[Hashable]) -> GroupedTau:
    """Compute tau_b within each group (the captions of one image) and average over groups.

    Groups whose ratings are all equal are left out: which ones, the ratings alone decide, so all metrics are averaged
    over the same groups. Where only the scores are equal, tau_b is 0 / 0 and counts as 0, as its numerator says: the
    metric orders nothing. Leaving such groups out would reward it.

    Args:
        scores: [N].
        ratings: [N].
        groups: [N] what each item belongs to.

    Raises:
        UndefinedCorrelation: no group has different ratings.
        ValueError: as for ``kendall_tau_b``, or another number of groups.
    """
    check_scores(scores, ratings)
    if len(groups) != len(scores):
        raise ValueError(f"{len(groups)} groups for {len(scores)} scores: expected one for each")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    taus, constant = [], 0
    for indices in members.values():
        own, rated = [scores[index] for index in indices], [ratings[index] for index in indices]
        if len(set(rated)) > 1:
            flat = len(set(own)) == 1
            constant += flat
            taus.append(0.0 if flat else kendall_tau_b(own, rated))
    if not taus:
        raise UndefinedCorrelation(f"none of {len(members)} groups has different ratings: there is nothing to order")
    return GroupedTau(math.fsum(taus) / len(taus), len(taus), len(members) - len(taus), constant)


def pearson(scores: Sequence[float], ratings: Sequence[float]) -> float:
    """Compute the product-moment correlation of [N] scores with [N] ratings, in [-1, 1] (Pearson 1895).

    Raises:
        UndefinedCorrelation, ValueError: as for ``kendall_tau_b``.
    """
    from scipy.stats import pearsonr

    _check_defined(scores, ratings, "Pearson's r")
    return float(pearsonr(scores, ratings).statistic)


def unfitted(truth: Sequence[float], predictions: Sequence[float]) -> float:
    """Compute 1 - R^2 without a fit: sum (t - p)^2 / sum (t - mean t)^2 of [N] values; 0 is perfect, above 1 is worse
    than the mean.

    Raises:
        UndefinedCorrelation: all of ``truth`` is one value.
    """
    mean = math.fsum(truth) / len(truth)
    spread = math.fsum((value - mean) ** 2 for value in truth)
    if len(set(truth)) == 1 or spread == 0:
        raise UndefinedCorrelation(f"all {len(truth)} values are {truth[0]:g}: R^2 is not defined")
    return math.fsum((t - p) ** 2 for t, p in zip(truth, predictions, strict=True)) / spread


def _tau(scores: Sequence[float], ratings: Sequence[float], variant: str) -> float:
    from scipy.stats import kendalltau

    _check_defined(scores, ratings, "Kendall's tau")
    return float(kendalltau(scores, ratings, variant=variant).statistic)


def _check_defined(scores: Sequence[float], ratings: Sequence[float], name: str) -> None:
    check_scores(scores, ratings)
    for what, values in (("scores", scores), ("ratings", ratings)):
        if len(set(values)) == 1:
            raise UndefinedCorrelation(f"all {len(values)} {what} are {values[0]:g}: {name} is not defined")


def check_scores(scores: Sequence[float], ratings: Sequence[float]) -> None:
    """Check [N] scores against [N] ratings.

    Raises:
        ValueError: other numbers of scores than of ratings, fewer than two, or one that is not finite.
    """
    if len(scores) != len(ratings):
        raise ValueError(f"{len(scores)} scores and {len(ratings)} ratings: expected as many")
    if len(scores) < 2:
        raise ValueError(f"{len(scores)} scores: a correlation needs at least 2")
    for name, values in (("score", scores), ("rating", ratings)):
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise ValueError(f"{name} {index} is {value!r}: expected a finite number")


ALL = "all"
"""Key of the accuracy over all pairs together."""


def pairwise_accuracy(correct: Sequence[float], wrong: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """Compute the share of pairs with correct > wrong, strictly: a tie is a failure.

    Strict as in FOIL (Shekhar et al., ACL 2017) and SugarCrepe (Hsieh et al., NeurIPS 2023). A metric that ties by
    design, such as sentence BLEU-4 at 0, loses those pairs; one that guesses wins half of them.

    Args:
        correct: [P] scores of the correct captions.
        wrong: [P] scores of their wrong partners.
        kinds: [P] kind of each pair, such as ``swap_object``.

    Returns:
        Kind -> accuracy in [0, 1], in the order in which kinds first occur, then ``all`` over all pairs, so that kinds
        weigh by their numbers.

    Raises:
        ValueError: no pairs, lists of different lengths, a kind named ``all``, or a score that is not finite.
    """
    if not correct or not len(correct) == len(wrong) == len(kinds):
        raise ValueError(
            f"{len(correct)} correct, {len(wrong)} wrong scores and {len(kinds)} kinds: expected as many, at least 1"
        )
    wins: dict[str, list[bool]] = {}
    for index, (good, bad, kind) in enumerate(zip(correct, wrong, kinds, strict=True)):
        if kind == ALL:
            raise ValueError(f"pair {index} is of the kind {ALL!r}, which stands for all pairs: give it another name")
        if not (math.isfinite(good) and math.isfinite(bad)):
            raise ValueError(f"pair {index} has the scores {good!r} and {bad!r}: expected finite numbers")
        wins.setdefault(kind, []).append(good > bad)
    every = [won for own in wins.values() for won in own]
    return {kind: sum(own) / len(own) for kind, own in wins.items()} | {ALL: sum(every) / len(every)}
