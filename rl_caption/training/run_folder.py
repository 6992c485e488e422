"""The folder of a run: may it be written, does it hold a run already, and where does that run go on."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from rewards.model_files import damage
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_yaml
from rl_caption.reward_models.config import TrainingConfig
from rl_caption.training.checkpoint import CheckpointError, clear_leftovers, is_intact, newest_checkpoint, read_state

RESULT = "result.json"
FREE_TO_CHANGE = (
    "run.",
    "report",
    "warm_start",
    "reward_models",
    "teacher.batch_size",
    "teacher.cache_",
    "data.num_workers",
    "data.cache_mb",
    "data.check_images",
    "eval.batch_size",
    "train.num_processes",
    "train.threads",
    "train.micro_batch_size",
)
"""Configuration keys that do not change what is computed."""


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """The checkpoint to go on from, or None to start.

    Raises:
        CheckpointError: ``run.resume`` is false and the folder holds a run; ``auto`` and the configuration is another
            than the one that the run was started with; there are checkpoints, but all are damaged (with ``run.resume``
            false the run starts over); or a path that is not an intact checkpoint.
    """
    folder, resume = Path(config.run.dir), config.run.resume
    clear_leftovers(folder / "checkpoints")
    clear_leftovers(folder / "export")
    if isinstance(resume, str) and resume not in ("auto", "true", "false"):
        read_state(Path(resume))
        return Path(resume)
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        if resume not in (False, "false"):
            _refuse_to_start_over(folder)
        return None
    refuse_other_run(folder, newest.name, config)
    return newest


def _refuse_to_start_over(folder: Path) -> None:
    """Raise ``CheckpointError`` where there are checkpoints, none of which is intact."""
    found = [f"{path.name} ({damage(path)})" for path in sorted((folder / "checkpoints").glob("step-*"), reverse=True)]
    if found:
        best = folder / "export" / "best"
        left = f"the best model is left in {best}" if is_intact(best) else "no exported model is left"
        raise CheckpointError(
            f"all checkpoints in {folder / 'checkpoints'} are damaged: {'; '.join(found)}; {left}. Put a whole one "
            "back, choose another run.dir, or set run.resume to false to start over at step 0"
        )


def refuse_other_run(folder: Path, newest: str, config: TrainingConfig) -> None:
    """See to it that ``config`` may go on with the run in ``folder``, whose newest checkpoint is called ``newest``.

    Raises:
        CheckpointError: ``run.resume`` is false, or ``auto`` and the configuration is another than the run's.
    """
    if config.run.resume in (False, "false"):
        raise CheckpointError(
            f"{folder} already holds a run ({newest}) and run.resume is false: choose another run.dir, remove the "
            "folder, or set run.resume to auto"
        )
    changed = changed_keys(folder / "config.yaml", config) if config.run.resume == "auto" else []
    if changed:
        raise CheckpointError(
            f"{folder} holds a run ({newest}) of another configuration: {'; '.join(changed)}. Choose another "
            "run.dir, or set run.resume to true to go on with the changed configuration"
        )


def changed_keys(saved: Path, config: TrainingConfig) -> list[str]:
    """Differences between a saved configuration and ``config`` that change what is computed, as ``key: old -> new``.

    A key that the saved one does not have, because an older version wrote it, has its default.
    """
    if not saved.is_file():
        return [f"{saved} is missing"]
    old, default = read_config(saved), _plain(type(config)())
    for section, value in old.items():
        if isinstance(value, dict) and isinstance(default.get(section), dict):
            old[section] = default[section] | value
    old, new = _flat(old), _flat(_plain(config))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(FREE_TO_CHANGE)
    ]


def write_run_files(config: TrainingConfig, extra: dict[str, Any]) -> None:
    """Write ``config.yaml`` (resolved) and ``env.json`` (versions, devices, command) before the first step."""
    folder = Path(config.run.dir)
    write_text(folder / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False))
    write_json(folder / "env.json", environment() | extra)


def read_config(path: Path) -> dict[str, Any]:
    """A YAML configuration as plain values, defaults not filled in.

    Raises:
        CheckpointError: it is not YAML, or not keys and values.
    """
    content: dict[str, Any] = read_yaml(path, CheckpointError)
    return content


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``: the run is complete."""
    write_json(folder / RESULT, result)


def remove_result(folder: Path) -> None:
    """Take ``result.json`` away, where there is one: the run goes on, and a kill must not leave it looking complete."""
    (folder / RESULT).unlink(missing_ok=True)


def is_complete(folder: Path) -> bool:
    """Whether the run in ``folder`` reached its end."""
    return (folder / RESULT).is_file()


def environment() -> dict[str, Any]:
    """Versions, platform and command line, for ``env.json``."""
    names = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "open_clip_torch", "deepspeed", "rl-caption")
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "command": sys.argv,
    }


def _plain(config: TrainingConfig) -> dict[str, Any]:
    """The configuration as JSON has it."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        items: dict[str, Any] = {}
        for key, inner in value.items():
            items |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return items
    return {prefix: value}
