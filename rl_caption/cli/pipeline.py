"""Pipelines: stages that run one after the other (``rl-caption run NAME``).

A stage names what an earlier one exports by its path, such as ``runs/own/xe/export/best``. Where
the earlier stage is sent to another folder, the path follows.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rl_caption.cli.configuration import split_words
from rl_caption.cli.preflight import preflight, refuse
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import (
    ENCODER,
    Stage,
    as_word,
    is_inside,
    load,
    path_of,
    read_pipeline,
    shipped_pipelines,
    starts_from,
)
from rl_caption.runtime.errors import EXPECTED, UsageError
from rl_caption.runtime.options import Section

INPUTS = "stage.json"
"""File in a stage's folder: what its data and the models that it starts from were."""
USAGE = """usage: rl-caption run NAME [--dry] [--only STAGE,...] [--again STAGE,...] [--run.root FOLDER]
                      [--data.KEY VALUE ...] [--STAGE.KEY VALUE ...]

Run the stages of a pipeline, a recipe or a file, one after the other. What is finished is kept.

  --dry              print what would run
  --only STAGE,...   these stages, and those that they start from
  --again STAGE,...  train these stages, and those that start from them, anew
  --run.root FOLDER  folder of all stages, each in a folder of its name
  --data.KEY VALUE   for every stage
  --STAGE.KEY VALUE  for one stage"""


@dataclass
class Wishes:
    """What a command line asks of a pipeline."""

    dry: bool = False
    again: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    root: str | None = None
    data: list[tuple[str, list[str]]] = field(default_factory=list)
    """Overrides of every stage, such as ``data.path`` and ``[mine.jsonl]``."""
    stages: dict[str, list[str]] = field(default_factory=dict)
    """Overrides by stage, such as ``[--train.lr, 1e-5]``."""


class Planned(NamedTuple):
    """What is to be done with a stage."""

    stage: Stage
    action: str
    """``train``, ``again``, ``resume``, ``skip``, ``run`` (it trains nothing), or ``refuse``."""
    reason: str = ""
    """Why it is refused."""


def read_wishes(words: Sequence[str], stages: Sequence[str]) -> Wishes:
    """What the options of ``rl-caption run`` ask for.

    Raises:
        UsageError: an option does not say for which stage it is, or has no value.
    """
    wishes = Wishes(stages={stage: [] for stage in stages})
    for (stage, *rest), texts in split_words(Section, words):
        key = ".".join([stage, *rest])
        if key == "dry":
            wishes.dry = texts != ["false"]
        elif not texts:
            raise UsageError(f"--{key} has no value")
        elif key in ("again", "only"):
            getattr(wishes, key).extend(",".join(texts).split(","))
        elif key == "run.root":
            wishes.root = texts[0]
        elif stage == "data":
            wishes.data.append((key, texts))
        elif stage in wishes.stages and rest:
            wishes.stages[stage] += [f"--{'.'.join(rest)}", *texts]
        else:
            forms = " or ".join(f"--{stage}.{key}" for stage in stages)
            raise UsageError(
                f"--{key} does not say for which stage it is: write {forms}"
            )
    unknown = [name for name in (*wishes.again, *wishes.only) if name not in stages]
    if unknown:
        raise UsageError(
            f"there is no stage {unknown[0]!r}: expected {', '.join(stages)}"
        )
    return wishes


def make_stages(name: str, wishes: Wishes) -> list[Stage]:
    """The stages of a pipeline that are asked for, with checked configurations."""
    written = []
    for own_name, (program, recipe, changes) in read_pipeline(name).items():
        words = [] if recipe is None else ["--config", recipe]
        words += [f"--{key}={as_word(value)}" for key, value in changes.items()]
        written.append(Stage(own_name, program, words, load(program, words)))
    chosen = set(wishes.only or [stage.name for stage in written])
    for stage in reversed(written):
        if stage.name in chosen:
            chosen |= {source.name for source in starts_from(stage, written)}
    stages: list[Stage] = []
    moved: dict[Path, Path] = {}
    for stage in written:
        if stage.name in chosen:
            made = _with_wishes(stage, wishes, moved)
            if made.folder in [other.folder for other in stages]:
                raise UsageError(f"two stages write {made.folder}: {stage.name} is one")
            if made.folder != stage.folder:
                moved[stage.folder] = made.folder
            stages.append(made)
    return stages


