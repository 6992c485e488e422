"""A run's files besides checkpoints (configuration, environment, logs, result), and where a run
resumes.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers.utils import flatten_dict

from rewards.files import atomic_write, write_errors
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_log, read_yaml
from rl_caption.runtime.errors import installed_version
from rl_caption.training.checkpoint import (
    CheckpointError,
    clear_leftovers,
    newest_checkpoint,
    read_state,
)

RESULT = "result.json"
LOGS = ("metrics.jsonl", "samples.jsonl")
FREE_TO_CHANGE = (
    "run.",
    "report",
    "trust",
    "teacher.batch_size",
    "teacher.cache_",
    "data.num_workers",
    "data.cache_mb",
    "data.check_images",
    "data.source",
    "eval.batch_size",
    "train.num_processes",
    "train.threads",
    "train.micro_batch_size",
)
"""Configuration keys that do not change what is computed."""
RECORDED = re.compile(
    "ACCELERATE_|ATEN_|CU|DNNL_|MKL_|NCCL_|NVIDIA_|OMP_|ONEDNN_|TORCH"
)
"""Names of variables that choose kernels, and so the last digits."""
SUMMARY_KEYS = (
    "loss/total",
    "loss/xe",
    "reward/total",
    "reward/greedy",
    "policy/entropy",
    "completion/length",
    "completion/eos_fraction",
    "grad/norm",
    "val/cider",
    "val/retrieval_r1",
    "val/teacher_cosine_image",
    "val/teacher_cosine_text",
)
"""Keys of the one-line summary, where present; all keys are in ``metrics.jsonl``."""
RECORDED_VERSIONS = (
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "numpy",
    "open_clip_torch",
    "deepspeed",
    "rl-caption",
)


def find_checkpoint(settings: Mapping[str, Any]) -> Path | None:
    """The checkpoint to resume from, or None to start; ``settings`` are a configuration as JSON.

    Raises:
        CheckpointError: the folder holds a run and ``run.resume`` is false, or a run of another
            configuration and it is ``auto``; it is the path of something else than an intact
            checkpoint; or all checkpoints are damaged, unless it is false.
    """
    options = settings["run"]
    folder, resume = Path(options["dir"]), resume_mode(options["resume"])
    checkpoints = folder / "checkpoints"
    clear_leftovers(checkpoints)
    clear_leftovers(folder / "export")
    if resume not in ("auto", "true", "false"):
        read_state(Path(resume))
        return Path(resume)
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        if resume != "false" and any(checkpoints.glob("step-*")):
            raise CheckpointError(
                f"all checkpoints in {checkpoints} are damaged. Put a whole "
                "one back, choose another run.dir, or set run.resume to false to start over"
            )
        return None
    problems = ["run.resume is false"] if resume == "false" else []
    if resume == "auto":
        before = read_state(newest).configuration
        problems = changed_settings(before, computed(settings))
    if problems:
        raise CheckpointError(
            f"{folder} holds a run ({newest.name}), and {'; '.join(problems)}. Choose another "
            "run.dir, or set run.resume to true to continue that run"
        )
    return newest


def resume_mode(resume: bool | str) -> str:
    """``auto``, ``true``, ``false``, or the path of a checkpoint: what ``run.resume`` asks for."""
    return str(resume).lower() if isinstance(resume, bool) else resume


def computed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration that may change what is computed, by ``section.key``."""
    return {
        key: value
        for key, value in flatten_dict(dict(settings)).items()
        if not key.startswith(FREE_TO_CHANGE)
    }


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences between two results of ``computed``, as ``key: old -> new``."""
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def changed_keys(saved: Path, settings: Mapping[str, Any]) -> list[str]:
    """``changed_settings`` of a saved configuration and one as JSON."""
    if not saved.is_file():
        return [f"{saved} is missing"]
    before = read_yaml(saved, CheckpointError)
    return changed_settings(computed(before), computed(settings))


def write_run_files(
    folder: Path, settings: Mapping[str, Any], extra: dict[str, Any]
) -> None:
    """Write ``config.yaml`` (resolved ``settings``) and ``env.json`` (versions, platform, command,
    variables that choose kernels, ``extra``).
    """
    variables = {key: os.environ[key] for key in os.environ if RECORDED.match(key)}
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: installed_version(name) for name in RECORDED_VERSIONS},
        "command": sys.argv,
        "environment": variables,
    }
    write_text(folder / "config.yaml", yaml.safe_dump(dict(settings), sort_keys=False))
    write_json(folder / "env.json", environment | extra)


def is_complete(folder: Path) -> bool:
    """Whether the run in ``folder`` reached its end."""
    return (folder / RESULT).is_file()


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line in a single write."""
    with write_errors(path), path.open("ab") as handle:
        handle.write(_line(record))


def drop_after(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``, which are run again, and a last line that a kill
    left incomplete.

    Raises CheckpointError if any other line is not JSON or has no integer ``step``.
    """
    if not path.exists():
        return
    kept = [
        record
        for _, record in read_log(path, CheckpointError)
        if record["step"] <= step
    ]
    with atomic_write(path) as file:
        file.writelines(map(_line, kept))


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
