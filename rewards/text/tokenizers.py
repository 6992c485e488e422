"""The tokenisers of rewards, by the name that signatures and document frequencies record."""

from __future__ import annotations

from collections.abc import Callable

from rewards.text.tokenize import TOKENIZER, tokenize

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
