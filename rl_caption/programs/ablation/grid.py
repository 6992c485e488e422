"""Runs of a grid: one configuration for each label and seed, and trainings that run at the same time.

A grid that was stopped goes on: finished runs are kept, and an interrupted one continues.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm.auto import tqdm

from rl_caption.data.files import write_text
from rl_caption.programs.ablation.jobs import EndedJob, Job, run_jobs, share_devices
from rl_caption.runtime.errors import EXPECTED, ConfigError, config_errors
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.run_folder import changed_keys, is_complete, plain

Parse = Callable[..., Any]
"""``rl_caption.cli.configuration.parse``: (kind, arguments, program) -> a configuration."""


@dataclass(frozen=True)
class Run:
    """One run of a grid: ``rl-caption PROGRAM --config FILE``."""

    program: str
    label: str
    """The name of its row in tables, which all seeds share."""
    seed: int
    parent: Path
    """``OUT/cells/LABEL/seedN``, with the folder ``run``, ``PROGRAM.yaml`` and ``log.txt``."""
    config: Any

    @property
    def name(self) -> str:
        return f"{self.label} seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.parent / "run"


def as_argument(value: Any) -> str:
    """A value of a configuration, written as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Values by dotted key, as words of a command line."""
    return [f"--{key}={as_argument(value)}" for key, value in values.items()]


def make_runs(
    program: str,
    kind: type[Any],
    shared: Sequence[str],
    cells: Mapping[str, Mapping[str, Any]],
    seeds: Iterable[int],
    out: str,
    parse: Parse,
) -> list[Run]:
    """All runs of a grid, seed by seed, so that a grid that is cut short has whole tables.

    Args:
        program: ``scst`` or ``reward_model``.
        kind: class of its configuration.
        shared: words of the command line that all runs share.
        cells: label -> values by dotted key.
        seeds: values of ``train.seed``.
        out: folder of the grid.
        parse: makes a configuration of a command line.

    Raises:
        ConfigError: a value is wrong (the message names the cell), or a run that is already there
            has another configuration.
    """
    runs = []
    for seed in seeds:
        for label, values in cells.items():
            parent, key = Path(out) / "cells" / label / f"seed{seed}", f"cell {label!r}"
            own = {"run.dir": str(parent / "run"), "train.seed": seed, **values}
            with config_errors(key):
                config = parse(kind, [*shared, *as_words(own)], f"{key}: rl-caption {program}")
            run = Run(program, label, seed, parent, config)
            saved = run.folder / "config.yaml"
            changed = changed_keys(saved, config) if saved.is_file() else []
            if changed:
                raise ConfigError(
                    f"{run.name} exists with another configuration: {'; '.join(changed)}. Choose "
                    f"another out, or remove {parent}"
                )
            runs.append(run)
    return runs


def train_runs(
    runs: Sequence[Run], num_parallel: int, measure: Callable[[Run, EndedJob | None], None]
) -> list[str]:
    """Train the runs that are not complete and ``measure`` each when it is; return why runs failed.

    ``measure`` is called once a run, with how its training ended, or None for a run that was
    complete. What users can mend in it is a failure, too.
    """
    by_name = {run.name: run for run in runs}
    jobs = []
    for run in runs:
        if not is_complete(run.folder):
            file = run.parent / f"{run.program}.yaml"
            write_text(file, yaml.safe_dump(plain(run.config), sort_keys=False))
            command = [sys.executable, "-m", "rl_caption", run.program, "--config", str(file)]
            jobs.append(Job(run.name, command, run.parent / "log.txt"))
    complete = len(runs) - len(jobs)
    say(f"{len(runs)} runs: {complete} complete, {len(jobs)} to train, {num_parallel} at a time")
    failures: list[str] = []

    def finish(run: Run, ended: EndedJob | None) -> None:
        if is_complete(run.folder):
            try:
                measure(run, ended)
            except EXPECTED as error:
                failures.append(f"{run.name} is trained but could not be judged: {error}")
                say(failures[-1])
        elif ended is not None:
            how = "was stopped: run the same command to continue"
            if ended.code:
                how = f"failed (exit code {ended.code})"
            failures.append(f"{run.name} {how}; its output is in {ended.job.log}")
            say(failures[-1])
        bar.update()

    devices = share_devices(num_parallel, torch.cuda.device_count(), os.environ)
    # What is measured here shares the cores with the trainings.
    torch.set_num_threads(cpu_threads(num_parallel + 1))
    with tqdm(total=len(runs), unit="run", desc="grid", disable=None, dynamic_ncols=True) as bar:
        trained = {job.name for job in jobs}
        for run in runs:
            if run.name not in trained:
                finish(run, None)
        with closing(run_jobs(jobs, devices)) as running:
            for ended in running:
                finish(by_name[ended.job.name], ended)
    return failures


def say(text: str) -> None:
    """Print a line to standard error, above a progress bar."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
