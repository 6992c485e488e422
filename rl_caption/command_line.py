"""Words of a command line, before the parser gets them."""

from __future__ import annotations

import json
from collections.abc import Sequence


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
