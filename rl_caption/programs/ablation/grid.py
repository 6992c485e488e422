"""Grids: one run for each cell and seed, trained in parallel, and a table over seeds.

A grid that was stopped goes on: finished runs are kept, and an interrupted one continues.
"""

import csv
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from rl_caption.config.schema import ScstConfig
from rl_caption.data.files import write_text
from rl_caption.evaluation.results import (
    LEFT_OUT,
    Column,
    format_value,
    markdown,
)
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.runtime.errors import EXPECTED, ConfigError, config_errors
from rl_caption.runtime.options import as_words
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.checkpoint import changed_keys, is_complete

Parse = Callable[..., Any]
"""``rl_caption.cli.configuration.parse``: (kind, arguments, program) -> a configuration."""
START = "start"
"""Label of the starting policy in tables."""
LABEL = re.compile(r"[A-Za-z0-9][\w.=+-]*", re.ASCII)
SECONDS_TO_SAVE = 120.0
"""Seconds that a stopped training may take for its checkpoint."""


class Run(NamedTuple):
    """One run of a grid."""

    label: str
    """Label of its cell."""
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


class Result(NamedTuple):
    """Figures measured of a run; a starting policy has no seed."""

    label: str
    seed: int | None
    figures: Mapping[str, float | None]


def make_runs(grid: AblateConfig, words: Sequence[str], parse: Parse) -> list[Run]:
    """All runs of a grid, seed by seed, so that a grid that is cut short has whole tables.

    Args:
        grid: the grid.
        words: arguments of the command line that all runs share.
        parse: makes a configuration of a command line.

    Raises:
        ConfigError: a value is wrong (the message names the cell), or a run that is
            already there has another configuration.
    """
    runs = []
    for seed in dict.fromkeys(grid.seeds):
        for label, cell in grid.cells.items():
            if label == START or not LABEL.fullmatch(label):
                expected = "letters, digits and . _ = + -, and not start"
                raise ConfigError(f"cells has the name {label!r}: expected {expected}")
            parent = Path(grid.out) / "cells" / label / f"seed{seed}"
            values = cell.overrides | {"run.dir": f"{parent}/run", "train.seed": seed}
            if cell.terms:
                values["reward.terms"] = cell.model_dump(mode="json")["terms"]
            key = f"cell {label!r}"
            with config_errors(key):
                config = parse(ScstConfig, [*words, *as_words(values)], key)
            run = Run(label, seed, parent, config)
            saved = run.folder / "config.yaml"
            settings = config.model_dump(mode="json")
            if saved.is_file() and (changed := changed_keys(saved, settings)):
                raise ConfigError(
                    f"{run.name} exists with another configuration: {'; '.join(changed)}. Choose "
                    f"another out, or remove {parent}"
                )
            runs.append(run)
    if not runs:
        raise ConfigError("cells or seeds is empty: expected at least one of each")
    return runs


def train_runs(
    runs: Sequence[Run],
    num_parallel: int,
    measure: Callable[[Run], Mapping[str, float | None]],
) -> tuple[list[Result], list[str]]:
    """Train the runs that are not complete and ``measure`` each when it is; return the
    results, and why runs failed.

    An error of ``measure`` that a user can mend counts as a failure, too.
    """
    complete = sum(is_complete(run.folder) for run in runs)
    say(f"{len(runs)} runs: {complete} complete, {len(runs) - complete} to train")
    # What is measured here shares the cores with the trainings.
    torch.set_num_threads(cpu_threads(num_parallel + 1))
    results: dict[str, Result] = {}
    failures = []
    for run, code in ended_runs(runs, num_parallel):
        if not is_complete(run.folder):
            log = run.parent / "log.txt"
            failures.append(
                f"{run.name} failed (exit code {code}); its output is in {log}"
            )
            continue
        try:
            results[run.name] = Result(run.label, run.seed, measure(run))
            say(f"[{len(results)}/{len(runs)}] {run.name}")
        except EXPECTED as error:
            failures.append(f"{run.name} is trained but could not be judged: {error}")
    return [results[run.name] for run in runs if run.name in results], failures


