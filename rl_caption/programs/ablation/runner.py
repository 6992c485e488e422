"""The ablation program: train what is missing of a grid, evaluate every captioner, write the
report.
"""

import json
import logging
import os
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
from rl_caption.config.build import quiet_libraries
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import ScstConfig
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import check_writable, write_evaluation
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import column_of, format_value
from rl_caption.programs.ablation.config import START, AblateConfig
from rl_caption.programs.ablation.jobs import EndedJob, Job, run_jobs, share_devices
from rl_caption.programs.ablation.plan import (
    Cell,
    Parse,
    Plan,
    build_rewards,
    check_start,
    make_plan,
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
            f"{started[1]} processes were started ({started[0]}): this program starts its own; run "
            f"it as "
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
        judges, signatures = build_rewards(config, plan)
        base = plan.base
        prompt = getattr(base.model, "prompt", None)
        folder = out / "start" / config.split
        evaluation = evaluate_captioner(plan.start, base, config, judges, folder, prompt)
        _print(f"{START}: {_headline(evaluation)}")
        for cell in plan.cells:
            check_start(cell, plan.start, signatures[cell.name])
        members, failures = _run_cells(config, plan, judges)
        start = Member(START, None, None, evaluation, None)
        for path in write_report([start, *members], plan, config, failures):
            _print(f"wrote {path}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


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
    config: AblateConfig, plan: Plan, judges: Mapping[str, Reward]
) -> tuple[list[Member], list[str]]:
    """Train the cells that are not complete, evaluate all; return members in the order of the plan,
    and failures.
    """
    cells = {cell.name: cell for cell in plan.cells}
    results: dict[str, Member] = {}
    failures: list[str] = []
    complete = [cell for cell in plan.cells if is_complete(cell.run)]
    jobs = []
    for cell in plan.cells:
        if cell not in complete:
            file = cell.folder / "scst.yaml"
            values = json.loads(json.dumps(asdict(cell.config)))
            write_text(file, yaml.safe_dump(values, sort_keys=False))
            jobs.append(
                Job(
                    cell.name,
                    [sys.executable, "-m", "rl_caption", "scst", "--config", str(file)],
                    cell.folder / "log.txt",
                )
            )
    _print(
        f"{len(cells)} runs: {len(complete)} complete, {len(jobs)} to train, {config.jobs} at a "
        f"time"
    )

    def finish(cell: Cell, ended: EndedJob | None) -> None:
        """Evaluate a cell that has ended; keep its result or its failure."""
        failure = None if ended is None else _failure(ended, cell.run)
        if failure is None:
            try:
                model = cell.run / "export" / config.policy
                if not is_intact(model):
                    raise CheckpointError(f"{model} is damaged or not there: remove {cell.run}")
                folder = cell.folder / f"{config.split}_{config.policy}"
                evaluation = evaluate_captioner(model, cell.config, config, judges, folder)
                run = read_run(cell.run)
                results[cell.name] = Member(cell.label, cell.alpha, cell.seed, evaluation, run)
                how = f"trained in {clock(ended.seconds)}" if ended is not None else "kept"
                _print(f"[{len(results)}/{len(cells)}] {cell.name}: {how}; {_headline(evaluation)}")
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


def evaluate_captioner(
    model: str | Path,
    trained: ScstConfig,
    config: AblateConfig,
    judges: Mapping[str, Reward],
    folder: Path,
    prompt: str | list[dict] | None = None,
) -> EvaluationFolder:
    """Evaluate a model on the grid's split, or read what ``folder`` holds of it.

    The data and the longest caption are those of ``trained``. Scores in ``folder`` are kept as long
    as the model's weights, the data, the decoding, the metrics and the judges are the same.
    ``prompt`` is for a model that was not exported with one.

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
        write_evaluation(judged[0], judged[1], folder)
        write_json(note, settings)  # last
    return read_evaluation(folder)


def _headline(evaluation: EvaluationFolder) -> str:
    """CIDEr and the judges on one line."""
    figures = []
    for key, value in evaluation.scores["metrics"].items():
        if key == "CIDEr" or key.startswith(JUDGE):
            column = column_of(key)
            figures.append(f"{column.heading} {format_value(value, column)}")
    return ", ".join(figures)


def _print(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
