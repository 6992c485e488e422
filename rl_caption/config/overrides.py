"""Overrides of ``data`` and ``teacher`` on a command line that also reach the runs that a run starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")
Parse = Callable[..., Any]
"""``rl_caption.cli.configuration.parse``: (kind, arguments, program, checked) -> a configuration of this kind."""


def value_at(config: Any, keys: Sequence[str]) -> Any:
    """The value at a dotted key of dataclasses and dictionaries; None where there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
    return config


class Chain:
    """The overrides of ``data`` and ``teacher`` on a command line, applied also to the runs that the run starts from.

    An earlier run takes an override where its configuration has the same value at that key as the run's file: the two
    use the same data, or the same teacher. Otherwise it keeps its value. ``str`` tells which runs took overrides and
    which did not; it is empty where there is nothing to tell.

    Args:
        parse: from a command line to a configuration (``rl_caption.cli.configuration.parse``).
        before: the configuration of the run without ``overrides``.
        overrides: each as ``--data.KEY=VALUE`` or ``--teacher.KEY=VALUE``.
    """

    def __init__(self, parse: Parse, before: Any, overrides: Sequence[str]) -> None:
        self._parse, self._before, self._overrides = parse, before, overrides
        self._moved: dict[str, None] = {}
        self._kept: dict[str, None] = {}

    @classmethod
    def of(cls, parse: Parse, kind: type[Any], arguments: Sequence[str], program: str) -> Chain:
        """The overrides of ``data`` and ``teacher`` among the ``arguments`` of a program."""
        rest, overrides, words = list[str](), list[str](), list(arguments)
        while words:
            word = words.pop(0)
            if not word.startswith(("--data.", "--teacher.")):
                rest.append(word)
            else:
                overrides.append(word if "=" in word or not words else f"{word}={words.pop(0)}")
        return cls(parse, parse(kind, rest, program, checked=False) if overrides else None, overrides)

    def parse(self, kind: type[Config], file: str, program: str) -> Config:
        """The configuration of an earlier run, with the overrides that it takes. Raises as ``parse``."""
        taken = self.overrides_of(file, self._parse(kind, ["--config", file], program, checked=False))
        parsed: Config = self._parse(kind, ["--config", file, *taken], program)
        return parsed

    def replaces(self, run_dir: str) -> bool:
        """Whether the teacher of the run's file is made in ``run_dir``, and an override names another one."""
        teacher = value_at(self._before, ["teacher", "name"])
        is_replaced = any(word.startswith("--teacher.name=") for word in self._overrides)
        return is_replaced and teacher is not None and Path(teacher).resolve().is_relative_to(Path(run_dir).resolve())

    def overrides_of(self, file: str, config: Any) -> list[str]:
        """The overrides that an earlier run takes, given its file and its configuration."""
        found = []
        for word in self._overrides:
            key = word[2:].partition("=")[0]
            value, before = (value_at(each, key.split(".")) for each in (config, self._before))
            if value == before:
                found.append(word)
                self._moved[file] = None
            elif key.startswith("data."):
                self._kept[f"{file} ({key} {value!r})"] = None
        return found

    def __str__(self) -> str:
        if not self._moved and not self._kept:
            return ""
        kept = f"; runs with other data keep theirs: {', '.join(self._kept)}" if self._kept else ""
        return f"{' '.join(self._overrides)} also for {', '.join(self._moved) or 'no earlier run'}{kept}"