def ended_runs(runs: Sequence[Run], num_parallel: int) -> Iterator[tuple[Run, int]]:
    """Yield the complete runs, with 0, then train the others, ``num_parallel`` at a
    time, and yield each when it has ended, with its exit code.

    Each training has one GPU where there are several. Closing this generator early
    asks the running trainings to stop, and waits for their checkpoints.
    """
    devices = share_devices(num_parallel, torch.cuda.device_count())
    waiting = [run for run in runs if not is_complete(run.folder)]
    yield from ((run, 0) for run in runs if run not in waiting)
    running: list[tuple[Run, subprocess.Popen[bytes], str | None]] = []

    def start() -> None:
        """Start the next run on a device that is free."""
        run, device = waiting.pop(0), devices.pop(0)
        running.append((run, _start(run, device), device))

    # Signals interrupt the main thread alone: every started training is in the list.
    with ThreadPoolExecutor(1) as starter:
        try:
            while waiting or running:
                ended = [job for job in running if job[1].poll() is not None]
                for job in ended:
                    running.remove(job)
                    devices.append(job[2])
                while waiting and devices:
                    starter.submit(start).result()
                for run, process, _ in ended:
                    yield run, process.returncode
                if not ended:
                    time.sleep(0.1)
        finally:
            starter.shutdown()
            _stop([process for _, process, _ in running if process.poll() is None])


def _start(run: Run, device: str | None) -> subprocess.Popen[bytes]:
    file = run.parent / "config.yaml"
    settings = run.config.model_dump(mode="json")
    write_text(file, yaml.safe_dump(settings, sort_keys=False))
    chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    # A session of its own: Ctrl-C reaches this process only, which asks the training to stop.
    with (run.parent / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rl_caption", "scst", "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | chosen,
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
    """``CUDA_VISIBLE_DEVICES`` of each of ``num_parallel`` runs, out of the ``count``
    GPUs that this process sees; None leaves all visible.
    """
    if num_parallel < 2 or count < 2:
        return [None] * num_parallel
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = visible.split(",")[:count]
    return [names[slot % count].strip() for slot in range(num_parallel)]


def write_tables(
    out: Path,
    results: Sequence[Result],
    column_of: Callable[[str], Column],
    notes: Sequence[str],
    failures: Sequence[str],
) -> int:
    """Print and write ``table.md`` (means over seeds ± standard deviation, n - 1) and
    ``runs.csv`` (a line for each run). Returns 0, or 1 where runs failed.
    """
    keys = list(dict.fromkeys(key for result in results for key in result.figures))
    lines = []
    for label in dict.fromkeys(result.label for result in results):
        seeds = [result.figures for result in results if result.label == label]
        line = [label, str(len(seeds))]
        for key in keys:
            entries = [figures.get(key) for figures in seeds]
            values = [value for value in entries if value is not None]
            text = LEFT_OUT
            if values:
                text = format_value(statistics.fmean(values), column_of(key))
            if len(values) > 1:
                text += f" ± {format_value(statistics.stdev(values), column_of(key))}"
            line.append(text)
        lines.append(line)
    head = ["system", "seeds", *(column_of(key).heading for key in keys)]
    table = markdown(head, lines)
    print(table)
    listed = [*notes, *(f"missing: {failure}" for failure in failures)]
    remarks = "\n".join(f"- {line}" for line in listed)
    write_text(out / "table.md", f"# {out.name}\n\n{table}\n\n{remarks}\n")
    with (out / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["system", "seed", *keys])
        for label, seed, figures in results:
            writer.writerow([label, seed, *map(figures.get, keys)])
    for failure in failures:
        say(f"error: {failure}")
    return int(bool(failures))


def say(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)
