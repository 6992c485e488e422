"""A run's files besides checkpoints (configuration, environment, logs, result), and where a run
resumes.
"""

import json
import platform
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers.utils import flatten_dict

from rewards.files import atomic_write, write_errors
from rewards.model_files import damage
from rl_caption.config.reward_models import TrainingConfig
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_log, read_yaml
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import installed_version
from rl_caption.runtime.launch import recorded_environment
from rl_caption.training.checkpoint import (
    CheckpointError,
    clear_leftovers,
    is_intact,
    newest_checkpoint,
    read_state,
)

RESULT = "result.json"
FREE_TO_CHANGE = (
    "run.",
    "report",
    "trust",
    "warm_start",
    "reward_models",
    "teacher.batch_size",
    "teacher.cache_",
    "data.num_workers",
    "data.cache_mb",
    "model.cache_dir",
    "data.check_images",
    "data.source",
    "eval.batch_size",
    "train.num_processes",
    "train.threads",
    "train.micro_batch_size",
)
"""Configuration keys that do not change what is computed."""
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
RECENT_STEPS = 100
"""Steps that the speed and the time left are estimated from."""


def find_checkpoint(config: TrainingConfig) -> Path | None:
    """The checkpoint to resume from, or None to start.

    Raises:
        CheckpointError: the folder holds another run (``refuse_other_run``); ``run.resume`` is the
            path of something else than an intact checkpoint; or all checkpoints are damaged, unless
            ``run.resume`` is false.
    """
    folder, resume = Path(config.run.dir), config.run.resume
    checkpoints = folder / "checkpoints"
    clear_leftovers(checkpoints)
    clear_leftovers(folder / "export")
    if isinstance(resume, str) and resume not in ("auto", "true", "false"):
        read_state(Path(resume))
        return Path(resume)
    newest = newest_checkpoint(checkpoints)
    if newest is not None:
        refuse_other_run(folder, newest.name, config)
        return newest
    damaged = [
        f"{path.name} ({damage(path)})" for path in sorted(checkpoints.glob("step-*"), reverse=True)
    ]
    if damaged and resume not in (False, "false"):
        best = folder / "export" / "best"
        left = (
            f"the best model is left in {best}" if is_intact(best) else "no exported model is left"
        )
        raise CheckpointError(
            f"all checkpoints in {checkpoints} are damaged: {'; '.join(damaged)}; {left}. Put a "
            f"whole one "
            "back, choose another run.dir, or set run.resume to false to start over at step 0"
        )
    return None


def refuse_other_run(folder: Path, newest: str, config: TrainingConfig) -> None:
    """Raise CheckpointError if ``run.resume`` is false, or if it is ``auto`` and the run had
    another configuration.

    ``newest`` is the name of the newest checkpoint in ``folder``.
    """
    if config.run.resume in (False, "false"):
        raise CheckpointError(
            f"{folder} already holds a run ({newest}) and run.resume is false: choose another "
            f"run.dir, remove the "
            "folder, or set run.resume to auto"
        )
    changed = changed_keys(folder / "config.yaml", config) if config.run.resume == "auto" else []
    if changed:
        raise CheckpointError(
            f"{folder} holds a run ({newest}) of another configuration: {'; '.join(changed)}. "
            f"Choose another "
            "run.dir, or set run.resume to true to continue with the changed configuration"
        )


def changed_keys(saved: Path, config: TrainingConfig) -> list[str]:
    """Differences between a saved configuration and ``config`` that change what is computed, as
    ``key: old -> new``.
    """
    return (
        changed_settings(read_config(saved), config) if saved.is_file() else [f"{saved} is missing"]
    )


def settings_of(config: TrainingConfig) -> dict[str, Any]:
    """The sections of a configuration that may change what is computed, as JSON would store them."""
    return {
        key: value
        for key, value in _plain(config).items()
        if not f"{key}.".startswith(FREE_TO_CHANGE)
    }


