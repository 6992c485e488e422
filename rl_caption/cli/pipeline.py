"""Pipelines: stages that run one after the other (``rl-caption run NAME``)."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rl_caption.cli.preflight import preflight, refuse
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import (
    Stage,
    make_stages,
    path_of,
    shipped_pipelines,
    starts_from,
)
from rl_caption.runtime.errors import EXPECTED

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


class Planned(NamedTuple):
    """What is to be done with a stage."""

    stage: Stage
    action: str
    """``train``, ``again``, ``resume``, ``skip``, ``run`` (it trains nothing), or ``refuse``."""
    reason: str = ""
    """Why it is refused."""


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
    from rl_caption.data.fingerprint import changes
    from rl_caption.data.plain_files import read_json
    from rl_caption.training.checkpoint import CheckpointError, newest_checkpoint
    from rl_caption.training.run_folder import changed_keys, is_complete

    folder, note = stage.folder, stage.folder / INPUTS
    complete = is_complete(folder)
    if not complete and newest_checkpoint(folder / "checkpoints") is None:
        return Planned(stage, "train")
    differs = changed_keys(folder / "config.yaml", stage.sections)
    differs += [f"it started from another export of {name}" for name in sources]
    if note.is_file():
        before, now = read_json(note, CheckpointError), inputs_of(stage)
        differs += changes(before["data"], now["data"])[0]
        for key, weights in now["models"].items():
            if before["models"].get(key) != weights:
                differs.append(f"{key}: other weights")
    else:
        differs.append(f"{note}, which says what it was made of, is missing")
    if differs:
        how = "finished" if complete else "began"
        reason = f"{folder} {how} otherwise: {'; '.join(differs)}"
        advice = f"to train it anew: --again {stage.name}"
        return Planned(stage, "refuse", f"{reason}; {advice}")
    return Planned(stage, "skip" if complete else "resume")


def inputs_of(stage: Stage) -> dict[str, dict[str, str]]:
    """Fingerprints of a stage's data and of the exported models that it starts from, by key."""
    from rewards.model_files import MANIFEST
    from rl_caption.config.build import build_data
    from rl_caption.data.fingerprint import fingerprint
    from rl_caption.training.checkpoint import hash_of

    data = build_data(stage.config.data)
    splits = {"train", stage.config.eval.split}.intersection(data.splits)
    models = {}
    for key, value in stage.values.items():
        if isinstance(value, str) and (path_of(value) / MANIFEST).is_file():
            models[key] = hash_of(path_of(value))
    rows = {split: data.split(split) for split in sorted(splits)}
    return {"data": fingerprint(rows), "models": models}


def run_pipeline(name: str, words: Sequence[str]) -> list[Stage] | None:
    """Run what is not finished of a pipeline.

    Returns:
        The stages; None where nothing was to be run, or a signal stopped a stage.

    Raises:
        ConfigError: something is missing, or a stage was made in another way. Nothing is trained.
    """
    stages, wishes = make_stages(name, words)
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
    if wishes["dry"]:
        return None
    for number, stage in enumerate(stages):
        action = actions[number]
        if is_main:
            done = "finished, " if action == "skip" else ""
            place = f"[{number + 1}/{len(stages)}]"
            print(f"\n{place} {done}{stage.name}: {stage.command}", flush=True)
        if action != "skip" and not _run(stage, action, is_main):
            return None
    return stages


def _checked_actions(
    stages: Sequence[Stage], wishes: Mapping[str, Sequence[str]]
) -> list[str]:
    """What is to be done with each stage, after a look at all that they need."""
    planned = plan(stages, wishes["again"])
    if wishes["dry"]:
        print("\n".join(f"{one.action:<7} {one.stage.command}" for one in planned))
    findings = preflight([one.stage for one in planned if one.action != "skip"])
    reasons = [f"{one.stage.name}: {one.reason}" for one in planned if one.reason]
    refuse(findings, reasons)
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
    if "--help" in words or not words or words[0].startswith("-"):
        print(f"{USAGE}\n\nPipelines of the package: {', '.join(shipped_pipelines())}")
        return 0 if words else 2
    run_pipeline(words[0], words[1:])
    return 0


def demo(words: Sequence[str]) -> int:
    """Run the pipeline ``demo``."""
    return main(["demo", *words])
