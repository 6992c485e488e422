"""The ablation program: train what is missing of a grid, evaluate every captioner, write the
report.
"""

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rewards.base import Reward
from rewards.files import remove_leftovers
from rl_caption.captioners.config import Decoding
from rl_caption.config.build import quiet_libraries
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import ScstConfig
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import check_writable, write_evaluation
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import column_of, format_value
from rl_caption.programs.ablation.config import START, AblateConfig
from rl_caption.programs.ablation.grid import Parse, Run, say, train_runs
from rl_caption.programs.ablation.jobs import EndedJob
from rl_caption.programs.ablation.plan import build_rewards, check_start, make_plan
from rl_caption.programs.ablation.report import Member, write_report
from rl_caption.programs.evaluate import score_captions, settings_of
from rl_caption.programs.report.read import EvaluationFolder, read_evaluation, read_run
from rl_caption.runtime.launch import LaunchError, processes_started, run_lock, stop_requests
from rl_caption.training.checkpoint import CheckpointError, is_intact
from rl_caption.training.run_folder import clock


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
            "it as rl-caption ablate --config FILE"
        )
    out = check_writable(config.out)
    quiet_libraries()
    # One line a captioner is enough here.
    logging.getLogger("rl_caption.evaluation").setLevel(logging.WARNING)
    with run_lock(out, wait_seconds=10.0), stop_requests(leave=True):
        for folder in out.glob("**/"):
            remove_leftovers(folder)
        plan = make_plan(config, parse)
        judges, signatures = build_rewards(config, plan)
        prompt = getattr(plan.base.model, "prompt", None)
        folder = out / "start" / config.split
        evaluation = evaluate_captioner(plan.start, plan.base, config, judges, folder, prompt)
        say(f"{START}: {_headline(evaluation)}")
        for run in plan.runs:
            check_start(run, plan.start, signatures[run.label])
        members: dict[str, Member] = {}

        def measure(run: Run, ended: EndedJob | None) -> None:
            model = run.folder / "export" / config.policy
            if not is_intact(model):
                raise CheckpointError(f"{model} is damaged or not there: remove {run.folder}")
            folder = run.parent / f"{config.split}_{config.policy}"
            found = evaluate_captioner(model, run.config, config, judges, folder)
            alpha = plan.alphas.get(run.label)
            members[run.name] = Member(run.label, alpha, run.seed, found, read_run(run.folder))
            how = "kept" if ended is None else f"trained in {clock(ended.seconds)}"
            say(f"[{len(members)}/{len(plan.runs)}] {run.name}: {how}; {_headline(found)}")

        failures = train_runs(plan.runs, config.jobs, measure)
        ordered = [members[run.name] for run in plan.runs if run.name in members]
        start = Member(START, None, None, evaluation, None)
        for path in write_report([start, *ordered], plan, config, failures):
            say(f"wrote {path}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


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
