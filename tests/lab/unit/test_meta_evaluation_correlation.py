"""Correlations against arithmetic by hand and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from rl_caption.lab.meta_evaluation.correlation import (
    grouped_tau_b,
    inverse_r_squared,
    kendall_tau_b,
    kendall_tau_c,
    pearson,
    tau_of_table,
    unexplained_variance,
)


@pytest.mark.parametrize(("scores", "ratings"), [(5, 4), (40, 3), (2, 2)])
def test_tau_of_a_table_is_that_of_its_items(scores: int, ratings: int) -> None:
    generator = np.random.default_rng(10 * scores + ratings)
    table = generator.integers(3, size=(ratings, scores))
    table[ratings // 2] += table[0]  # some order
    rated, scored = (np.repeat(axis.ravel(), table.ravel()) for axis in np.indices(table.shape))
    expected = [stats.kendalltau(scored, rated, variant=variant).statistic for variant in "bc"]
    assert tau_of_table(table) == pytest.approx(expected, rel=1e-12)
    empty = np.zeros((ratings, 1), int)
    padded = np.hstack([empty, table[:, :1], empty, table[:, 1:]])
    assert tau_of_table(padded) == pytest.approx(expected, rel=1e-12), (
        "scores that do not occur are no values"
    )
    assert np.isnan(tau_of_table(np.array([[0, 2, 0], [0, 3, 0]]))).all()


def test_tau_within_groups() -> None:
    scores = [1, 2, 2, 1, 5, 5, 7, 8]
    ratings = [1, 2, 1, 2, 1, 2, 3, 3]
    groups = [
        "agrees",
        "agrees",
        "opposes",
        "opposes",
        "scored alike",
        "scored alike",
        "rated alike",
        "rated alike",
    ]
    found = grouped_tau_b(scores, ratings, groups)
    assert found == (pytest.approx((1 - 1 + 0) / 3), 3, 1)
    assert math.isnan(grouped_tau_b([1, 2, 3], [1, 1, 2], ["a", "a", "b"]).mean)


SCORES, RATINGS = [0.0, 1.0, 2.0, 1.0], [1.0, 2.0, 4.0, 5.0]
# Means 1 and 3. Deviations -1 0 1 0 and -2 -1 1 2: products 3, squares 2 and 10.
PCC = 3 / math.sqrt(20)


def test_correlations_by_hand() -> None:
    assert pearson(SCORES, RATINGS) == pytest.approx(PCC)
    assert inverse_r_squared(SCORES, RATINGS) == pytest.approx(20 / 9)
    # Differences 1 1 2 4: squares 22.
    assert unexplained_variance(RATINGS, SCORES) == pytest.approx(22 / 10)
    assert unexplained_variance(SCORES, RATINGS) == pytest.approx(22 / 2)
    # Pairs: 01 C, 02 C, 03 C, 12 C, 13 tied score, 23 D.
    assert kendall_tau_b(SCORES, RATINGS) == pytest.approx(3 / math.sqrt(5 * 6))
    assert kendall_tau_c(SCORES, RATINGS) == pytest.approx(2 * 3 / (16 * 2 / 3))
    # Within each image the order is right, between the images it is not.
    columns = [5, 6, 1, 2], [1, 2, 3, 4]
    assert grouped_tau_b(*columns, ["a", "a", "b", "b"]) == (1, 2, 0)
    assert kendall_tau_b(*columns) == pytest.approx((2 - 4) / 6)


def test_what_is_not_defined_is_no_number() -> None:
    assert math.isnan(inverse_r_squared([1, 2, 1, 2], [1, 1, 2, 2]))
    assert math.isnan(unexplained_variance([1.0, 1.0], [1.0, 2.0]))
