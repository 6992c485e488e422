"""Overrides on a command line, for a run alone or for all runs that it starts from
(``--all.data.path X``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_caption.runtime.errors import ConfigError

Config = TypeVar("Config")
Parse = Callable[..., Any]
"""``rl_caption.cli.configuration.parse``: (kind, arguments, program, checked) -> a configuration of
this kind.
"""
FOR_ALL = "--all."


def value_at(config: Any, keys: Sequence[str]) -> Any:
    """The value at a dotted key of dataclasses and dictionaries; None where there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
    return config


def has_key(config: Any, keys: Sequence[str]) -> bool:
    """Whether a configuration has an option at a dotted key; a dictionary (``kwargs``) may have
    any.
    """
    for key in keys:
        if isinstance(config, dict):
            return True
        if not hasattr(config, key):
            return False
        config = getattr(config, key)
    return True


class Chain:
    """The command line of a run and what it says of the runs that it starts from.

    ``--all.KEY VALUE`` sets a key of the run and of every earlier run that has the key; ``--KEY
    VALUE`` is for the run alone.

    Args:
        parse: from a command line to a configuration (``rl_caption.cli.configuration.parse``).
        kind: dataclass of the run's configuration.
        arguments: of the command line.
        program: its name in messages.

    Attributes:
        arguments: those of the run itself, with what is for all runs.
    """

    def __init__(
        self, parse: Parse, options_class: type[Any], arguments: Sequence[str], program: str
    ) -> None:
        self._parse, self._program = parse, program
        rest, alone, for_all, words = list[str](), list[str](), list[str](), list(arguments)
        while words:
            word = words.pop(0)
            if word.startswith((FOR_ALL, "--data.", "--teacher.")) and "=" not in word and words:
                word = f"{word}={words.pop(0)}"
            if word.startswith(FOR_ALL):
                for_all.append(f"--{word.removeprefix(FOR_ALL)}")
            else:
                (alone if word.startswith(("--data.", "--teacher.")) else rest).append(word)
        self._alone, self._for_all = alone, for_all
        self._runs: dict[str, list[str]] = {word: [] for word in for_all}
        self.arguments = [*rest, *alone]
        self._before = self._after = None
        if for_all or alone:
            self._before = parse(options_class, rest, program, checked=False)
            after_file = (
                0
                if not rest[:1] or not rest[0].startswith("--config")
                else 1
                if "=" in rest[0]
                else 2
            )
            self.arguments[after_file:after_file] = self.words_for("this run", self._before)
            self._after = parse(options_class, self.arguments, program, checked=False)

    def parse(self, options_class: type[Config], file: str, program: str) -> Config:
        """The configuration of an earlier run, with what is for all runs. Raises as ``parse``."""
        words = self.words_for(
            file, self._parse(options_class, ["--config", file], program, checked=False)
        )
        config: Config = self._parse(options_class, ["--config", file, *words], program)
        return config

    def words_for(self, run: str, config: Any) -> list[str]:
        """The overrides for all runs of which this one, which ``run`` names, has the key."""
        words = [word for word in self._for_all if has_key(config, _keys(word))]
        for word in words:
            self._runs[word] += [] if run in self._runs[word] else [run]
        return words

    def check_alone(self, file: str, config: Any) -> None:
        """Refuse an override of the run alone where an earlier run, which is trained first, has the
        value before it.

        Raises ``ConfigError``.
        """
        for word in self._alone:
            keys = _keys(word)
            value, before, after = (
                value_at(run, keys) for run in (config, self._before, self._after)
            )
            if (
                keys in map(_keys, self._for_all)
                or not has_key(config, keys)
                or value != before
                or value == after
            ):
                continue
            key, text = ".".join(keys), word.partition("=")[2]
            raise ConfigError(
                f"--{key} {text} is for this run alone, and no longer for runs with the same "
                f"value: {file}, which is "
                f"trained first, has {key} {value!r}, too. Write --all.{key} {text} for all runs; "
                f"for this one alone, "
                f"--all.{key} {'null' if value is None else value} --{key} {text}"
            )

    def replaces(self, run_dir: str) -> bool:
        """Whether the teacher of the run's file is made in ``run_dir``, and an override names
        another one.
        """
        if not any(_keys(word) == ["teacher", "name"] for word in (*self._alone, *self._for_all)):
            return False
        teacher = value_at(self._before, ["teacher", "name"])
        return teacher is not None and Path(teacher).resolve().is_relative_to(
            Path(run_dir).resolve()
        )

    def log_line(self) -> str:
        """Which runs take what is for all; empty where nothing is. Raises ``ConfigError`` for a key
        that none has.
        """
        for word, runs in self._runs.items():
            if not runs:
                key = ".".join(_keys(word))
                raise ConfigError(
                    f"{FOR_ALL}{key}: neither {self._program} nor an earlier run has the key {key}"
                )
        return "; ".join(f"{word} for {', '.join(runs)}" for word, runs in self._runs.items())


def _keys(word: str) -> list[str]:
    """The parts of the dotted key of ``--KEY=VALUE``."""
    return word[2:].partition("=")[0].split(".")
