"""Tokens of captions and their batches: equal to open_clip's tokenizer, whatever is looked up."""

from __future__ import annotations

from typing import Any

import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rewards.clip.preprocessing import WordTokens, embed_by_length, with_cached_words

CLIP: Any = open_clip.SimpleTokenizer(context_length=77)
TOKENS = WordTokens(CLIP)
WRITTEN = [
    "A photo depicts two men's dogs, sitting.",
    "don't  STOP!!",
    "it's 3:45pm -- 100% <end_of_text>",
    "",
    " ",
    "a\tb\nc",
    "caf\u00e9 \u201cquoted\u201d \u00c3\u00a9t\u00e9",
    "salt &amp; pepper",
    "a&b",
    "x" * 300,
    "'s 's'll",
    "\x1b[31mred",
]


def equal(text: str, length: int = 77) -> bool:
    return torch.equal(TOKENS([text], length), CLIP([text], context_length=length))


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("length", [77, 7])
def test_tokens_of_a_caption_are_those_of_its_words(text: str, length: int) -> None:
    assert equal(text, length)
    assert TOKENS.encode(text) == CLIP.encode(text)


@settings(max_examples=300)
@given(st.text(alphabet=st.characters(codec="ascii"), max_size=40) | st.text(max_size=20))
def test_tokens_of_any_text(text: str) -> None:
    assert equal(text)


def test_words_are_looked_up_once_and_forgotten_when_there_are_too_many() -> None:
    class Counting:
        sot_token_id, eot_token_id = 1, 2
        seen: list[str] = []  # noqa: RUF012

        def encode(self, text: str) -> list[int]:
            self.seen.append(text)
            return [len(text)]

    tokens = WordTokens(Counting(), max_words=3)
    assert tokens(["a dog", "a dog runs"], 6).tolist() == [[1, 1, 3, 2, 0, 0], [1, 1, 3, 4, 2, 0]]
    assert Counting.seen == ["a", "dog", "runs"]
    assert tokens.encode("cat") == [3]
    assert tokens.encode("a") == [1]
    assert Counting.seen == ["a", "dog", "runs", "cat", "a"]


def test_other_tokenizers_are_left_alone() -> None:
    assert isinstance(with_cached_words(CLIP), WordTokens)
    for other in (
        open_clip.SimpleTokenizer(clean="whitespace"),
        open_clip.SimpleTokenizer(reduction_mask="simple"),
        object(),
    ):
        assert with_cached_words(other) is other


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_captions_of_about_equal_lengths_are_embedded_together_and_come_back_in_order(
    given: list[int], room: int
) -> None:
    lengths, batches = torch.tensor(given), []

    def encode(ids: Tensor) -> Tensor:
        batches.append(tuple(ids.shape))
        return ids[:, :1].float() * 2

    ids = torch.arange(len(given)).unsqueeze(1).repeat(1, 9)
    found = embed_by_length(encode, ids, lengths, room, "cpu")
    assert found.squeeze(1).tolist() == [2.0 * row for row in range(len(given))]
    assert sum(count for count, _ in batches) == len(given)
    assert all(count == 1 or count * longest <= room for count, longest in batches)
    assert [longest for _, longest in batches] == sorted(longest for _, longest in batches)
