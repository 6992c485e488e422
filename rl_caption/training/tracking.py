"""What a run writes and prints while it trains: ``metrics.jsonl``, ``samples.jsonl``, log lines, a progress bar."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from rewards.files import atomic_write, write_errors
from rl_caption.data.plain_files import read_log
from rl_caption.training.checkpoint import CheckpointError

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
"""Keys of the one-line summary, where present; all keys stand in ``metrics.jsonl``."""


def announce(accelerator: Accelerator, text: str) -> None:
    """Print a line from the main process."""
    if accelerator.is_main_process:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


class RunLog:
    """Log of one run. Only the main process writes; the others call the same methods and nothing happens."""

    def __init__(self, accelerator: Accelerator, folder: Path, name: str, start_step: int, max_steps: int) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.name = name
        self.max_steps = max_steps
        self.started = time.monotonic()
        self.start_step = start_step
        self.bar: tqdm | None = None
        if accelerator.is_main_process:
            for file in ("metrics.jsonl", "samples.jsonl"):
                # A run that starts anew validates before step 1 again, so a line of step 0 goes too.
                drop_after(folder / file, start_step if start_step else -1)
            if sys.stderr.isatty():
                self.bar = tqdm(total=max_steps, initial=start_step, desc=name, unit="step", dynamic_ncols=True)

    def message(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        announce(self.accelerator, f"[{self.name}] {text}")

    def advance(self) -> None:
        """One step is done."""
        if self.bar is not None:
            self.bar.update(1)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Append one line to ``metrics.jsonl``, print the summary, pass the values to Accelerate's trackers."""
        self.accelerator.log(values, step=step)
        if not self.accelerator.is_main_process:
            return
        append_line(self.folder / "metrics.jsonl", {"step": step, **values})
        summary = "  ".join(f"{key} {values[key]:.4g}" for key in SUMMARY_KEYS if key in values)
        done = step - self.start_step
        rate = done / max(time.monotonic() - self.started, 1e-9)
        left = (self.max_steps - step) / rate if rate > 0 else float("nan")
        self.message(f"step {step}/{self.max_steps}  {summary}  {rate:.2f} steps/s  {clock(left)} left")

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


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def drop_after(path: Path, step: int) -> None:
    """Remove lines of steps after ``step`` (they are run again), and a last line that a kill left incomplete.

    Raises:
        CheckpointError: another line is not JSON, or has no whole ``step``.
    """
    if not path.exists():
        return
    kept = [record for _, record in read_log(path, CheckpointError) if record["step"] <= step]
    with atomic_write(path) as file:
        file.writelines(_line(record) for record in kept)
