"""Figures of agreement by hand and against scipy, their intervals, and what ties count."""

import math

import numpy as np
import pytest
from scipy import stats

from rl_caption.lab.meta_evaluation.figures import (
    CORRELATIONS,
    order_figures,
    rated_figures,
    wins,
)
from rl_caption.lab.meta_evaluation.sets import Judged, JudgementSet


def rated_set(ratings, images, captions=None, **options):
    rows = []
    captions = captions or ["a"] * len(ratings)
    for image, text, rating in zip(images, captions, ratings, strict=True):
        rows.append(Judged(image, [text], float(rating)))
    return JudgementSet("set", rows, "", **options)


def test_what_a_row_counts():
    margins = np.array([[1.0], [-1], [0], [-1], [4]])
    better = np.array([1, 1, 1, 0, 0.5])
    assert wins(margins, better).tolist() == [1, 0, 0, 1, 0.5]
    assert wins(margins, better, "half").tolist() == [1, 0, 0.5, 1, 0.5]
    against_two = np.array(
        [
            [0.0, 0],
            [0, 1],
            [1, 1],
            [-1, 1],
            [0, -1],
        ]
    )
    chance = wins(against_two, np.ones(5), "half")
    assert chance == pytest.approx([1 / 3, 1 / 2, 1, 0, 0])


def test_accuracy_is_strict():
    rows = [Judged(str(number), "ab", kind=kind) for number, kind in enumerate("uuv")]
    scores = {"": np.array([[2.0, 1.0], [1.0, 1.0], [1.0, 0.0]])}
    found = order_figures(JudgementSet("set", rows, ""), scores)
    values = [(figure.name, figure.value, figure.count) for figure in found]
    assert values[:2] == [("u", 0.5, 2), ("v", 1, 1)]
    assert values[2] == ("all pairs", pytest.approx(2 / 3), 3)
    assert "33.3 % of pairs have equal scores, which count as wrong" in found[0].note
    kinds = order_figures(JudgementSet("set", rows, "", summary="kinds"), scores)
    assert (kinds[-1].name, kinds[-1].value) == ("mean of kinds", 0.75)


def test_tau_within_images():
    scores = [1, 2, 2, 1, 5, 5, 7, 8]
    ratings = [1, 2, 1, 2, 1, 2, 3, 3]
    images = (
        ["agrees"] * 2 + ["opposes"] * 2 + ["scored alike"] * 2 + ["rated alike"] * 2
    )
    judged = rated_set(ratings, images, within_images=True)
    within = rated_figures(judged, scores)[2]
    assert within.value == pytest.approx((1 - 1 + 0) / 3)
    assert within.note == "mean over 3 images; 1 of them, scored all alike, count 0"
    alike = rated_set([1, 1, 2], "aab", within_images=True)
    assert rated_figures(alike, [1, 2, 3])[2].value is None


SCORES, RATINGS = np.array([0.0, 1.0, 2.0, 1.0]), np.array([1.0, 2.0, 4.0, 5.0])


def test_correlations_by_hand():
    # Means 1 and 3. Deviations -1 0 1 0 and -2 -1 1 2: products 3, squares 2 and 10.
    assert CORRELATIONS["pearson"](SCORES, RATINGS) == pytest.approx(3 / math.sqrt(20))
    assert CORRELATIONS["1 / r^2"](SCORES, RATINGS) == pytest.approx(20 / 9)
    # Pairs: 01 C, 02 C, 03 C, 12 C, 13 tied score, 23 D.
    assert CORRELATIONS["tau_b"](SCORES, RATINGS) == pytest.approx(3 / math.sqrt(5 * 6))
    assert CORRELATIONS["tau_c"](SCORES, RATINGS) == pytest.approx(2 * 3 / (16 * 2 / 3))
    with np.errstate(divide="ignore"):
        assert math.isinf(
            CORRELATIONS["1 / r^2"](np.array([1, 2, 1, 2]), np.array([1, 1, 2, 2]))
        )


def test_correlations_by_number_of_words():
    captions = ["a dog"] * 2 + ["a dog runs on green grass"] * 3 + ["one"]
    scores, ratings = [0.1, 0.4, 0.3, 0.9, 0.7, 0.2], [1, 3, 2, 4, 5, 3]
    part = rated_set(ratings, "xxxyyy", captions)
    found = {
        one.name: one
        for one in rated_figures(
            part,
            scores,
            lengths=[2, 6, 9],
        )
    }
    short, long = found["pearson, 0 to 2 words"], found["tau_b, 3 to 6 words"]
    assert short.count == 3
    expected = stats.pearsonr([0.1, 0.4, 0.2], [1, 3, 3]).statistic
    assert short.value == pytest.approx(expected)
    expected = stats.kendalltau([0.3, 0.9, 0.7], [2, 4, 5]).statistic
    assert long.value == pytest.approx(expected)
