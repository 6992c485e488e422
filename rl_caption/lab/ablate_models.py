"""Grids of reward models: train what is missing of a grid, measure every model, write a table over
seeds.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rl_caption.config.build import build_data, quiet_libraries, usable_split
from rl_caption.config.evaluation import RetrievalConfig
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.lab.config import AblateModelsConfig
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.program import build_metrics, check_columns, score_set
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.lab.retrieval import texts_of
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.programs.ablation.config import LABEL
from rl_caption.programs.ablation.jobs import Job, run_jobs
from rl_caption.programs.ablation.plan import Parse, as_argument
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import run_lock, stop_requests
from rl_caption.training.run_folder import changed_keys, is_complete

COMMAND = (sys.executable, "-m", "rl_caption", "reward_model")
Figures = dict[str, float | None]
"""Heading of a column -> value, times 100."""


@dataclass(frozen=True)
class ModelRun:
    """One run of the grid."""

    label: str
    seed: int
    folder: Path
    """``OUT/cells/LABEL/seedN/run``."""
    config: RewardModelConfig
    arguments: Sequence[str]

    @property
    def export(self) -> Path:
        return self.folder / "export" / "best"


def ablate_models(config: AblateModelsConfig, parse: Parse) -> int:
    """Train the runs that are not complete, measure all, and write the table; return 0, or 1 where
    a run failed.

    Raises:
        ConfigError: an override that the recipe does not have, an unknown set or reward, or a run
            that is there with another configuration. This is found before the first run.
        DataError: the data of a set or of the retrieval cannot be read.
    """
    quiet_libraries()
    out = check_writable(config.out)
    runs = make_runs(config, parse)
    judged = {
        heading: sets.load(one.set, one.data, one.images, one.partial, one.set_kwargs)
        for heading, one in config.sets.items()
    }
    failures = []
    with run_lock(out, wait_seconds=10.0), stop_requests(leave=True):
        jobs = []
        for run in runs:
            if not is_complete(run.folder):
                name, log = f"{run.label} seed {run.seed}", run.folder.parent / "log.txt"
                jobs.append(Job(name, [*COMMAND, *run.arguments], log))
        if jobs:
            with closing(run_jobs(jobs, [None] * config.jobs)) as running:
                failures += [
                    f"{ended.job.name}: see {ended.job.log}" for ended in running if ended.code
                ]
        results: dict[str, list[Figures]] = {label: [] for label in config.cells}
        for run in runs:
            if is_complete(run.folder):
                results[run.label].append(measure_model(run, config, judged))
                write_table(out, config, results)
    print(write_table(out, config, results))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def make_runs(config: AblateModelsConfig, parse: Parse) -> list[ModelRun]:
    """All runs, seed by seed, with their checked configurations."""
    runs = []
    for seed in config.seeds:
        for label, cell in config.cells.items():
            if not LABEL.fullmatch(label):
                raise ConfigError(
                    f"cells has the label {label!r}: expected letters, digits and . _ = + - only"
                )
            folder = Path(config.out) / "cells" / label / f"seed{seed}" / "run"
            changes = cell.overrides | {"run.dir": str(folder), "train.seed": seed}
            arguments = [
                "--config",
                config.base,
                *(f"--{key}={as_argument(value)}" for key, value in changes.items()),
            ]
            recipe = parse(RewardModelConfig, arguments, f"cell {label!r}: rl-caption reward_model")
            saved = folder / "config.yaml"
            changed = changed_keys(saved, recipe) if saved.is_file() else []
            if changed:
                raise ConfigError(
                    f"cell {label!r} seed {seed} exists with another configuration: "
                    f"{'; '.join(changed)}. Choose "
                    f"another out, or remove {folder}"
                )
            runs.append(ModelRun(label, seed, folder, recipe, arguments))
    return runs


def measure_model(
    run: ModelRun, config: AblateModelsConfig, judged: Mapping[str, Sequence[JudgementSet]]
) -> Figures:
    """Retrieval and the published figures of every set, by the exported model of a run; None what
    is not defined.
    """
    encoder = load_dual_encoder(RetrievalConfig(str(run.export)), f"cell {run.label!r}")
    figures: Figures = {}
    if config.retrieval is not None:
        data = build_data(run.config.data)
        rows = data.split(usable_split(data, config.retrieval))
        texts, owners = texts_of(rows)["references"]
        recall = retrieval_recall(
            encoder.embed_images([row["image"] for row in rows]),
            encoder.embed_texts(texts),
            owners,
            [1],
        )
        figures |= {
            "R@1, image to text": 100 * recall["i2t_r1"],
            "R@1, text to image": 100 * recall["t2i_r1"],
        }
    if judged:
        metric = build_metrics(
            "", {run.label: JudgeConfig(config.reward, {"backbone": encoder} | config.kwargs)}
        )
        for heading, subsets in judged.items():
            for subset in subsets:
                name = heading if len(subsets) == 1 else f"{heading}, {subset.name}"
                reward: Any = metric[run.label]
                check_columns(run.label, reward.columns, [subset])
                published = [figure for figure in score_set(subset, reward) if figure.published]
                for figure in published:
                    value = figure.value
                    figures[f"{name}: {figure.name}"] = None if value is None else 100 * value
    return figures


def write_table(
    out: Path, config: AblateModelsConfig, results: Mapping[str, Sequence[Figures]]
) -> str:
    """Write ``table.md`` and ``table.json`` and return the table: means over seeds ± standard
    deviation, x100.
    """
    columns = list(dict.fromkeys(name for rows in results.values() for row in rows for name in row))
    lines = [
        [label, str(len(rows)), *(_over_seeds([row.get(name) for row in rows]) for name in columns)]
        for label, rows in results.items()
    ]
    table = markdown(["cell", "seeds", *columns], lines)
    notes = [
        f"- recipe: {config.base}",
        f"- sets scored by `{config.reward}`, figures x100, ± standard deviation",
    ]
    notes += [
        f"- {label}: {cell.overrides or 'the recipe'}" for label, cell in config.cells.items()
    ]
    text = "\n".join([table, "", *notes]) + "\n"
    write_text(out / "table.md", text)
    write_json(out / "table.json", {label: list(rows) for label, rows in results.items()})
    return text


def _over_seeds(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return LEFT_OUT
    spread = f" ± {stdev(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.1f}{spread}"