def _with_wishes(stage: Stage, wishes: Wishes, moved: Mapping[Path, Path]) -> Stage:
    """A stage with the overrides of the command line, after those for folders that have moved."""
    words = []
    for key, value in stage.values.items() if moved else ():
        for before, now in moved.items():
            if is_inside(value, before):
                prefix = ENCODER if value.startswith(ENCODER) else ""
                rest = path_of(value).resolve().relative_to(before.resolve())
                words.append(f"--{key}={prefix}{now / rest}")
    if wishes.root is not None:
        key = "run.dir" if hasattr(stage.config, "run") else "out"
        words.append(f"--{key}={Path(wishes.root) / stage.name}")
    prefix = "--" if hasattr(stage.config, "data") else "--all."  # of a grid's runs
    for key, texts in wishes.data:
        words += [f"{prefix}{key}", *texts]
    words += wishes.stages.get(stage.name, [])
    if not words:
        return stage
    words = [*stage.words, *words]
    return replace(stage, words=words, config=load(stage.program, words))


# --- what is finished ---------------------------------------------------------------------------


def plan(stages: Sequence[Stage], again: Sequence[str]) -> list[Planned]:
    """What is to be done with each stage; what starts from a stage of ``again`` is done again, too."""
    planned: list[Planned] = []
    anew = set(again)
    for stage in stages:
        running = [one.stage for one in planned if one.action != "skip"]
        sources = [source.name for source in starts_from(stage, running)]
        if anew.intersection(sources):
            anew.add(stage.name)
        if not PROGRAMS[stage.program].trains:
            planned.append(Planned(stage, "run"))
        elif stage.name in anew:
            planned.append(Planned(stage, "again"))
        else:
            planned.append(_plan(stage, sources))
    return planned


def _plan(stage: Stage, sources: Sequence[str]) -> Planned:
    """What is to be done with a training that starts from ``sources``, which run before it."""
    from rl_caption.data.plain_files import read_json
    from rl_caption.training.checkpoint import CheckpointError, newest_checkpoint
    from rl_caption.training.run_folder import changed_keys, is_complete

    folder, note = stage.folder, stage.folder / INPUTS
    complete = is_complete(folder)
    if not complete and newest_checkpoint(folder / "checkpoints") is None:
        return Planned(stage, "train")
    differs = changed_keys(folder / "config.yaml", stage.config)
    differs += [f"it started from another export of {name}" for name in sources]
    if note.is_file():
        differs += _changed_inputs(read_json(note, CheckpointError), inputs_of(stage))
    else:
        differs.append(f"{note}, which says what it was made of, is missing")
    if differs:
        how = "finished" if complete else "began"
        advice = f"to train it anew: --again {stage.name}"
        return Planned(
            stage, "refuse", f"{folder} {how} otherwise: {'; '.join(differs)}; {advice}"
        )
    return Planned(stage, "skip" if complete else "resume")


def inputs_of(stage: Stage) -> dict[str, dict[str, str]]:
    """Fingerprints of a stage's data and of the exported models that it starts from, by key."""
    from rewards.model_files import MANIFEST
    from rl_caption.config.build import build_data
    from rl_caption.data.fingerprint import fingerprint
    from rl_caption.training.checkpoint import hash_of

    data = build_data(stage.config.data)
    splits = [
        split for split in ("train", stage.config.eval.split) if split in data.splits
    ]
    texts = {
        key: value for key, value in stage.values.items() if isinstance(value, str)
    }
    models = {
        key: hash_of(path_of(value))
        for key, value in texts.items()
        if (path_of(value) / MANIFEST).is_file()
    }
    return {
        "data": fingerprint({split: data.split(split) for split in splits}),
        "models": models,
    }


