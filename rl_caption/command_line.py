"""Words of a command line, before the parser gets them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate

from rl_caption.config_files import DEEPEST
from rl_caption.ranges import is_text, shown


def switched_on(arguments: Sequence[str], option: str) -> list[str]:
    """``--report`` without a value is ``--report=true``."""
    followed = zip(arguments, [*arguments[1:], "--"][: len(arguments)], strict=True)
    return [f"{option}=true" if word == option and after.startswith("--") else word for word, after in followed]


def with_lists(arguments: Sequence[str], option: str) -> list[str]:
    """``--compare A B`` is ``--compare=["A", "B"]``: all words up to the next option."""
    words = list(arguments)
    if option not in words:
        return words
    start = words.index(option)
    end = next((place for place in range(start + 1, len(words)) if words[place].startswith("--")), len(words))
    return [*words[:start], f"{option}={json.dumps(words[start + 1 : end])}", *words[end:]]


def odd_word(arguments: Sequence[str]) -> str | None:
    """What is wrong with the first word that no option can mean, and that would make a parser fail; None if none is."""
    for word in arguments:
        if not is_text(word):
            return f"{shown(word)} has control characters, or is not UTF-8"
        if re.search(r"\d{300}", word):
            return f"{shown(word)} has a number of 300 digits or more"
        if max(accumulate((char in "[{") - (char in "]}") for char in word), default=0) > DEEPEST:
            return f"{shown(word)} has more than {DEEPEST} levels of brackets"
    return None
