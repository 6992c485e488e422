"""The tokenisers of rewards, by the name that signatures and document frequencies record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rewards.text.tokenize import TOKENIZER, is_tested, tokenize

TOKENIZERS: dict[str, Callable[[str], list[str]]] = {TOKENIZER: tokenize, "none": str.split}
"""``ptb`` is ``rewards.text.tokenize``. ``none`` splits text that is tokenised already at white space, and neither
lower-cases nor removes anything: tokenising tokens again may change them."""


def tokenizer_of(name: str) -> Callable[[str], list[str]]:
    """The function from a caption to its tokens.

    Raises:
        ValueError: no such name.
    """
    if name not in TOKENIZERS:
        raise ValueError(f"tokenizer is {name!r}: expected {' or '.join(TOKENIZERS)}")
    return TOKENIZERS[name]


def untested_texts(reward: Any, texts: Iterable[str]) -> str:
    """``+PTB-python[3 of 30000 texts not compared with Java]``: what a signature says of texts whose tokens may differ
    from the toolkit's (``is_tested``; each text by itself). Empty where none may, or no term of ``reward`` tokenises.
    """
    terms = getattr(reward, "rewards", {"": reward}).values()
    if not any(getattr(term, "tokenizer", None) == TOKENIZER for term in terms):
        return ""
    tested = [is_tested(text, in_lines=True) for text in texts]
    others = len(tested) - sum(tested)
    return f"+PTB-python[{others} of {len(tested)} texts not compared with Java]" if others else ""
