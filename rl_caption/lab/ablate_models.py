"""Grids of reward models: train what is missing of a grid, measure every model, write a table over
seeds.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

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
from rl_caption.programs.ablation.grid import Parse, Run, make_runs, train_runs
from rl_caption.programs.ablation.jobs import EndedJob
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import run_lock, stop_requests

Figures = dict[str, float | None]
"""Heading of a column -> value, times 100."""


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
    for label in config.cells:
        if not LABEL.fullmatch(label):
            raise ConfigError(
                f"cells has the label {label!r}: expected letters, digits and . _ = + - only"
            )
    shared = ["--config", config.recipe]
    cells = {label: cell.overrides for label, cell in config.cells.items()}
    grid = shared, cells, config.seeds, config.out
    runs = make_runs("reward_model", RewardModelConfig, *grid, parse)
    judged = {
        heading: sets.load(one.set, one.data, one.images, one.partial, one.set_kwargs)
        for heading, one in config.sets.items()
    }
    results: dict[str, dict[str, Figures]] = {label: {} for label in cells}

    def measure(run: Run, _: EndedJob | None) -> None:
        results[run.label][run.name] = measure_model(run, config, judged)
        write_table(out, config, results)

    with run_lock(out, wait_seconds=10.0), stop_requests(leave=True):
        failures = train_runs(runs, config.jobs, measure)
        print(write_table(out, config, results))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def measure_model(
    run: Run, config: AblateModelsConfig, judged: Mapping[str, Sequence[JudgementSet]]
) -> Figures:
    """Retrieval and the published figures of every set, by the exported model of a run; None what
    is not defined.
    """
    model = RetrievalConfig(backbone=str(run.folder / "export" / "best"))
    encoder = load_dual_encoder(model, f"cell {run.label!r}")
    figures: Figures = {}
    if config.retrieval is not None:
        data = build_data(run.config.data)
        rows = data.split(usable_split(data, config.retrieval))
        texts, owners = texts_of(rows)["references"]
        images = encoder.embed_images([row["image"] for row in rows])
        recall = retrieval_recall(images, encoder.embed_texts(texts), owners, [1])
        figures["R@1, image to text"] = 100 * recall["i2t_r1"]
        figures["R@1, text to image"] = 100 * recall["t2i_r1"]
    options = {"backbone": encoder} | config.kwargs
    judge = JudgeConfig(target=config.reward, kwargs=options)
    for heading, parts in judged.items():
        metric = build_metrics("", {run.label: judge})[run.label]
        check_columns(run.label, metric.columns, parts)
        for part in parts:
            name = heading if len(parts) == 1 else f"{heading}, {part.name}"
            for figure in score_set(part, metric):
                if figure.published:
                    value = None if figure.value is None else 100 * figure.value
                    figures[f"{name}: {figure.name}"] = value
    return figures


def write_table(
    out: Path, config: AblateModelsConfig, results: Mapping[str, Mapping[str, Figures]]
) -> str:
    """Write ``table.md`` and ``table.json`` and return the table: means over seeds ± standard
    deviation, x100.
    """
    every = [figures for runs in results.values() for figures in runs.values()]
    columns = list(dict.fromkeys(name for figures in every for name in figures))
    lines = []
    for label, runs in results.items():
        cells = [_over_seeds([figures.get(name) for figures in runs.values()]) for name in columns]
        lines.append([label, str(len(runs)), *cells])
    notes = [
        f"- recipe: {config.recipe}",
        f"- sets scored by `{config.reward}`, figures x100, ± standard deviation",
    ]
    for label, cell in config.cells.items():
        notes.append(f"- {label}: {cell.overrides or 'the recipe'}")
    text = "\n".join([markdown(["cell", "seeds", *columns], lines), "", *notes]) + "\n"
    write_text(out / "table.md", text)
    write_json(out / "table.json", {label: list(runs.values()) for label, runs in results.items()})
    return text


def _over_seeds(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return LEFT_OUT
    spread = f" ± {stdev(numbers):.1f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.1f}{spread}"
