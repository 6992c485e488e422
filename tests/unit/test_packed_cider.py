"""CIDEr-D of many captions at once equals CIDEr-D of one after the other, to the bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.text.cider import CiderD, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.packed_cider import WORD_BITS, PackedCiderD, can_pack

WORDS = ["a", "dog", "on", "the", "beach", "red", "ball", EOS]
Captions = list[list[str]]

caption = st.lists(st.sampled_from(WORDS), max_size=9)
references = st.lists(caption.filter(bool), min_size=1, max_size=4)
candidate = st.lists(st.sampled_from([*WORDS, "new", "newer"]), max_size=12)


@settings(deadline=None, max_examples=150)
@given(corpus=st.lists(references, min_size=1, max_size=5), data=st.data(), n=st.integers(1, 4))
def test_scores_equal_those_of_one_caption_after_the_other(corpus: list[Captions], data: st.DataObject, n: int) -> None:
    df = DocumentFrequencies.from_references(corpus, eos=False)
    packed = PackedCiderD(df, n, sigma=5.0)
    rows = data.draw(st.lists(st.tuples(candidate, st.integers(0, len(corpus) - 1)), min_size=1, max_size=12))
    candidates = [tokens for tokens, _ in rows]
    images = [packed.references(number, captions) for number, captions in enumerate(corpus)]
    assert None not in images
    found = packed.scores(candidates, [images[number] for _, number in rows])
    assert found == cider_d(candidates, [corpus[number] for _, number in rows], df, n, 5.0)


def test_references_that_were_not_counted_are_scored_one_by_one() -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"], ["the", "dog"]], [["a", "ball"]]], eos=False)
    assert PackedCiderD(df).references("image", [["a", "cat"]]) is None
    reward = CiderD(df, eos=False)
    found = reward(None, ["a cat", "a dog"], references=[["a cat"], ["a dog"]])
    assert found == cider_d([["a", "cat"], ["a", "dog"]], [[["a", "cat"]], [["a", "dog"]]], df)


def test_words_that_do_not_fit_are_scored_one_by_one() -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"]], [["a", "ball"]]], eos=False)
    packed = PackedCiderD(df)
    own = packed.references("image", [["a", "dog"]])
    assert own is not None
    many = [[f"w{number}" for number in range(1 << WORD_BITS)]]
    assert packed.scores(many, [own]) is None
    assert packed.scores([["a", "dog"]], [own]) == cider_d([["a", "dog"]], [[["a", "dog"]]], df)  # nothing is left over
    assert not can_pack(df, 5)
    with pytest.raises(ValueError, match="n = 5 with 3 words: expected n of at most 4"):
        PackedCiderD(df, 5)


def test_references_leave_the_cache_when_it_is_full() -> None:
    df = DocumentFrequencies.from_references([[["a", "dog"]], [["a", "ball"]]], eos=False)
    packed = PackedCiderD(df, cache_images=1)
    packed.references("first", [["a", "dog"]])
    assert packed.cached("first") is not None
    packed.references("second", [["a", "ball"]])
    assert packed.cached("first") is None
