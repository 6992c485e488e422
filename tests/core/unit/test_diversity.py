"""Self-CIDEr, Div-n and the diversity reward, by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest

from rewards.base import RewardError
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
    # Eigenvalues 1.5 and 0.5.
    expected = -math.log(math.sqrt(1.5) / (math.sqrt(1.5) + math.sqrt(0.5))) / math.log(
        2
    )
    assert self_cider(np.array([[1.0, 0.5], [0.5, 1.0]])) == pytest.approx(expected)
    assert (
        0
        < self_cider(np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.9], [0.0, 0.9, 1.0]]))
        < 1
    ), "an eigenvalue is below 0"


def test_distinct_ngrams_over_words():
    captions = [["a", "dog", "a", "dog"], ["a", "cat"]]
    assert distinct_ngrams(captions, 1) == 3 / 6
    assert distinct_ngrams(captions, 2) == 3 / 6  # a-dog, dog-a, a-cat
    assert distinct_ngrams([[], []], 1) == 0.0


def test_the_reward_is_one_minus_the_similarity_to_the_others():
    texts, ids = (
        [
            "a red dog runs",
            "a red dog sits",
            "two cats",
            "a red dog runs",
            "one bird here now",
        ],
        list("11121"),
    )
    near = (3 / 4 + 2 / 3 + 1 / 2) / 4
    assert Diversity(eos=False)(None, texts, image_id=ids) == pytest.approx(
        [1 - near / 3] * 2 + [1.0, 0.0, 1.0]
    )
    with_end, without = 1 - (4 / 5 + 2 / 4 + 1 / 3 + 0) / 4, 1 - near
    for reward, columns, expected in (
        (Diversity(), {}, with_end),
        (Diversity(), {"finished": [False] * 2}, without),
        (Diversity(eos=False), {}, without),
    ):
        assert reward(None, texts[:2], image_id=ids[:2], **columns) == pytest.approx(
            [expected] * 2
        )


def test_copies_score_nothing_however_short():
    for eos in (True, False):
        for text in ("a red dog runs home", "dog", ""):
            assert Diversity(eos=eos)(
                None, [text] * 3, image_id=["1"] * 3
            ) == pytest.approx([0.0] * 3)


def test_a_run_counts_document_frequencies_for_it():
    terms = {"cider": RewardTerm(), "diversity": RewardTerm()}
    made = build_reward(RewardConfig(terms=terms), [["a dog"], ["a cat"]]).rewards
    assert made["diversity"].df is made["cider"].df  # type: ignore[attr-defined]
    # ``a`` is in every document and weighs nothing.
    assert made["diversity"](
        None, ["a dog", "a cat"], image_id=["1", "1"]
    ) == pytest.approx([1.0, 1.0])
    assert "df[" in made["diversity"].signature


def test_bad_input_is_named():
    with pytest.raises(RewardError, match="column 'image_id'"):
        Diversity()(None, ["a"])
    with pytest.raises(ValueError, match="eos"):
        Diversity(ALIKE, eos=True)


def test_a_small_agreement_keeps_its_digits_beside_that_of_a_caption_with_itself():
    texts = [
        " ".join(["dog", *(f"{word}{number}" for number in range(60))])
        for word in "abc"
    ]
    tokens = [text.split() for text in texts]
    near = 10 * similarities(
        tokens, DocumentFrequencies.from_counts({}, 1.0, eos=False)
    )
    for count in (2, 3):
        scores = Consensus()(None, texts[:count], image_id=["x"] * count)
        others = [
            sum(Fraction(near[row, other]) for other in range(count) if other != row)
            for row in range(count)
        ]
        assert scores == pytest.approx(
            [float(total / (count - 1)) for total in others], rel=1e-15, abs=0
        )
