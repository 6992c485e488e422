"""Self-CIDEr, Div-n and the diversity reward, by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest

from rewards.base import RewardError
from rewards.text.cider import cider_d
from rewards.text.diversity import (
    Consensus,
    Diversity,
    distinct_ngrams,
    self_cider,
    similarities,
)
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.config.build import build_reward
from rl_caption.config.schema import RewardConfig, RewardTerm

ALIKE = DocumentFrequencies.from_counts({}, 1.0, eos=False)


def test_self_cider_by_hand():
    assert self_cider(np.ones((3, 3))) == pytest.approx(0.0, abs=1e-7)
    assert self_cider(np.eye(3)) == pytest.approx(1.0)
    assert self_cider(np.zeros((3, 3))) == 0.0
    one = math.sqrt(1.5)  # of the eigenvalues
    other = math.sqrt(0.5)
    expected = -math.log(one / (one + other)) / math.log(2)
    half = np.array([[1.0, 0.5], [0.5, 1.0]])
    assert self_cider(half) == pytest.approx(expected)
    # an eigenvalue is below 0
    odd = np.array(
        [
            [1.0, 0.9, 0.0],
            [0.9, 1.0, 0.9],
            [0.0, 0.9, 1.0],
        ]
    )
    assert 0 < self_cider(odd) < 1


def test_distinct_ngrams_over_words():
    captions = [["a", "dog", "a", "dog"], ["a", "cat"]]
    assert distinct_ngrams(captions, 1) == 3 / 6
    assert distinct_ngrams(captions, 2) == 3 / 6  # a-dog, dog-a, a-cat
    assert distinct_ngrams([[], []], 1) == 0.0


def test_a_similarity_is_the_mean_of_both_directions():
    texts = [["a", "a", "b"], ["a", "b"]]
    one, other = cider_d(texts, [[text] for text in texts[::-1]], ALIKE)
    assert one != other, "counts are clipped on one side"
    matrix = similarities(texts, ALIKE)
    assert matrix[0, 1] == matrix[1, 0]
    assert matrix[0, 1] == pytest.approx((one + other) / 20)


SIMILARITY = (3 / 4 + 2 / 3 + 1 / 2) / 4
"""Of four and four tokens that share the first three."""


def test_the_reward_is_one_minus_the_similarity_to_the_others():
    texts = ["a red dog runs", "a red dog sits", "two cats", "a red dog runs", "one"]
    ids = list("11121")
    near = 1 - SIMILARITY / 3
    found = Diversity(eos=False)(None, texts, image_id=ids)
    assert found == pytest.approx([near, near, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("eos", "columns", "similarity"),
    [
        (True, {}, (4 / 5 + 2 / 4 + 1 / 3) / 4),
        (True, {"finished": [False] * 2}, SIMILARITY),
        (False, {}, SIMILARITY),
    ],
)
def test_eos_is_a_token_of_finished_captions(eos, columns, similarity):
    texts = ["a red dog runs", "a red dog sits"]
    reward = Diversity(eos=eos)
    found = reward(None, texts, image_id=["1", "1"], **columns)
    assert found == pytest.approx([1 - similarity] * 2)


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("text", ["a red dog runs home", "dog", ""])
def test_copies_score_nothing_however_short(eos, text):
    found = Diversity(eos=eos)(None, [text] * 3, image_id=["1"] * 3)
    assert found == pytest.approx([0.0] * 3)


def test_a_run_counts_document_frequencies_for_it():
    terms = {"cider": RewardTerm(), "diversity": RewardTerm()}
    config = RewardConfig(terms=terms)
    made = build_reward(config, [["a dog"], ["a cat"]]).rewards
    assert made["diversity"].df is made["cider"].df
    # ``a`` is in every document and weighs nothing.
    found = made["diversity"](None, ["a dog", "a cat"], image_id=["1", "1"])
    assert found == pytest.approx([1.0, 1.0])


def test_bad_input_is_named():
    with pytest.raises(RewardError, match="column 'image_id'"):
        Diversity()(None, ["a"])
    with pytest.raises(ValueError, match="eos"):
        Diversity(ALIKE, eos=True)


def test_a_small_agreement_keeps_its_digits_beside_that_of_a_caption_with_itself():
    others = " ".join(f"%s{number}" for number in range(60))
    texts = ["dog " + others.replace("%s", word) for word in "abc"]
    near = 10 * similarities([text.split() for text in texts], ALIKE)
    scores = Consensus()(None, texts, image_id=["x"] * 3)
    for row, score in enumerate(scores):
        others = [Fraction(one) for one in np.delete(near[row], row)]
        expected = float(sum(others) / 2)
        assert score == pytest.approx(expected, rel=1e-15, abs=0)