def _changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    from rl_caption.data.fingerprint import changes

    models = [
        key
        for key, value in now["models"].items()
        if before["models"].get(key) != value
    ]
    return changes(before["data"], now["data"])[0] + [
        f"{key}: other weights" for key in models
    ]


# --- running ------------------------------------------------------------------------------------


def run_pipeline(name: str, words: Sequence[str]) -> list[Stage] | None:
    """Run what is not finished of a pipeline.

    Returns:
        The stages; None where nothing was to be run, or a signal stopped a stage.

    Raises:
        ConfigError: something is missing, or a stage was made in another way. Nothing is trained.
    """
    wishes = read_wishes(words, list(read_pipeline(name)))
    stages = make_stages(name, wishes)
    is_main, share = _processes()
    actions: list[str] = []
    error: BaseException | None = None
    if is_main:
        try:
            actions = _checked_actions(stages, wishes)
        except EXPECTED as refusal:
            error = refusal
    actions, error = share((actions, error))
    if error is not None:
        raise error
    if wishes.dry:
        return None
    for number, (stage, action) in enumerate(
        zip(stages, actions, strict=True), start=1
    ):
        if is_main:
            done = "finished, " if action == "skip" else ""
            print(
                f"\n[{number}/{len(stages)}] {done}{stage.name}: {stage.command}",
                flush=True,
            )
        if action != "skip" and not _run(stage, action, is_main):
            return None
    return stages


def _checked_actions(stages: Sequence[Stage], wishes: Wishes) -> list[str]:
    """What is to be done with each stage, after a look at all that they need."""
    planned = plan(stages, wishes.again)
    if wishes.dry:
        print("\n".join(f"{one.action:<7} {one.stage.command}" for one in planned))
    findings = preflight([one.stage for one in planned if one.action != "skip"])
    refuse(
        findings, [f"{one.stage.name}: {one.reason}" for one in planned if one.reason]
    )
    return [one.action for one in planned]


def _run(stage: Stage, action: str, is_main: bool) -> bool:
    """Run a stage; False where a signal stopped it before its end."""
    from rl_caption.runtime.launch import run_lock
    from rl_caption.training.run_folder import RESULT, is_complete

    if is_main and action in ("train", "again"):
        with run_lock(stage.folder):
            if action == "again":
                (stage.folder / RESULT).unlink(missing_ok=True)
                for name in ("checkpoints", "export", "eval"):
                    shutil.rmtree(stage.folder / name, ignore_errors=True)
            (stage.folder / INPUTS).write_text(json.dumps(inputs_of(stage)))
    stage.start()
    return action == "run" or is_complete(stage.folder)


def _processes() -> tuple[bool, Callable[[Any], Any]]:
    """Whether this is the main process, and a function that gives its value to all of them."""
    from rl_caption.runtime.launch import check_processes, processes_started

    started = processes_started(os.environ)
    if started is None or started[1] == 1:
        return True, lambda value: value
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    from rl_caption.runtime.engines import accelerator_kwargs

    accelerator = Accelerator(**accelerator_kwargs())
    check_processes(accelerator.num_processes)
    return accelerator.is_main_process, lambda value: broadcast_object_list([value])[0]


def main(arguments: Sequence[str]) -> int:
    """Run ``NAME [OPTIONS]``."""
    words = list(arguments)
    if not words or words[0].startswith("-"):
        print(
            f"{USAGE}\n\nPipelines that the package brings: {', '.join(shipped_pipelines())}"
        )
        return 0 if words else 2
    if "--help" in words:
        print(f"{USAGE}\n")
        for stage, (program, recipe, _) in read_pipeline(words[0]).items():
            print(
                f"  {stage:<18} rl-caption {program}"
                + (f" --config {recipe}" if recipe else "")
            )
        return 0
    run_pipeline(words[0], words[1:])
    return 0
