"""Stages: a program with its configuration, alone or in a pipeline, a file such as

stages:
  xe: own_xe                                          # PROGRAM: RECIPE
  mix: {scst: own_scst, reward: {terms: ...}}         # NAME: {PROGRAM: RECIPE, KEY: VALUE, ...}
  teacher: {reward_model: null, task: ...}            # all keys here, no recipe
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl_caption.cli.configuration import parse, read_mapping
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import find_config, shipped_configs
from rl_caption.runtime.errors import UsageError

ENCODER = "transformers:"
"""What a text or image encoder's folder begins with."""


@dataclass(frozen=True)
class Stage:
    """A program with its checked configuration."""

    name: str
    program: str
    words: Sequence[str]
    """Of its command line."""
    config: Any

    @property
    def command(self) -> str:
        """The same by itself."""
        return shlex.join(["rl-caption", self.program, *self.words])

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(
            self.config.run.dir if hasattr(self.config, "run") else self.config.out
        )

    @cached_property
    def sections(self) -> dict[str, Any]:
        """Its configuration as nested tables."""
        return self.config.model_dump(mode="json")

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values by dotted key; of a grid also those of its runs, which ``all`` may replace."""
        values = dict(leaves(self.sections))
        if "all" in self.sections:
            words = [
                f"--{key}={as_word(value)}" for key, value in leaves(self.config.all)
            ]
            words = ["--config", self.config.recipe, *words]
            base = Stage("base", "scst", words, load("scst", words))
            values |= {
                f"all.{key}": value
                for key, value in base.values.items()
                if key != "run.dir"
            }
        return values

    def start(self) -> Any:
        """Run the program, whose modules are imported only now; returns what it returns."""
        program = PROGRAMS[self.program]
        function = resolve_name(program.function)
        return function(self.config, parse) if program.parses else function(self.config)


def load(program: str, words: Sequence[str]) -> Any:
    """The configuration of a program's command line, checked."""
    return parse(
        resolve_name(str(PROGRAMS[program].config)), words, f"rl-caption {program}"
    )


def leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested tables."""
    if not isinstance(values, Mapping):
        yield key, values
        return
    for name, value in values.items():
        yield from leaves(value, f"{key}.{name}" if key else str(name))


def as_word(value: Any) -> str:
    """A value of a configuration, written as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def path_of(value: str) -> Path:
    """The path that a text of a configuration may be; an encoder's has a prefix."""
    return Path(value.removeprefix(ENCODER))


def is_inside(value: Any, folder: str | Path) -> bool:
    """Whether a value is the path of a folder, or of something in it."""
    if not isinstance(value, str):
        return False
    return path_of(value).resolve().is_relative_to(Path(folder).resolve())


def starts_from(stage: Stage, others: Iterable[Stage]) -> list[Stage]:
    """Those of ``others`` whose folders a stage reads."""
    values = stage.values.values()
    return [
        one for one in others if any(is_inside(value, one.folder) for value in values)
    ]


def read_pipeline(name: str) -> dict[str, tuple[str, str | None, dict[str, Any]]]:
    """Stage -> its program, its recipe, and its changes of the recipe by dotted key.

    Raises:
        UsageError: it is no pipeline, or names a program that cannot be a stage.
        OSError: there is no such file and no such recipe.
    """
    listed = read_mapping(find_config(name)).get("stages")
    if not isinstance(listed, dict):
        raise UsageError(
            f"{name} is no pipeline: expected stages: {{xe: RECIPE, scst: RECIPE}}"
        )
    stages = {}
    for stage, entry in listed.items():
        changes = dict(entry) if isinstance(entry, dict) else {stage: entry}
        program = next(iter(changes), "")
        if program not in PROGRAMS or PROGRAMS[program].config is None:
            raise UsageError(
                f"{name}: stages.{stage} is {entry!r}: expected a program and a recipe"
            )
        stages[stage] = program, changes.pop(program), changes
    return stages


def shipped_pipelines() -> list[str]:
    """The names of the pipelines that the package brings."""
    files = shipped_configs()
    return [name for name, file in files.items() if "stages" in read_mapping(file)]


def folder_of(recipe: str | None, changes: Mapping[str, Any]) -> str | None:
    """The ``run.dir`` of a pipeline's stage; None where it trains nothing."""
    values = {} if recipe is None else read_mapping(find_config(recipe))
    folder = {**values.get("run", {}), **changes.get("run", {})}.get("dir")
    return changes.get("run.dir", folder)


def makers(path: str) -> list[str]:
    """The pipelines that the package brings of which a stage writes ``path``."""
    found = []
    for name in shipped_pipelines():
        folders = [
            folder_of(recipe, changes)
            for _, recipe, changes in read_pipeline(name).values()
        ]
        if any(folder is not None and is_inside(path, folder) for folder in folders):
            found.append(name)
    return found
