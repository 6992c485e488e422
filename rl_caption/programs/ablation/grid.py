"""Runs of a grid: one configuration for each cell and seed, and trainings that run at the same time.

A grid that was stopped goes on: finished runs are kept, and an interrupted one continues.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import yaml

from rl_caption.data.files import write_text
from rl_caption.evaluation import check_writable
from rl_caption.programs.ablation.config import CellConfig, GridConfig
from rl_caption.runtime.errors import EXPECTED, ConfigError, config_errors
from rl_caption.runtime.launch import run_lock, stop_requests
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.run_folder import changed_keys, is_complete, plain

Parse = Callable[..., Any]
"""``rl_caption.cli.configuration.parse``: (kind, arguments, program) -> a configuration."""
START = "start"
"""Label of the starting policy in tables."""
LABEL = re.compile(r"[A-Za-z0-9][\w.=+-]*", re.ASCII)
SECONDS_TO_SAVE = 120.0
"""How long a stopped training may take for its checkpoint."""


class Run(NamedTuple):
    """One run of a grid."""

    label: str
    """Of its cell."""
    seed: int
    parent: Path
    """``OUT/cells/LABEL/seedN``, with the folder ``run``, ``config.yaml`` and ``log.txt``."""
    config: Any

    @property
    def name(self) -> str:
        return f"{self.label} seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.parent / "run"


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Values by dotted key, as words of a command line."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return [f"--{key}={text}" for key, text in texts.items()]


def make_runs(
    grid: GridConfig,
    kind: type[Any],
    words: Sequence[str],
    parse: Parse,
) -> list[Run]:
    """All runs of a grid, seed by seed, so that a grid that is cut short has whole tables.

    Args:
        grid: the grid.
        kind: class of the configuration of a run.
        words: of the command line that all runs share.
        parse: makes a configuration of a command line.

    Raises:
        ConfigError: a value is wrong (the message names the cell), or a run that is already there
            has another configuration.
    """
    runs = []
    for seed in dict.fromkeys(grid.seeds):
        for label, cell in grid.cells.items():
            if label == START or not LABEL.fullmatch(label):
                expected = "letters, digits and . _ = + -, and not start"
                raise ConfigError(f"cells has the name {label!r}: expected {expected}")
            parent, key = (
                Path(grid.out) / "cells" / label / f"seed{seed}",
                f"cell {label!r}",
            )
            own = as_words(
                cell_values(cell) | {"run.dir": f"{parent}/run", "train.seed": seed}
            )
            with config_errors(key):
                config = parse(kind, [*words, *own], key)
            run = Run(label, seed, parent, config)
            saved = run.folder / "config.yaml"
            changed = changed_keys(saved, config) if saved.is_file() else []
            if changed:
                raise ConfigError(
                    f"{run.name} exists with another configuration: {'; '.join(changed)}. Choose "
                    f"another out, or remove {parent}"
                )
            runs.append(run)
    if not runs:
        raise ConfigError("cells or seeds is empty: expected at least one of each")
    return runs


def cell_values(cell: CellConfig) -> dict[str, Any]:
    """The values of a cell by dotted key."""
    terms = {name: term.model_dump(mode="json") for name, term in cell.terms.items()}
    return ({"reward.terms": terms} if terms else {}) | cell.overrides


@contextmanager
def owned(out: str) -> Iterator[Path]:
    """Inside, no other process works on the grid in the folder ``out``, and a signal ends it."""
    folder = check_writable(out)
    with run_lock(folder, wait_seconds=10.0), stop_requests(leave=True):
        yield folder


def train_runs(
    program: str, runs: Sequence[Run], num_parallel: int, measure: Callable[[Run], None]
) -> list[str]:
    """Train the runs that are not complete and ``measure`` each when it is; return why runs failed.

    What users can mend in ``measure`` is a failure, too.
    """
    waiting = [run for run in runs if not is_complete(run.folder)]
    complete = len(runs) - len(waiting)
    say(
        f"{len(runs)} runs: {complete} complete, {len(waiting)} to train, {num_parallel} at a time"
    )
    # What is measured here shares the cores with the trainings.
    torch.set_num_threads(cpu_threads(num_parallel + 1))
    failures = []

    def finish(run: Run, code: int) -> None:
        if is_complete(run.folder):
            try:
                measure(run)
            except EXPECTED as error:
                failures.append(
                    f"{run.name} is trained but could not be judged: {error}"
                )
        else:
            log = run.parent / "log.txt"
            failures.append(
                f"{run.name} failed (exit code {code}); its output is in {log}"
            )

    for run in runs:
        if run not in waiting:
            finish(run, 0)
    for run, code in trained(program, waiting, num_parallel):
        finish(run, code)
    return failures


def trained(
    program: str, runs: Sequence[Run], num_parallel: int
) -> Iterator[tuple[Run, int]]:
    """Train runs, ``num_parallel`` at a time, and yield each when it has ended, with its exit code.

    Each of them has one GPU where there are several. What ends this generator early asks the
    running trainings to stop, and waits for their checkpoints.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in share_devices(num_parallel, torch.cuda.device_count()):
        free.put(device)
    running: set[subprocess.Popen[bytes]] = set()
    lock, stopped = threading.Lock(), threading.Event()

    def train(run: Run) -> tuple[Run, int]:
        device = free.get()
        try:
            with lock:  # nothing is started after the others were asked to stop
                if stopped.is_set():
                    return run, 1
                process = _start(program, run, device)
                running.add(process)
            return run, process.wait()
        finally:
            free.put(device)

    with ThreadPoolExecutor(num_parallel) as pool:
        try:
            waiting = {pool.submit(train, run) for run in runs}
            while waiting:
                # Not for ever: a signal that comes just before the wait is handled after it.
                ended, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield future.result()
        finally:
            with lock:
                stopped.set()
            _stop([process for process in running if process.poll() is None])


def _start(program: str, run: Run, device: str | None) -> subprocess.Popen[bytes]:
    file = run.parent / "config.yaml"
    write_text(file, yaml.safe_dump(plain(run.config), sort_keys=False))
    environment = os.environ | (
        {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    )
    # A session of its own: Ctrl-C reaches this process only, which asks the training to stop.
    with (run.parent / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rl_caption", program, "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    if processes:
        say(
            "stopping: running trainings save a checkpoint; the same command continues from it"
        )
    for process in processes:
        try:
            process.wait(SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            process.kill()


def share_devices(num_parallel: int, count: int) -> list[str | None]:
    """``CUDA_VISIBLE_DEVICES`` for each run at a time, of the ``count`` GPUs that this process sees;
    None leaves all visible.
    """
    if num_parallel < 2 or count < 2:
        return [None] * num_parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = visible.split(",")[:count]
    return [names[slot % count].strip() for slot in range(num_parallel)]


def say(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)
