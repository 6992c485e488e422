"""Kendall's tau and pairwise accuracy against arithmetic by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from rl_caption.meta_evaluation.correlation import (
    UndefinedCorrelation,
    grouped_tau_b,
    kendall_tau_b,
    kendall_tau_c,
    pairwise_accuracy,
)

SCORES = [0.1, 0.4, 0.4, 0.9, 0.7]
RATINGS = [1.0, 1.0, 2.0, 3.0, 3.0]
# The ten pairs (i, j): 01 rating tied; 02 C; 03 C; 04 C; 12 score tied; 13 C; 14 C; 23 C; 24 C; 34 rating tied.
# C = 7, D = 0. Scores differ in 9 pairs, ratings in 8.


def test_tau_b_with_ties_by_hand():
    assert kendall_tau_b(SCORES, RATINGS) == pytest.approx((7 - 0) / math.sqrt(9 * 8))


def test_tau_c_with_ties_by_hand():
    # n = 5; scores have 4 distinct values, ratings 3, so m = 3.
    assert kendall_tau_c(SCORES, RATINGS) == pytest.approx(2 * 7 / (5**2 * (3 - 1) / 3))


def test_a_discordant_pair_by_hand():
    # Pairs: 01 C, 02 C, 12 D. n = 3, m = 3.
    assert kendall_tau_b([1, 3, 2], [1, 2, 3]) == pytest.approx(1 / 3)
    assert kendall_tau_c([1, 3, 2], [1, 2, 3]) == pytest.approx(2 * 1 / (9 * 2 / 3))
    assert kendall_tau_b([3, 2, 1], [1, 2, 3]) == pytest.approx(-1)


def test_against_counting_all_pairs():
    scores = [((7 * index) % 11) / 3 for index in range(40)]
    ratings = [float((5 * index * index) % 4) for index in range(40)]
    concordant = scores_differ = ratings_differ = 0
    for i, j in itertools.combinations(range(40), 2):
        s, r = scores[i] - scores[j], ratings[i] - ratings[j]
        concordant += (s * r > 0) - (s * r < 0)
        scores_differ += s != 0
        ratings_differ += r != 0
    m = min(len(set(scores)), len(set(ratings)))
    assert kendall_tau_b(scores, ratings) == pytest.approx(concordant / math.sqrt(scores_differ * ratings_differ))
    assert kendall_tau_c(scores, ratings) == pytest.approx(2 * concordant / (40**2 * (m - 1) / m))


@pytest.mark.parametrize("tau", [kendall_tau_b, kendall_tau_c])
def test_what_has_no_tau_is_an_error_and_no_number(tau):
    with pytest.raises(UndefinedCorrelation, match=r"all 3 scores are 0\.5: Kendall's tau is not defined"):
        tau([0.5, 0.5, 0.5], [1, 2, 3])
    with pytest.raises(UndefinedCorrelation, match="all 2 ratings are 2"):
        tau([0.5, 0.6], [2, 2])
    with pytest.raises(ValueError, match="2 scores and 3 ratings"):
        tau([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="at least 2"):
        tau([1], [1])
    with pytest.raises(ValueError, match="score 1 is nan"):
        tau([1, math.nan], [1, 2])
    with pytest.raises(ValueError, match="rating 0 is inf"):
        tau([1, 2], [math.inf, 2])


def test_tau_within_groups():
    scores = [1, 2, 2, 1, 5, 5, 7, 8]
    ratings = [1, 2, 1, 2, 1, 2, 3, 3]
    groups = ["agrees", "agrees", "opposes", "opposes", "scored alike", "scored alike", "rated alike", "rated alike"]
    found = grouped_tau_b(scores, ratings, groups)
    assert found == (pytest.approx((1 - 1 + 0) / 3), 3, 1, 1)
    order = [7, 2, 0, 5, 3, 1, 6, 4]
    assert grouped_tau_b(*([values[i] for i in order] for values in (scores, ratings, groups))) == found


def test_tau_within_groups_refuses_what_it_cannot_order():
    with pytest.raises(UndefinedCorrelation, match="none of 2 groups has different ratings"):
        grouped_tau_b([1, 2, 3], [1, 1, 2], ["a", "a", "b"])
    with pytest.raises(ValueError, match="2 groups for 3 scores"):
        grouped_tau_b([1, 2, 3], [1, 1, 2], ["a", "a"])


def test_pairwise_accuracy_is_strict_and_by_kind():
    got = pairwise_accuracy([0.9, 0.5, 0.3, 0.8], [0.1, 0.5, 0.4, 0.2], ["swap", "swap", "replace", "replace"])
    assert got == {"swap": 0.5, "replace": 0.5, "all": 0.5}
    got = pairwise_accuracy([1.0, 1.0, 0.0], [0.0, 0.0, 0.0], ["a", "a", "b"])
    assert got == {"a": 1.0, "b": 0.0, "all": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], []), "at least 1"),
        (([1.0], [1.0, 2.0], ["a"]), "1 correct, 2 wrong scores and 1 kinds"),
        (([1.0], [math.nan], ["a"]), r"pair 0 has the scores 1\.0 and nan"),
        (([1.0], [0.0], ["all"]), "stands for all pairs"),
    ],
)
def test_pairwise_accuracy_refuses_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        pairwise_accuracy(*arguments)
