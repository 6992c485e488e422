"""The ablation program: run what is missing of a grid, judge every captioner, write the report."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from tqdm import tqdm

from rewards.base import Reward
from rewards.files import remove_leftovers
from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.grid import START
from rl_caption.ablation.jobs import EndedJob, Job, own_devices, run_jobs, signals_as_exit
from rl_caption.ablation.outcome import JUDGE, Outcome, first_alarm, judged, last_policy
from rl_caption.ablation.plan import (
    Base,
    Parse,
    Plan,
    PlannedCell,
    fix_start,
    make_plan,
    plain,
)
from rl_caption.ablation.report import write_report
from rl_caption.ablation.rewards import check_names, check_rewards, make_judges, runs_to_come
from rl_caption.build import ConfigError, quiet_libraries
from rl_caption.captioners.loading import is_captioner
from rl_caption.data.files import write_text
from rl_caption.errors import expected_errors
from rl_caption.evaluation import Evaluation, check_writable
from rl_caption.launch import LaunchError, RunLock, processes_started
from rl_caption.run_folder import is_complete
from rl_caption.tracking import clock


@dataclass
class _Grid:
    """A grid while it runs."""

    config: AblateConfig
    plan: Plan
    judges: Mapping[str, Mapping[str, Reward]]
    """Name of the base -> name of the judge -> reward."""
    rewards: Mapping[str, Mapping[str, str]]
    """Name of the cell -> term -> signature."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Name of the cell -> outcome."""
    failures: list[str] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    def judge_start(self, base: Base) -> Outcome:
        """The starting policy of a base."""
        evaluation, captions = judged(
            base.init,
            base.config.data,
            base.config.rollout.max_new_tokens,
            self.config,
            self.judges[base.name],
            self.out / "start" / base.name / self.config.split,
            base.config.model.prompt,
        )
        name = f"{base.name}/{START}" if base.name else START
        return Outcome(name, base.name, None, None, evaluation, captions)

    def judge_cell(self, planned: PlannedCell) -> Outcome:
        """A finished cell."""
        base, cell = self.plan.bases[planned.cell.base], planned.cell
        best = planned.run / "export" / "best"
        evaluation, captions = judged(
            best if self.config.policy == "best" else last_policy(planned.run, planned.folder / "last"),
            base.config.data,
            planned.config.rollout.max_new_tokens,
            self.config,
            self.judges[base.name],
            planned.folder / f"{self.config.split}_{self.config.policy}",
        )
        watched, alarm = first_alarm(planned.run / "metrics.jsonl")
        return Outcome(cell.system, cell.base, cell.seed, cell.alpha, evaluation, captions, watched, alarm)


def run_ablation(config: AblateConfig, parse: Parse) -> int:
    """Run the grid to its end, or go on with it; 0, or 1 where a cell failed or was stopped.

    Args:
        config: of the grid.
        parse: ``rl_caption.cli.parse``.

    Raises:
        ConfigError, DataError: as for ``make_plan``, before the first run starts.
        LaunchError: started as several processes, or another process runs this grid.
    """
    started = processes_started(os.environ)
    if started is not None and started[1] > 1:
        raise LaunchError(
            f"{started[1]} processes were started ({started[0]}): this program starts its own; run it as "
            "python scripts/ablate.py --config FILE"
        )
    check_writable(config.out)
    quiet_libraries()
    # One line a captioner is enough here.
    logging.getLogger("rl_caption.evaluation").setLevel(logging.WARNING)
    with RunLock(config.out, wait_seconds=10.0), signals_as_exit():
        for folder in Path(config.out).glob("**/"):
            remove_leftovers(folder)
        plan = make_plan(config, parse)
        check_names(plan.cells, config)
        _make_reward_models(plan, config, parse)
        grid = _Grid(config, plan, make_judges(config, plan.bases), check_rewards(plan.cells))
        _make_starts(grid)
        starts = [grid.judge_start(base) for base in plan.bases.values()]
        for start in starts:
            _say(f"{start.system}: {_headline(start.evaluation)}")
        _run_cells(grid)
        bounds = {name: judge.bounds for judges in grid.judges.values() for name, judge in judges.items()}
        in_order = [grid.outcomes[cell.name] for cell in plan.cells if cell.name in grid.outcomes]
        for path in write_report([*starts, *in_order], plan, bounds, config, grid.failures):
            _say(f"wrote {path}")
    for failure in grid.failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if grid.failures else 0


def _make_starts(grid: _Grid) -> None:
    """Train the starting policies that are not there yet, one after the other, before any cell."""
    jobs = {}
    for base in grid.plan.bases.values():
        if base.warm_start is not None:
            stage, file = base.warm_start
            log = grid.out / "start" / base.name / "cross_entropy.log"
            program = _launched(grid, base.name, "xe", file, *grid.plan.overrides[file])
            jobs[stage.run.dir] = Job(f"cross-entropy ({stage.run.dir})", program, log)
    for folder, job in jobs.items():
        _run_first(job, Path(folder))
    for base in grid.plan.bases.values():
        if not is_captioner(base.init):
            raise ConfigError(f"warm_start is done, but model.init {base.init!r} is not there: name what it made")


