"""The ablation program: train what is missing of a grid, evaluate every captioner, write the report."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from tqdm.auto import tqdm

from rewards.base import Reward
from rewards.files import remove_leftovers
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import is_captioner
from rl_caption.config.build import ConfigError, quiet_libraries
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import ScstConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import check_writable, write_evaluation
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import column_of, format_value
from rl_caption.programs.ablation.config import START, AblateConfig
from rl_caption.programs.ablation.jobs import EndedJob, Job, run_jobs, share_devices
from rl_caption.programs.ablation.plan import (
    Base,
    Cell,
    EarlierRun,
    Parse,
    Plan,
    build_rewards,
    check_start,
    make_plan,
    untrained_models,
)
from rl_caption.programs.ablation.report import Member, write_report
from rl_caption.programs.evaluate import score_captions, settings_of
from rl_caption.programs.report.read import EvaluationFolder, read_evaluation, read_run
from rl_caption.runtime.errors import EXPECTED
from rl_caption.runtime.launch import LaunchError, processes_started, run_lock, stop_requests
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.checkpoint import CheckpointError, is_intact
from rl_caption.training.run_folder import clock, is_complete


def run_ablation(config: AblateConfig, parse: Parse) -> int:
    """Run the grid, or go on with it; return 0, or 1 where a cell failed or was stopped.

    Raises:
        ConfigError, DataError: as for ``make_plan``, before the first run starts.
        LaunchError: started as several processes, or another process runs this grid.
    """
    started = processes_started(os.environ)
    if started is not None and started[1] > 1:
        raise LaunchError(
            f"{started[1]} processes were started ({started[0]}): this program starts its own; run it as "
            "rl-caption ablate --config FILE"
        )
    out = check_writable(config.out)
    quiet_libraries()
    logging.getLogger("rl_caption.evaluation").setLevel(
        logging.WARNING
    )  # one line a captioner is enough here
    with run_lock(out, wait_seconds=10.0), stop_requests(leave=True):
        for folder in out.glob("**/"):
            remove_leftovers(folder)
        plan = make_plan(config, parse)
        if plan.reward_models:
            build_rewards(
                config, plan, untrained_models([model.file for model in plan.reward_models], parse)
            )
        for index, model in enumerate(plan.reward_models):
            _train_first(model, out / "start" / f"reward_model{index}.log")
        judges, signatures = build_rewards(config, plan)
        for base in plan.bases.values():
            if base.warm_start is not None and not is_complete(base.warm_start.folder):
                log = out / "start" / base.name / "cross_entropy.log"
                _train_first(base.warm_start, log, config.launch, base.processes)
            if not is_captioner(base.start):
                raise ConfigError(
                    f"warm_start is done, but model.init {base.start!r} does not exist: name what it wrote"
                )
        starts = [_evaluate_start(base, config, judges[base.name]) for base in plan.bases.values()]
        for cell in plan.cells:
            check_start(cell, plan.bases[cell.base], signatures[cell.name])
        members, failures = _run_cells(config, plan, judges)
        for path in write_report([*starts, *members], plan, config, failures):
            _print(f"wrote {path}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _train_first(run: EarlierRun, log: Path, launch: str | None = None, processes: int = 1) -> None:
    """Train what every cell needs; without it there is no grid."""
    command = _command(run.program, run.file, run.overrides, launch, processes)
    _print(f"training first: {shlex.join(command[1:])}, output in {log}")
    with closing(run_jobs([Job(f"{run.program} ({run.folder})", command, log)])) as running:
        ended = next(running)
    if failure := _failure(ended, run.folder):
        raise ConfigError(failure)


def _command(
    program: str, file: str, overrides: list[str], launch: str | None, processes: int
) -> list[str]:
    words = ["-m", "rl_caption", program, "--config", file, *overrides]
    if launch is None:
        return [sys.executable, *words]
    # Port 0: any free one, so that parallel runs do not meet.
    options = [
        "--config_file",
        str(find_config(launch)),
        "--num_processes",
        str(processes),
        "--main_process_port",
        "0",
    ]
    return [sys.executable, "-m", "rl_caption.runtime.launch", *options, *words]


def _failure(ended: EndedJob, run: Path) -> str | None:
    """A sentence that says why a training did not reach its end; None if it did."""
    if ended.code == 0 and is_complete(run):
        return None
    how = (
        f"failed (exit code {ended.code})"
        if ended.code
        else "was stopped: run the same command to continue"
    )
    return f"{ended.job.name} {how}; its output is in {ended.job.log}"


def _run_cells(
    config: AblateConfig, plan: Plan, judges: Mapping[str, Mapping[str, Reward]]
) -> tuple[list[Member], list[str]]:
    """Train the cells that are not complete, evaluate all; return members in the order of the plan, and failures."""
    cells, results, failures = (
        {cell.name: cell for cell in plan.cells},
        dict[str, Member](),
        list[str](),
    )
    complete = [cell for cell in plan.cells if is_complete(cell.run)]
    jobs = []
    for cell in plan.cells:
        if cell not in complete:
            file = cell.folder / "scst.yaml"
            write_text(
                file, yaml.safe_dump(json.loads(json.dumps(asdict(cell.config))), sort_keys=False)
            )
            command = _command(
                "scst", str(file), [], config.launch, plan.bases[cell.base].processes
            )
            jobs.append(Job(cell.name, command, cell.folder / "log.txt"))
    _print(
        f"{len(cells)} runs: {len(complete)} complete, {len(jobs)} to train, {config.jobs} at a time"
    )

    def finish(cell: Cell, ended: EndedJob | None) -> None:
        """Evaluate a cell that has ended; keep its result or its failure."""
        failure = None if ended is None else _failure(ended, cell.run)
        if failure is None:
            try:
                result = _evaluate_cell(cell, config, judges[cell.base])
                results[cell.name] = result
                how = f"trained in {clock(ended.seconds)}" if ended is not None else "kept"
                _print(
                    f"[{len(results)}/{len(cells)}] {cell.name}: {how}; {_headline(result.evaluation)}"
                )
            except EXPECTED as error:
                failure = f"{cell.name} is trained but could not be judged: {error}"
        if failure is not None:
            failures.append(failure)
            _print(failure)
        bar.update()

    with tqdm(
        total=len(cells), unit="run", desc="ablation", disable=None, dynamic_ncols=True
    ) as bar:
        for cell in complete:
            finish(cell, None)
        devices = share_devices(config.jobs, torch.cuda.device_count(), os.environ)
        torch.set_num_threads(
            cpu_threads(config.jobs + 1)
        )  # what is evaluated here shares the cores with the cells
        with closing(run_jobs(jobs, devices)) as running:
            for ended in running:
                finish(cells[ended.job.name], ended)
    return [results[name] for name in cells if name in results], failures


def _evaluate_start(base: Base, config: AblateConfig, judges: Mapping[str, Reward]) -> Member:
    folder = Path(config.out) / "start" / base.name / config.split
    prompt = getattr(base.config.model, "prompt", None)
    evaluation = evaluate_captioner(base.start, base.config, config, judges, folder, prompt)
    system = f"{base.name}/{START}" if base.name else START
    _print(f"{system}: {_headline(evaluation)}")
    return Member(system, base.name, None, None, evaluation, None)


def _evaluate_cell(cell: Cell, config: AblateConfig, judges: Mapping[str, Reward]) -> Member:
    model = cell.run / "export" / config.policy
    if not is_intact(model):
        raise CheckpointError(
            f"{model} is damaged or not there: rl-caption scst --config "
            f"{cell.folder / 'scst.yaml'} writes it from the newest checkpoint"
        )
    evaluation = evaluate_captioner(
        model, cell.config, config, judges, cell.folder / f"{config.split}_{config.policy}"
    )
    return Member(cell.system, cell.base, cell.alpha, cell.seed, evaluation, read_run(cell.run))


def evaluate_captioner(
    model: str | Path,
    trained: ScstConfig,
    config: AblateConfig,
    judges: Mapping[str, Reward],
    folder: Path,
    prompt: str | list[dict] | None = None,
) -> EvaluationFolder:
    """Evaluate a model on the grid's split, or read what ``folder`` holds of it.

    The data and the longest caption are those of ``trained``. Scores in ``folder`` are kept as long as the model's
    weights, the data, the decoding, the metrics and the judges are the same. ``prompt`` is for a model that was not
    exported with one.

    Raises:
        EvaluationError, CaptionerError, DataError, RewardError: as for ``evaluate`` and the judges.
        ReportError: a file in ``folder`` is damaged.
    """
    evaluate = EvaluateModelConfig(
        model=str(model),
        prompt=prompt,
        data=trained.data,
        split=config.split,
        decode=Decoding(
            num_beams=config.num_beams,
            max_new_tokens=trained.rollout.max_new_tokens,
            length_penalty=config.length_penalty,
        ),
        metrics=config.metrics,
        tokenizer=config.tokenizer,
        out=str(folder),
    )
    note, signatures = (
        folder / "settings.json",
        {name: reward.signature for name, reward in judges.items()},
    )
    settings = settings_of(evaluate) | {"metrics": config.metrics, "judges": signatures}
    if not note.is_file() or read_json(note, CheckpointError) != settings:
        note.unlink(missing_ok=True)
        judged = score_captions(evaluate, judges)
        assert judged is not None, "this program is one process"
        write_evaluation(*judged, folder)
        write_json(note, settings)  # last
    return read_evaluation(folder)


def _headline(evaluation: EvaluationFolder) -> str:
    """CIDEr and the judges on one line."""
    values = evaluation.scores["metrics"]
    figures = [f"CIDEr (x100) {100 * values['CIDEr']:.1f}"] if "CIDEr" in values else []
    judges = {key: column_of(key) for key in values if key.startswith(JUDGE)}
    figures += [
        f"{column.heading} {format_value(values[key], column)}" for key, column in judges.items()
    ]
    return ", ".join(figures) or "no CIDEr and no judge among its metrics"


def _print(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
