"""Levenshtein distance against the textbook recursion."""

from functools import cache

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
    longer = max(len(first), len(second), 1)
    expected = 1 - by_recursion(first, second) / longer
    assert edit_similarity(first, second) == (expected if first or second else 0)
