"""CIDEr-D of many captions at once equals CIDEr-D of one after the other, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.text import packed_cider
from rewards.text.cider import CiderD, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.key_index import KeyIndex
from rewards.text.ngram_table import NGramTable, find
from rewards.text.packed_cider import PackedCiderD
from rewards.text.reference_bank import Bank

WORDS = ["a", "dog", "on", "the", "beach", "red", "ball", EOS]
Captions = list[list[str]]

caption = st.lists(st.sampled_from(WORDS), max_size=9)
references = st.lists(caption.filter(bool), min_size=1, max_size=4)
candidate = st.lists(st.sampled_from([*WORDS, "new", "newer"]), max_size=12)


def scores(packed: PackedCiderD, candidates: Captions, references: list[Captions]) -> list[float]:
    """What ``CiderD`` does, from tokens."""
    keys = [tuple(map(tuple, own)) for own in references]
    unique = list(dict.fromkeys(keys))
    bank = Bank.of(packed.references(unique, lambda key: key))
    owner = np.array([unique.index(key) for key in keys])
    return packed.scores(packed.numbers(candidates), owner, bank).tolist()


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
    packed = PackedCiderD(df, n, sigma=5.0)
    for _ in range(2):  # the second time from the cache, with the words that the first left behind
        rows = data.draw(st.lists(st.tuples(candidate, st.integers(0, len(images) - 1)), min_size=1, max_size=12))
        candidates, own = [tokens for tokens, _ in rows], [images[number] for _, number in rows]
        assert scores(packed, candidates, own) == cider_d(candidates, own, df, n, 5.0)


def test_references_with_words_and_ngrams_that_were_not_counted() -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"], ["the", "dog"]], [["a", "ball"]]], eos=False)
    reward = CiderD(df, eos=False)
    texts, own = ["a cat", "the cat ran", "dog a", "a dog"], [["a cat"], ["the cat ran"], ["dog a"], ["a dog"]]
    tokens, images = [text.split() for text in texts], [[text.split() for text in texts] for texts in own]
    assert reward(None, texts, references=own) == cider_d(tokens, images, df)


def test_any_number_of_words_and_no_document_frequency() -> None:
    many = [f"w{number}" for number in range(70_000)]
    corpus = [[many[:40_000]], [many[39_000:]], [["w1", "w69999"]]]
    df = DocumentFrequencies.from_references(corpus, eos=False)
    candidates = [["w1", "w69999"], ["w69999", "w1"], many[39_990:40_010]]
    assert scores(PackedCiderD(df), candidates, [corpus[2], corpus[2], corpus[1]]) == cider_d(
        candidates, [corpus[2], corpus[2], corpus[1]], df
    )
    empty = DocumentFrequencies({}, 2.0, eos=False)
    assert scores(PackedCiderD(empty), [["a", "b"], []], [[["a", "b"]]] * 2) == cider_d(
        [["a", "b"], []], [[["a", "b"]]] * 2, empty
    )
    with pytest.raises(ValueError, match=r"up to 4.*n = 5"):
        PackedCiderD(df, 5)


def test_captions_are_scored_in_parts_and_forgotten_references_are_weighed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"]], [["a", "ball"]]], eos=False)
    candidates = [["a", "dog", "cat"], ["dog"] * 30, [], ["a", "ball"], ["new", "dog"]]
    own = [[["a", "dog", "cat"]], [["a", "dog"], []], [["a"]], [["a", "ball"]], [["new", "dog"]]]
    expected = cider_d(candidates, own, df)
    for name, value in (("MOST_TOKENS", 4), ("MOST_IMAGES", 2), ("MOST_EXTRA", 1)):
        monkeypatch.setattr(packed_cider, name, value)
    packed = PackedCiderD(df)
    assert [scores(packed, candidates, own) for _ in range(3)] == [expected] * 3
    assert len(packed.words) == 5, "three counted words, and two of the last call's references"


def test_references_leave_the_cache_when_it_is_full() -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"]], [["a", "ball"]]], eos=False)
    packed = PackedCiderD(df, cache_images=2)
    asked: list[str] = []

    def tokens_of(key: str) -> Captions:
        asked.append(key)
        return [["a", key]]

    for keys in (["dog"], ["ball"], ["dog"], ["cat"], ["dog", "ball"]):
        packed.references(keys, tokens_of)
    assert asked == ["dog", "ball", "cat", "ball"], "the least recently used one leaves"


@settings(deadline=None)
@given(st.sets(st.integers(-5, 2**40), max_size=300), st.lists(st.integers(-9, 2**40), max_size=50))
def test_keys_are_found(keys: set[int], others: list[int]) -> None:
    ascending = np.array(sorted(keys), np.int64)
    wanted = np.array([*keys, *others], np.int64)
    expected = [sorted(keys).index(key) if key in keys else -1 for key in wanted.tolist()]
    assert KeyIndex(ascending).find(wanted).tolist() == expected
    assert find(ascending, wanted).tolist() == expected


def test_keys_that_lose_every_slot_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.text.key_index._MULTIPLIERS", (0, 0))  # every key wants the same slot
    keys = np.arange(0, 40, 2)
    assert KeyIndex(keys).find(np.arange(-1, 41)).tolist() == [
        key // 2 if key in range(0, 40, 2) else -1 for key in range(-1, 41)
    ]


def test_a_table_knows_its_ngrams() -> None:
    df = DocumentFrequencies({("b", "a", "c"): 2, ("a",): 1}, 1.0, eos=False)
    table: NGramTable = df.table
    assert len(df) == len(table) == 2
    assert table.ngrams(3) == [("b", "a", "c")]
    assert table.ngrams(2) == [], "what only begins a counted one is not counted"
    assert df["b", "a"] == 0
    assert ("b", "a") not in df
    assert dict(df.items()) == {("b", "a", "c"): 2, ("a",): 1}
