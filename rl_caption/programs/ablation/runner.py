"""The ablation program: train what is missing of a grid of self-critical runs, evaluate every
captioner, write tables and a page.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from transformers.utils import flatten_dict

from rewards.base import Reward
from rewards.model_files import damage
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.config.build import (
    build_data,
    build_reward,
    quiet_libraries,
    references_of,
    usable_split,
)
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import ScstConfig
from rl_caption.data.base import Row
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import write_evaluation
from rl_caption.evaluation.metrics import words_tokenizer
from rl_caption.evaluation.results import csv_text, markdown
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.programs.ablation.grid import (
    START,
    Parse,
    Run,
    as_words,
    make_runs,
    owned,
    say,
    train_runs,
)
from rl_caption.programs.evaluate import score_captions, settings_of
from rl_caption.programs.report.charts import curves, macros
from rl_caption.programs.report.gallery import MAX_IMAGES, source_of
from rl_caption.programs.report.pages import (
    Page,
    Table,
    captions_section,
    score_notes,
    score_tables,
    scores_section,
    settings_section,
)
from rl_caption.programs.report.program import write_report
from rl_caption.programs.report.read import (
    EvaluationFolder,
    RunFolder,
    read_evaluation,
    read_run,
)
from rl_caption.runtime.errors import ConfigError, config_errors
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.checkpoint import CheckpointError


class Judged(NamedTuple):
    """An evaluated captioner and its run; the starting policy has none."""

    evaluation: EvaluationFolder
    run: RunFolder | None = None
    seed: int | None = None


Systems = Mapping[str, Sequence[Judged]]
"""``start``, or the label of a cell -> its seeds."""


class Plan(NamedTuple):
    """A grid that is ready to run."""

    base: ScstConfig
    rows: Sequence[Row]
    """The images of the split whose captions are scored."""
    runs: list[Run]

    @property
    def start(self) -> str:
        """The starting policy: a folder, or a name on the hub."""
        return str(self.base.model.init)


def run_ablation(config: AblateConfig, parse: Parse) -> int:
    """Run the grid, or go on with it; return 0, or 1 where a cell failed.

    Raises:
        ConfigError, DataError: as for ``make_plan``, before the first run starts.
        LaunchError: another process runs this grid.
    """
    quiet_libraries()
    # One line a captioner is enough here.
    logging.getLogger("rl_caption.evaluation").setLevel(logging.WARNING)
    with owned(config.out) as out:
        plan = make_plan(config, parse)
        check_start(out, plan)
        tokenizer = words_tokenizer(config.tokenizer, plan.base.data.tokenizer)
        judges = build_judges(
            config.judges, None, references_of(plan.rows), "judges", tokenizer
        )
        start = evaluate_captioner(
            plan.start, plan.base, config, judges, out / START / config.split
        )
        found: dict[str, Judged] = {}

        def measure(run: Run) -> None:
            model = run.folder / "export" / config.policy
            if damage(model) is not None:
                raise CheckpointError(
                    f"{model} is damaged or not there: remove {run.folder}"
                )
            folder = run.parent / f"{config.split}_{config.policy}"
            evaluation = evaluate_captioner(model, run.config, config, judges, folder)
            found[run.name] = Judged(evaluation, read_run(run.folder), run.seed)
            say(f"[{len(found)}/{len(plan.runs)}] {run.name}")

        failures = train_runs("scst", plan.runs, config.jobs, measure)
        systems: dict[str, list[Judged]] = {START: [Judged(start)]}
        for run in plan.runs:
            if run.name in found:
                systems.setdefault(run.label, []).append(found[run.name])
        write_tables(out, systems, config, failures)
        if config.report:
            write_report(
                out, plan.rows, ablation_page(out.name, systems, failures, plan.rows)
            )
    for failure in failures:
        say(f"error: {failure}")
    return 1 if failures else 0


def make_plan(config: AblateConfig, parse: Parse) -> Plan:
    """Read and check all configurations, the data, and what is already there of the grid.

    Raises:
        ConfigError: a value is wrong (the message names the cell), a cell has another model or
            other data, or a run that is already there has another configuration.
        DataError: the data cannot be read, or has no such split.
    """
    words = ["--config", config.recipe, *as_words(flatten_dict(config.all))]
    base: ScstConfig = parse(ScstConfig, words, "rl-caption scst")
    if base.model.init is None or not is_captioner(base.model.init):
        raise ConfigError(
            f"{config.recipe}: model.init is {base.model.init!r}: expected the policy that all "
            "cells start from, a saved captioner or a name on the hub"
        )
    data = build_data(base.data)
    rows = data.split(usable_split(data, config.split))
    words.append(f"--train.threads={base.train.threads or cpu_threads(config.jobs)}")
    runs = make_runs(config, ScstConfig, words, parse)
    for run in runs:
        if (run.config.model, run.config.data) != (base.model, base.data):
            raise ConfigError(
                f"cell {run.label!r} changes model or data: use all, or another grid"
            )
    return Plan(base, rows, runs)


def check_start(out: Path, plan: Plan) -> None:
    """Write what the runs start from and are rewarded by into ``start.json``, or compare with what
    they were started from.

    Raises:
        ConfigError: a reward cannot be made, or the starting policy or the reward of a run that has
            begun has changed since.
    """
    now = {START: weights_hash(plan.start)}
    begun = set()
    for run in plan.runs:
        if run.label not in now:
            with config_errors(f"cell {run.label!r}"):
                reward = build_reward(
                    run.config.reward,
                    [["a dog"], ["a cat"]],
                    tokenizer=run.config.data.tokenizer,
                )
            now[run.label] = reward.signature
        if (run.folder / "config.yaml").is_file():
            begun |= {START, run.label}
    note = out / "start.json"
    before = read_json(note, ConfigError) if note.is_file() else {}
    for name in begun:
        if before.get(name, now[name]) != now[name]:
            raise ConfigError(
                f"{name} was {before[name]} and is {now[name]}: all cells of a grid start from one "
                f"checkpoint, and each keeps its reward. Choose another out, or remove {out}"
            )
    write_json(note, before | now)


def evaluate_captioner(
    model: str | Path,
    trained: ScstConfig,
    config: AblateConfig,
    judges: Mapping[str, Reward],
    folder: Path,
) -> EvaluationFolder:
    """Evaluate a model on the grid's split, or read what ``folder`` holds of it.

    The data, the prompt and the longest caption are those of ``trained``. Scores in ``folder`` are
    kept as long as the model's weights, the data, the decoding, the metrics and the judges are the
    same.
    """
    evaluate = EvaluateModelConfig(
        model=str(model),
        prompt=getattr(trained.model, "prompt", None),
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
    note = folder / "settings.json"
    signatures = {name: reward.signature for name, reward in judges.items()}
    settings = settings_of(evaluate) | {"metrics": config.metrics, "judges": signatures}
    if not note.is_file() or read_json(note, CheckpointError) != settings:
        note.unlink(missing_ok=True)
        judged = score_captions(evaluate, judges)
        assert judged is not None, "this program is one process"
        write_evaluation(judged[0], judged[1], folder)
        write_json(note, settings)  # last
    return read_evaluation(folder)


def write_tables(
    out: Path, systems: Systems, config: AblateConfig, failures: Sequence[str]
) -> None:
    """Print and write ``table.md`` (means over seeds) and ``runs.csv`` (a line for each run)."""
    evaluations = evaluations_of(systems)
    tables = []
    for _, head, rows in [*score_tables(evaluations), alarm_table(systems)]:
        tables.append(markdown(head, rows))
    remarks = [
        f"Means over seeds ± standard deviation, split {config.split!r}; policies: {config.policy}."
    ]
    for label, cell in config.cells.items():
        settings = cell.model_dump(mode="json", exclude_defaults=True)
        remarks.append(f"{label}: {json.dumps(settings)}")
    remarks += [
        *score_notes(evaluations),
        *(f"missing: {failure}" for failure in failures),
    ]
    print("\n\n".join(tables))
    listed = "\n".join(f"- {line}" for line in remarks)
    write_text(out / "table.md", "\n\n".join([f"# {out.name}", *tables, listed]) + "\n")
    every = [(name, one) for name, seeds in systems.items() for one in seeds]
    keys = dict.fromkeys(
        key for _, one in every for key in one.evaluation.scores["metrics"]
    )
    lines: list[list[Any]] = [["system", "seed", *keys, "first_alarm"]]
    for name, one in every:
        values = [one.evaluation.scores["metrics"].get(key) for key in keys]
        alarms = one.run.alarms if one.run else []
        lines.append([name, one.seed, *values, alarms[0] if alarms else None])
    write_text(out / "runs.csv", csv_text(lines))
    say(f"wrote table.md and runs.csv in {out}")


def ablation_page(
    name: str, systems: Systems, failures: Sequence[str], rows: Sequence[Row]
) -> Page:
    """Means over seeds, curves, and captions of the first seed of each system."""
    evaluations = evaluations_of(systems)
    runs = {
        label: [one.run for one in seeds if one.run] for label, seeds in systems.items()
    }
    runs = {label: seeds for label, seeds in runs.items() if seeds}
    missing = Markup("").join(
        macros().verdict(f"Missing: {text}", True) for text in failures
    )
    first = {label: seeds[0] for label, seeds in evaluations.items()}
    sections = {
        "Results": missing + scores_section(evaluations),
        "Monitor": macros().table(*alarm_table(systems)),
        "Curves": curves(runs),
        "Captions": captions_section(first, source_of(rows), MAX_IMAGES),
        "Settings": settings_section(
            {label: seeds[0] for label, seeds in runs.items()}
        ),
    }
    return Page(name, "Ablation: rewards side by side", sections)


def evaluations_of(systems: Systems) -> dict[str, list[EvaluationFolder]]:
    """System -> the evaluations of its seeds."""
    return {name: [one.evaluation for one in seeds] for name, seeds in systems.items()}


def alarm_table(systems: Systems) -> Table:
    """How many runs of each system had an alarm, and the earliest one."""
    rows = []
    for name, seeds in systems.items():
        watched = [
            one.run for one in seeds if one.run is not None and one.run.has_monitor
        ]
        steps = [run.alarms[0] for run in watched if run.alarms]
        count = f"{len(steps)} of {len(watched)}" if watched else "not watched"
        rows.append([name, count, f"step {min(steps)}" if steps else "none"])
    caption = "Runs whose captions got worse while their reward rose, by the monitor of hacking"
    return Table(caption, ["system", "runs with an alarm", "earliest"], rows)
