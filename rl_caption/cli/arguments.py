"""Words of a command line, before the parser gets them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rl_caption.cli.yaml_files import DEEPEST
from rl_caption.config.ranges import is_text, shown


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


def data_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without overrides of ``data``, and these, each as ``--data.KEY=VALUE``."""
    rest, overrides, words = list[str](), list[str](), list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--data."):
            rest.append(word)
        else:
            overrides.append(word if "=" in word or not words else f"{word}={words.pop(0)}")
    return rest, overrides


def value_at(config: Any, place: Sequence[str]) -> Any:
    """What stands at a dotted key; None where there is nothing."""
    for part in place:
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


class Chain:
    """Overrides of ``data`` that reach the runs before a run, too.

    An earlier run takes an override where its own value of the key equals that of the run's file: it uses the same
    data. Where it differs, it stays.

    Args:
        before: the configuration of the run without ``overrides``.
        overrides: each as ``--data.KEY=VALUE``.
    """

    def __init__(self, before: Any, overrides: Sequence[str]) -> None:
        self._before = before
        self._overrides = overrides
        self._moved: dict[str, None] = {}
        self._kept: dict[str, None] = {}

    def overrides_of(self, file: str, config: Any) -> list[str]:
        """Those overrides that an earlier run, its file and its configuration, takes."""
        places = {word: word[2:].partition("=")[0] for word in self._overrides}
        found = [
            word
            for word, key in places.items()
            if value_at(config, key.split(".")) == value_at(self._before, key.split("."))
        ]
        for word, key in places.items():
            if word in found:
                self._moved[file] = None
            else:
                self._kept[f"{file} ({key} {value_at(config, key.split('.'))!r})"] = None
        return found

    def __str__(self) -> str:
        """What was moved and what was not; empty where there is nothing to say."""
        if not self._moved and not self._kept:
            return ""
        kept = f"; runs with other data keep theirs: {', '.join(self._kept)}" if self._kept else ""
        return f"{' '.join(self._overrides)} also for {', '.join(self._moved) or 'no earlier run'}{kept}"
