"""Pipelines: stages that run one after the other (``rl-caption run NAME``)."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rewards.devices import is_main_process
from rl_caption.cli.preflight import preflight, refuse
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import (
    ENCODER,
    Stage,
    make_stages,
    shipped_pipelines,
    starts_from,
)

INPUTS = "stage.json"
"""File in a stage's folder: fingerprints of its data and of the models it starts from.
"""
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
    """A stage, and what to do with it."""

    stage: Stage
    action: str
    """``train``, ``again``, ``resume``, ``skip`` or ``run`` (it trains nothing)."""
    differs: Sequence[str] = ()
    """What changed since the stage began; a stage with changes is refused."""


def plan(stages: Sequence[Stage], again: Sequence[str]) -> list[Planned]:
    """Plan each stage. Stages that start from one of ``again`` are trained anew, too."""
    planned: list[Planned] = []
    anew = set(again)
    for stage in stages:
        running = [one.stage for one in planned if one.action != "skip"]
        sources = starts_from(stage.values, running)
        if anew.intersection(sources):
            anew.add(stage.name)
        action, differs = "again", list[str]()
        if not PROGRAMS[stage.program].trains:
            action = "run"
        elif stage.name not in anew:
            action, differs = _what_is_left(stage, sources)
        planned.append(Planned(stage, action, differs))
    return planned


def _what_is_left(stage: Stage, sources: Sequence[str]) -> tuple[str, list[str]]:
    """Action for a training, and what changed since it began. ``sources`` are the names
    of stages that it starts from and that run before it.
    """
    from rl_caption.data.fingerprint import changes
    from rl_caption.data.plain_files import read_json
    from rl_caption.training.checkpoint import (
        CheckpointError,
        changed_keys,
        is_complete,
        newest_checkpoint,
    )

    folder, note = stage.folder, stage.folder / INPUTS
    complete = is_complete(folder)
    if not complete and newest_checkpoint(folder / "checkpoints") is None:
        return "train", []
    before = read_json(note, CheckpointError) if note.is_file() else {}
    differs = changed_keys(folder / "config.yaml", stage.sections)
    differs += [f"it started from another export of {name}" for name in sources]
    differs += changes(before, inputs_of(stage))[0]
    return "skip" if complete else "resume", differs


def inputs_of(stage: Stage) -> dict[str, str]:
    """Fingerprints of a stage's data and of the exported models that it starts from, by key."""
    from rewards.model_files import MANIFEST
    from rl_caption.config.build import build_data
    from rl_caption.data.fingerprint import fingerprint
    from rl_caption.training.checkpoint import hash_of

    data = build_data(stage.config.data)
    splits = sorted({"train", stage.config.eval.split}.intersection(data))
    inputs = fingerprint({split: data[split] for split in splits})
    for key, value in stage.values.items():
        folder = Path(str(value).removeprefix(ENCODER))
        if (folder / MANIFEST).is_file():
            inputs[key] = f"weights {hash_of(folder)}"
    return inputs


def run_pipeline(name: str, words: Sequence[str]) -> list[Stage] | None:
    """Run the unfinished stages of a pipeline.

    Returns:
        The stages; None with ``--dry``, or where a signal stopped a stage.

    Raises:
        ConfigError: something is missing, or a stage began with other settings or
            inputs; raised before anything is trained.
    """
    stages, wishes = make_stages(name, words)
    planned = plan(stages, wishes["again"])
    is_main = is_main_process()
    if wishes["dry"] and is_main:
        print("\n".join(f"{one.action:<7} {one.stage.command}" for one in planned))
    findings = preflight([one.stage for one in planned if one.action != "skip"])
    reasons = []
    for stage, _, differs in planned:
        if differs:
            how = f"to train it anew: --again {stage.name}"
            reasons.append(
                f"{stage.name}: it began otherwise: {'; '.join(differs)}; {how}"
            )
    refuse(findings, reasons)
    if wishes["dry"]:
        return None
    for number, (stage, action, _) in enumerate(planned, 1):
        if is_main:
            status = "finished, " if action == "skip" else ""
            place = f"[{number}/{len(stages)}]"
            print(f"\n{place} {status}{stage.name}: {stage.command}", flush=True)
        if action != "skip" and not _run(stage, action, is_main):
            return None
    return stages


def _run(stage: Stage, action: str, is_main: bool) -> bool:
    """Run a stage; False where a signal stopped it before its end."""
    from rl_caption.runtime.launch import run_lock
    from rl_caption.training.checkpoint import RESULT, is_complete

    if is_main and action in ("train", "again"):
        with run_lock(stage.folder):
            if action == "again":
                (stage.folder / RESULT).unlink(missing_ok=True)
                for name in ("checkpoints", "export", "eval"):
                    shutil.rmtree(stage.folder / name, ignore_errors=True)
            (stage.folder / INPUTS).write_text(json.dumps(inputs_of(stage)))
    stage.start()
    return action == "run" or is_complete(stage.folder)


def main(arguments: Sequence[str]) -> int:
    """Run ``NAME [OPTIONS]``."""
    if "--help" in arguments or not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\n\nPipelines of the package: {', '.join(shipped_pipelines())}")
        return 0 if arguments else 2
    run_pipeline(arguments[0], arguments[1:])
    return 0
