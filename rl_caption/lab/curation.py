"""Curation of captions: measures of captions, and selection by scores."""

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.text.degeneration import BAD_ENDINGS
from rewards.text.detail_units import default_tagger, word_class
from rewards.text.tokenize import tokenize

_MORE_STOP_WORDS = """
i you he she it we they him her them us me there here by not no so such when how what all any both each more most other
only own too up down out off over under then once about after before above below can
"""
STOP_WORDS = BAD_ENDINGS.union(_MORE_STOP_WORDS.split())
"""English function words."""
_AUXILIARIES = frozenset(
    ["is", "are", "was", "were", "be", "been", "being", "am", "has", "have", "had", "do", "does"]
)


def _capitalised_fraction(caption: str) -> float:
    words = [word for word in caption.split() if word[0].isalpha()]
    return sum(word[0].isupper() for word in words) / len(words) if words else 0.0


def _stop_words(caption: str) -> float:
    return sum(word in STOP_WORDS for word in tokenize(caption))


@lru_cache(maxsize=1)
def _classes(caption: str) -> list[tuple[str, str]]:
    """The words of a caption, each with its ``word_class``."""
    words = tokenize(caption)
    return [
        (word, word_class(tag))
        for word, tag in zip(words, default_tagger()([words])[0], strict=True)
    ]


def _words_of(classes: str, caption: str) -> float:
    """Number of words of the given classes, without auxiliary verbs."""
    return sum(
        word_type in classes and word not in _AUXILIARIES for word, word_type in _classes(caption)
    )


MEASURES: dict[str, Callable[[str], float]] = {
    "characters": len,
    "words": lambda caption: len(tokenize(caption)),
    "capitalised": _capitalised_fraction,
    "stop_words": _stop_words,
    "stop_word_fraction": lambda caption: _stop_words(caption) / max(1, len(tokenize(caption))),
    "actions": partial(_words_of, "V"),
    "complexity": partial(_words_of, "JVI"),
}
"""Measure of a caption by its name (docs/curation.md)."""


def best(scores: NDArray[np.float32], count: float) -> NDArray[np.bool_]:
    """Mask [N] of the highest scores: ``count`` of them, or below 1 that fraction, rounded down.
    Ties: the first.
    """
    # The decimal fraction as written: in binary, 0.29 * 100 is 28.999...
    number = int(Fraction(str(count)) * len(scores) if count < 1 else count)
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[np.argsort(-scores, kind="stable")[:number]] = True
    return chosen


def first_of_equals(keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask [N] of the keys that equal none before them."""
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first
