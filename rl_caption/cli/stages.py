"""Stages: a program with its configuration, alone or in a pipeline, a file such as

stages:
  xe: own_xe                                          # PROGRAM: RECIPE
  mix: {scst: own_scst, reward: {terms: ...}}         # NAME: {PROGRAM: RECIPE, KEY: VALUE, ...}
  teacher: {reward_model: null, task: ...}            # all keys here, no recipe

A stage names what an earlier one exports by its path, such as
``runs/own/xe/export/best``. Where the earlier stage is sent to another folder, the path
follows.
"""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl_caption.cli.configuration import parse, read_mapping, split_words
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import find_config, shipped_configs
from rl_caption.runtime.errors import UsageError
from rl_caption.runtime.options import Section, as_words

ENCODER = "transformers:"
"""Prefix of a folder that names a text or image encoder."""
OPTIONS = ("dry", "again", "only", "run.root")
"""Options of ``rl-caption run`` itself, beside the options of its stages."""


@dataclass(frozen=True)
class Stage:
    """A program with its configuration, which is checked when it is first read."""

    name: str
    program: str
    words: Sequence[str]
    """Arguments of its command line, after the program's name."""

    @cached_property
    def config(self) -> Any:
        """The checked configuration. Raises ``ConfigError``."""
        section_type = resolve_name(str(PROGRAMS[self.program].config))
        return parse(section_type, self.words, f"rl-caption {self.program}")

    @property
    def command(self) -> str:
        """Command line that runs this stage alone."""
        return shlex.join(["rl-caption", self.program, *self.words])

    @property
    def folder(self) -> Path:
        """Folder that it writes to."""
        return Path(self.values.get("run.dir") or self.values["out"])

    @cached_property
    def sections(self) -> dict[str, Any]:
        """Its configuration as nested tables."""
        return self.config.model_dump(mode="json")

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values by dotted key."""
        return dict(leaves(self.sections))

    def start(self) -> Any:
        """Run the program, whose modules are imported only now; returns what it returns."""
        program = PROGRAMS[self.program]
        function = resolve_name(program.function)
        return function(self.config, parse) if program.parses else function(self.config)


def leaves(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and the values of nested tables."""
    if not isinstance(values, Mapping):
        yield key, values
        return
    for name, value in values.items():
        yield from leaves(value, f"{key}.{name}".removeprefix("."))


def replace_folders(values: Any, folders: Mapping[Path, Path]) -> Any:
    """Replace folders (old -> new) in the paths of nested values."""
    text = json.dumps(values, ensure_ascii=False)
    for before, now in folders.items():
        path = rf'(?<=[":]){re.escape(str(before))}(?=[/"])'
        text = re.sub(path, lambda _, now=now: str(now), text)  # type: ignore[misc]
    return json.loads(text)


def starts_from(values: Any, stages: Iterable[Stage]) -> list[str]:
    """Names of the ``stages`` whose folders occur in paths of nested values."""
    return [
        one.name
        for one in stages
        if replace_folders(values, {one.folder: Path()}) != values
    ]


# --- pipelines ----------------------------------------------------------------------------------


def read_pipeline(name: str) -> list[Stage]:
    """The stages of a pipeline as its file has them.

    Raises:
        UsageError: it is no pipeline, or names a program that cannot be a stage.
        OSError: there is no such file and no such recipe.
    """
    listed = read_mapping(find_config(name)).get("stages")
    if not isinstance(listed, dict):
        raise UsageError(
            f"{name} is no pipeline: expected stages: {{xe: RECIPE, scst: RECIPE}}"
        )
    stages = []
    for stage, entry in listed.items():
        changes = dict(entry) if isinstance(entry, dict) else {stage: entry}
        program = next(iter(changes), "")
        if program not in PROGRAMS or PROGRAMS[program].config is None:
            raise UsageError(
                f"{name}: stages.{stage} is {entry!r}: expected a program and a recipe"
            )
        recipe = changes.pop(program)
        words = [] if recipe is None else ["--config", recipe]
        stages.append(Stage(stage, program, words + as_words(changes)))
    return stages


def shipped_pipelines() -> list[str]:
    """The names of the pipelines that the package brings."""
    files = shipped_configs()
    return [name for name, file in files.items() if "stages" in read_mapping(file)]


def makers(path: Path) -> list[str]:
    """Names of the package's pipelines that write the export ``path``."""
    names = []
    for name in shipped_pipelines() if "export" in path.parts else ():
        trained = [one for one in read_pipeline(name) if PROGRAMS[one.program].trains]
        if any(path.is_relative_to(stage.folder) for stage in trained):
            names.append(name)
    return names


def read_wishes(
    words: Sequence[str], stages: Collection[str]
) -> defaultdict[str, list[str]]:
    """Parse the options of ``rl-caption run``: texts by key of ``OPTIONS``, words by
    ``data`` and by stage.

    Raises:
        UsageError: an option does not say for which stage it is, or there is no such stage.
    """
    wishes = defaultdict[str, list[str]](list)
    for path, texts in split_words(Section, words):
        key, (stage, *rest) = ".".join(path), path
        if key in OPTIONS:
            wishes[key] += ",".join(texts).split(",")
        elif rest and stage in ("data", *stages):
            wishes[stage] += [f"--{'.'.join(rest)}", *texts]
        else:
            forms = " or ".join(f"--{one}.{key}" for one in stages)
            raise UsageError(
                f"--{key} does not say for which stage it is: write {forms}"
            )
    for name in (*wishes["again"], *wishes["only"]):
        if name not in stages:
            raise UsageError(
                f"there is no stage {name!r}: expected {', '.join(stages)}"
            )
    return wishes


def make_stages(
    name: str, options: Sequence[str] = ()
) -> tuple[list[Stage], dict[str, list[str]]]:
    """The requested stages of a pipeline, with checked configurations, and the options
    as ``read_wishes`` returns them.
    """
    written = read_pipeline(name)
    names = [stage.name for stage in written]
    wishes = read_wishes(options, names)
    chosen = set(wishes["only"] or names)
    for stage in reversed(written):
        if stage.name in chosen:
            chosen.update(starts_from(stage.values, written))
    stages: list[Stage] = []
    elsewhere: dict[Path, Path] = {}
    for stage in written:
        if stage.name in chosen:
            words = [*stage.words, *_new_words(stage, wishes, elsewhere)]
            stages.append(Stage(stage.name, stage.program, words))
            elsewhere[stage.folder] = stages[-1].folder
    return stages, wishes


def _new_words(
    stage: Stage, wishes: Mapping[str, Sequence[str]], elsewhere: Mapping[Path, Path]
) -> list[str]:
    """Arguments for a stage: its paths in moved folders, then the command line's."""
    now = replace_folders(stage.values, elsewhere)
    changes = {key: now[key] for key in now if now[key] != stage.values[key]}
    if wishes["run.root"]:
        key = "run.dir" if "run.dir" in stage.values else "out"
        changes[key] = str(Path(*wishes["run.root"], stage.name))
    words = as_words(changes)
    for section, prefix in (("data", "--data."), ("all", "--all.data.")):
        if section in stage.sections:
            words += [re.sub("^--", prefix, word) for word in wishes["data"]]
    return [*words, *wishes[stage.name]]