def changed_settings(old: Mapping[str, Any], config: TrainingConfig) -> list[str]:
    """``changed_keys`` of a saved configuration that was read already."""
    old, new = _flat(dict(old)), _flat(_plain(config))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(FREE_TO_CHANGE)
    ]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values by dotted keys, as JSON would store them (tuples as lists, a dataclass by its
    options).
    """
    flat: dict[str, Any] = flatten_dict(json.loads(json.dumps(values, default=asdict)))
    return flat


def write_run_files(config: TrainingConfig, extra: dict[str, Any]) -> None:
    """Write ``config.yaml`` (resolved) and ``env.json`` (versions, platform, command, kernels,
    ``extra``).
    """
    kernels = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    names = (
        "torch",
        "transformers",
        "accelerate",
        "tokenizers",
        "numpy",
        "open_clip_torch",
        "deepspeed",
        "rl-caption",
    )
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: installed_version(name) for name in names},
        "command": sys.argv,
        "kernels": kernels,
        "environment": recorded_environment(),
    }
    folder = Path(config.run.dir)
    write_text(folder / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False))
    write_json(folder / "env.json", environment | extra)


def read_config(path: Path) -> dict[str, Any]:
    """A YAML configuration as plain values, without defaults; raises CheckpointError if the file
    holds none.
    """
    content: dict[str, Any] = read_yaml(path, CheckpointError)
    return content


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``: the run is complete."""
    write_json(folder / RESULT, result, allow_nan=True)


def remove_result(folder: Path) -> None:
    """Remove ``result.json``: the run goes on, and a kill must not leave it looking complete."""
    (folder / RESULT).unlink(missing_ok=True)


def is_complete(folder: Path) -> bool:
    """Whether the run in ``folder`` reached its end."""
    return (folder / RESULT).is_file()


class RunLog:
    """Logs of one run: ``metrics.jsonl``, ``samples.jsonl``, lines on the terminal, a progress bar,
    trackers.

    Every process calls the methods; only the main process writes.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, name: str, start_step: int, max_steps: int
    ) -> None:
        self.accelerator, self.folder, self.name = accelerator, folder, name
        self.max_steps = max_steps
        self.opened, self.step_ends = time.monotonic(), deque[float](maxlen=RECENT_STEPS + 1)
        self.bar: tqdm | None = None
        if accelerator.is_main_process:
            for file in ("metrics.jsonl", "samples.jsonl"):
                # A run that starts anew validates before step 1 again, so a line of step 0 goes
                # too.
                drop_after(folder / file, start_step if start_step else -1)
            self.bar = tqdm(
                total=max_steps,
                initial=start_step,
                desc=name,
                unit="step",
                dynamic_ncols=True,
                disable=None,
            )

    def message(self, text: str) -> None:
        """Print a line."""
        print_main(self.accelerator, f"[{self.name}] {text}")

    def advance(self) -> None:
        """One step is done."""
        self.step_ends.append(time.monotonic())
        if self.bar is not None:
            self.bar.update(1)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Append one line to ``metrics.jsonl``, print the summary, pass the values to Accelerate's
        trackers.
        """
        self.accelerator.log(values, step=step)
        if not self.accelerator.is_main_process:
            return
        append_line(self.folder / "metrics.jsonl", {"step": step, **values})
        summary = "  ".join(f"{key} {values[key]:.4g}" for key in SUMMARY_KEYS if key in values)
        # From the end of the first step on, which is slower than those that follow.
        times = self.step_ends if len(self.step_ends) > 1 else [self.opened, *self.step_ends]
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        left = (self.max_steps - step) / rate if rate > 0 else float("nan")
        self.message(
            f"step {step}/{self.max_steps}  {summary}  {rate:.2f} steps/s  {clock(left)} left"
        )

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        """Append sampled captions with their rewards to ``samples.jsonl``."""
        if self.accelerator.is_main_process:
            for record in records:
                append_line(self.folder / "samples.jsonl", {"step": step, **record})

    def close(self) -> None:
        """End the progress bar."""
        if self.bar is not None:
            self.bar.close()


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    if not seconds < 1e8:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


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
    kept = [record for _, record in read_log(path, CheckpointError) if record["step"] <= step]
    with atomic_write(path) as file:
        file.writelines(_line(record) for record in kept)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _plain(config: TrainingConfig) -> dict[str, Any]:
    """The configuration as JSON would store it (tuples as lists)."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain
