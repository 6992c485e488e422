"""CIDEr-D of many captions at once equals CIDEr-D of one after the other, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider

from rewards.text import cider as cider_module
from rewards.text.cider import CiderD, cider, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.ngrams import NGramTable, find
from tests.cider_oracle import plain_cider_d

WORDS = ["a", "dog", "on", "the", "beach", "red", "ball", EOS]
Captions = list[list[str]]

caption = st.lists(st.sampled_from(WORDS), max_size=9)
references = st.lists(caption, min_size=1, max_size=4)
candidate = st.lists(st.sampled_from([*WORDS, "new", "newer"]), max_size=12)


@settings(deadline=None, max_examples=150)
@given(
    corpus=st.lists(references, min_size=1, max_size=5),
    others=st.lists(references, max_size=3),
    data=st.data(),
    n=st.integers(1, 6),
)
def test_scores_equal_those_of_one_caption_after_the_other(
    corpus: list[Captions], others: list[Captions], data: st.DataObject, n: int
) -> None:
    df = DocumentFrequencies.from_references(corpus, eos=False, n=6)
    images = [*corpus, *others]  # those that were not counted, too
    rows = data.draw(st.lists(st.tuples(candidate, st.integers(0, len(images) - 1)), min_size=1, max_size=12))
    candidates, own = [tokens for tokens, _ in rows], [images[number] for _, number in rows]
    expected = plain_cider_d(candidates, own, df, n, 5.0)
    assert cider_d(candidates, own, df, n, 5.0) == expected
    not_shared = [list(captions) for captions in own]
    assert cider_d(candidates, not_shared, df, n, 5.0) == expected
    assert cider(candidates, own, df, n) == plain_cider_d(candidates, own, df, n, None)


def test_references_with_words_and_ngrams_that_were_not_counted() -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"], ["the", "dog"]], [["a", "ball"]]], eos=False)
    reward = CiderD(df, eos=False)
    texts, own = ["a cat", "the cat ran", "dog a", "a dog"], [["a cat"], ["the cat ran"], ["dog a"], ["a dog"]]
    tokens, images = [text.split() for text in texts], [[text.split() for text in texts] for texts in own]
    for _ in range(2):  # the second time from the cache
        assert reward(None, texts, references=own) == plain_cider_d(tokens, images, df)


def test_any_number_of_words_and_no_document_frequency() -> None:
    many = [f"w{number}" for number in range(70_000)]
    corpus = [[many[:40_000]], [many[39_000:]], [["w1", "w69999"]]]
    df = DocumentFrequencies.from_references(corpus, eos=False)
    candidates, own = [["w1", "w69999"], ["w69999", "w1"], many[39_990:40_010]], [corpus[2], corpus[2], corpus[1]]
    assert cider_d(candidates, own, df) == plain_cider_d(candidates, own, df)
    empty = DocumentFrequencies({}, 2.0, eos=False)
    candidates, own = [["a", "b"], []], [[["a", "b"]]] * 2
    assert cider_d(candidates, own, empty) == plain_cider_d(candidates, own, empty)


@pytest.mark.parametrize("most", [1, 8, 40])
def test_captions_are_scored_in_batches(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"]], [["a", "ball"]]], eos=False)
    candidates = [["a", "dog", "cat"], ["dog"] * 30, [], ["a", "ball"], ["new", "dog"]]
    own = [[["a", "dog", "cat"]], [["a", "dog"], []], [["a"]], [["a", "ball"]], [["new", "dog"]]]
    monkeypatch.setattr(cider_module, "MOST_TOKENS", most)
    assert cider_d(candidates, own, df) == plain_cider_d(candidates, own, df)


def test_words_that_come_hundreds_of_times() -> None:
    texts, own = ["a " * 299 + "dog", "a dog", "red"], [["a " * 400 + "dog", "the dog"], ["a dog"], ["red beach"]]
    tokens = [[text.split() for text in texts] for texts in own]
    df = DocumentFrequencies.from_references(tokens, eos=False)
    expected = plain_cider_d([text.split() for text in texts], tokens, df)
    assert CiderD(df, eos=False)(None, texts, references=own) == expected


def test_squares_are_those_of_the_toolkit() -> None:
    """(ln 46 - ln 8)² by C's power, which the toolkit takes, is another double than the product (glibc 2.36)."""
    own = [[" ".join(["left"] * (image < 8) + ["right"] * (image < 9)) or "none"] for image in range(46)]
    texts = ["left right new", "right left left right"] * 23
    expected = Cider().compute_score(dict(enumerate(own)), {row: [text] for row, text in enumerate(texts)})[1].tolist()
    tokens = [[text.split() for text in texts] for texts in own]
    reward = CiderD(DocumentFrequencies.from_references(tokens, eos=False), eos=False)
    assert reward(None, texts, references=own) == expected


def test_references_without_words() -> None:
    reward = CiderD(DocumentFrequencies.from_references([[["a"]], [["dog"]]], eos=False), eos=False)
    assert reward(None, ["a"], references=[["", "."]]) == [0.0]


def test_references_leave_the_cache_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"]], [["a", "ball"]]], eos=False)
    reward = CiderD(df, eos=False, cache_images=2)
    tokenize, asked = reward._tokenize, []

    def counted(text: str) -> list[str]:
        asked.append(text)
        return tokenize(text)

    monkeypatch.setattr(reward, "_tokenize", counted)
    for keys in (["dog"], ["ball"], ["dog"], ["cat"], ["dog", "ball"]):
        reward(None, ["x"] * len(keys), references=[[key] for key in keys])
    assert [text for text in asked if text != "x"] == ["dog", "ball", "cat", "ball"], "the least recently used leaves"


@settings(deadline=None)
@given(st.sets(st.integers(-5, 2**40), max_size=300), st.lists(st.integers(-9, 2**40), max_size=50))
def test_keys_are_found(keys: set[int], others: list[int]) -> None:
    ascending = np.array(sorted(keys), np.int64)
    wanted = np.array([*keys, *others], np.int64)
    expected = [sorted(keys).index(key) if key in keys else -1 for key in wanted.tolist()]
    assert find(ascending, wanted).tolist() == expected


def test_a_table_knows_its_ngrams() -> None:
    df = DocumentFrequencies({("b", "a", "c"): 2, ("a",): 1}, 1.0, eos=False)
    table: NGramTable = df.table
    assert len(df) == len(table) == 2
    assert table.ngrams(3) == [("b", "a", "c")]
    assert table.ngrams(2) == [], "what only begins a counted one is not counted"
    assert df["b", "a"] == 0
    assert ("b", "a") not in df
    assert dict(df.items()) == {("b", "a", "c"): 2, ("a",): 1}