def _make_reward_models(plan: Plan, config: AblateConfig, parse: Parse) -> None:
    """Train the reward models that are not there yet, after all rewards of the grid that do not need them are tried."""
    if plan.reward_models:
        to_come = runs_to_come(list(plan.reward_models), parse)
        make_judges(config, plan.bases, to_come)
        check_rewards(plan.cells, to_come)
    for index, (file, folder) in enumerate(plan.reward_models.items()):
        log = Path(config.out) / "start" / f"reward_model{index}.log"
        _run_first(
            Job(
                f"reward model ({folder})",
                [sys.executable, *_program("reward_model", file, *plan.overrides[file])],
                log,
            ),
            Path(folder),
        )


def _run_first(job: Job, folder: Path) -> None:
    """Run what every cell needs; without it there is no grid."""
    _say(f"training first: {shlex.join(job.command[1:])}, output in {job.log}")
    with closing(run_jobs([job], 1)) as running:
        ended = next(running)
    if ended.code != 0 or not is_complete(folder):
        raise ConfigError(_how_it_ended(ended))


def _run_cells(grid: _Grid) -> None:
    cells = {cell.name: cell for cell in grid.plan.cells}
    for cell in cells.values():
        fix_start(cell, grid.plan.bases[cell.cell.base], grid.rewards[cell.name])
    missing = [_job(cell, grid) for cell in cells.values() if not cell.done]
    done = [cell for cell in cells.values() if cell.done]
    _say(f"{len(cells)} runs: {len(done)} are there, {len(missing)} to train, {grid.config.jobs} at a time")
    devices = own_devices(torch.cuda.device_count(), os.environ)
    with tqdm(total=len(cells), unit="run", desc="ablation", disable=None, dynamic_ncols=True) as bar:
        for cell in done:
            _judge(grid, cell, bar, "kept")
        with closing(run_jobs(missing, grid.config.jobs, devices)) as running:
            for ended in running:
                cell = cells[ended.job.name]
                if ended.code == 0 and cell.done:
                    _judge(grid, cell, bar, f"trained in {clock(ended.seconds)}")
                else:
                    grid.failures.append(_how_it_ended(ended))
                    _say(grid.failures[-1])
                    bar.update()


def _judge(grid: _Grid, cell: PlannedCell, bar: tqdm, how: str) -> None:
    try:
        outcome = grid.judge_cell(cell)
    except expected_errors() as error:
        grid.failures.append(f"{cell.name} is trained but could not be judged: {error}")
        _say(grid.failures[-1])
    else:
        grid.outcomes[cell.name] = outcome
        _say(f"[{len(grid.outcomes)}/{len(grid.plan.cells)}] {cell.name}: {how}; {_headline(outcome.evaluation)}")
    bar.update()


def _job(planned: PlannedCell, grid: _Grid) -> Job:
    file = planned.folder / "scst.yaml"
    write_text(file, yaml.safe_dump(plain(planned.config), sort_keys=False))
    program = _launched(grid, planned.cell.base, "scst", str(file))
    return Job(planned.name, program, planned.folder / "log.txt")


def _program(name: str, file: str, *overrides: str) -> list[str]:
    return ["-m", "rl_caption", name, "--config", file, *overrides]


def _launched(grid: _Grid, base: str, name: str, file: str, *overrides: str) -> Sequence[str]:
    """The command of a training, on as many processes as the runs of ``base`` have."""
    program = _program(name, file, *overrides)
    if grid.config.launch is None:
        return [sys.executable, *program]
    # Port 0: any free one, so that runs beside each other do not meet.
    options = ["--config_file", grid.config.launch, "--num_processes", str(grid.plan.processes[base])]
    return [sys.executable, "-m", "rl_caption.launch", *options, "--main_process_port", "0", *program]


def _how_it_ended(ended: EndedJob) -> str:
    how = f"failed (exit code {ended.code})" if ended.code else "was stopped before its end: run this again to go on"
    return f"{ended.job.name} {how}; its output is in {ended.job.log}"


def _headline(evaluation: Evaluation) -> str:
    """CIDEr and the judges on one line."""
    values = evaluation.metrics
    parts = [f"CIDEr (x100) {100 * values['CIDEr']:.1f}"] if "CIDEr" in values else []
    parts += [f"{key.removeprefix(JUDGE)} {value:.4f}" for key, value in values.items() if key.startswith(JUDGE)]
    return ", ".join(parts) or "no CIDEr and no judge among its metrics"


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
