"""Signs of broken captions, on captions counted by hand."""

import pytest

from rewards.text.degeneration import (
    BAD_ENDINGS,
    Repetition,
    bad_ending,
    degeneration_statistics,
    repeated_ngram_share,
)
from rewards.text.tokenize import tokenize

CAPTIONS = [
    tokenize(text)
    for text in (
        "A cat and a cat.",
        "A dog with a",
        "a dog with a",
        "",
        "Two birds fly.",
    )
]


def test_aggregate_of_captions_counted_by_hand():
    assert degeneration_statistics(
        CAPTIONS, {("two", "birds", "fly")}
    ) == pytest.approx(
        {
            "length": (5 + 4 + 4 + 0 + 3) / 5,
            "vocabulary": 8,  # a cat and dog with two birds fly
            "repeated_ngrams": 1 / (4 + 3 + 3 + 0 + 2),
            "bad_endings": 3 / 5,
            "duplicates": 1 / 5,
            "empty": 1 / 5,
            "novel": 4 / 5,
        }
    )
    assert "novel" not in degeneration_statistics(CAPTIONS)


def test_repetition_is_counted_within_a_caption():
    same = ["a", "a", "a", "a"]
    assert repeated_ngram_share([same], 1) == 3 / 4
    assert repeated_ngram_share([same], 3) == 1 / 2
    assert repeated_ngram_share([same], 5) == 0
    assert repeated_ngram_share([["a", "b"], ["a", "b"]], 2) == 0


def test_broken_off_captions_are_seen():
    broken = [
        "a man with a",
        "a dog on the",
        "two people and",
        "a cat that is",
        "a bowl of",
        "",
    ]
    whole = [
        "A man riding a wave.",
        "trees behind",
        "a trash can",
        "a cat looking at another one",
    ]
    for captions, bad in ((broken, True), (whole, False)):
        assert {bad_ending(tokenize(text)) for text in captions} == {bad}


def test_the_word_list_can_match_tokens():
    assert [word for word in BAD_ENDINGS if tokenize(f"x {word}")[-1:] != [word]] == []


def test_repetition_reward_and_wrong_input():
    assert Repetition()(None, ["a cat and a cat", "a cat", ""], references=None) == [
        -0.25,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="n is 0"):
        Repetition(0)
    with pytest.raises(ValueError, match="no captions"):
        degeneration_statistics([])


def test_bad_endings_are_of_english_alone():
    assert "bad_endings" in degeneration_statistics([["a"]])
    assert "bad_endings" not in degeneration_statistics([["a"]], tokenizer="char")
