"""Levenshtein distance against the textbook recursion."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.clip.bottleneck import edit_similarity


def by_recursion(first, second):
    @cache
    def distance(i, j):
        if not i or not j:
            return i + j
        replaced = distance(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(replaced, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(first), len(second))


@given(st.text("abc", max_size=9), st.text("abc", max_size=9))
def test_it_is_the_recursion(first, second):
    distance = by_recursion(first, second)
    expected = 1 - distance / max(len(first), len(second), 1)
    assert edit_similarity(first, second) == (expected if first or second else 0)


def test_similarity_is_relative_to_the_longer_text():
    assert edit_similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert edit_similarity("a dog", "a dog") == 1.0
    assert edit_similarity("", "") == edit_similarity("a", "") == 0.0
