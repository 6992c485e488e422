"""Grids of reward models: train what is missing of a grid, measure every model, write a table over
seeds.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from rl_caption.config.build import build_data, quiet_libraries, usable_split
from rl_caption.config.evaluation import RetrievalConfig
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.lab.config import AblateModelsConfig
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.program import (
    build_metrics,
    check_columns,
    score_set,
)
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.lab.retrieval import texts_of
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.programs.ablation.grid import (
    Parse,
    Run,
    make_runs,
    owned,
    say,
    train_runs,
)
from rl_caption.programs.evaluate import load_dual_encoder

Figures = dict[str, float | None]
"""Heading of a column -> value, times 100; None what is not defined."""


def ablate_models(config: AblateModelsConfig, parse: Parse) -> int:
    """Train the runs that are not complete, measure all, and write ``table.md`` and ``table.json``:
    means over seeds ± standard deviation, times 100. Returns 0, or 1 where a run failed.

    Raises:
        ConfigError: an override that the recipe does not have, an unknown set or reward, or a run
            that is there with another configuration. This is found before the first run.
        DataError: the data of a set or of the retrieval cannot be read.
    """
    quiet_libraries()
    judged = {
        heading: sets.load(one.set, one.data, one.images, one.partial, one.set_kwargs)
        for heading, one in config.sets.items()
    }
    found: dict[str, dict[str, Figures]] = {}

    def measure(run: Run) -> None:
        found.setdefault(run.label, {})[run.name] = measure_model(run, config, judged)

    runs = make_runs(config, RewardModelConfig, ["--config", config.recipe], parse)
    with owned(config.out) as out:
        failures = train_runs("reward_model", runs, config.jobs, measure)
        results = {
            label: list(found[label].values())
            for label in config.cells
            if label in found
        }
        table = markdown(*over_seeds(results))
        write_text(out / "table.md", f"{table}\n\n- recipe: {config.recipe}\n")
        write_json(out / "table.json", results)
        print(table)
    for failure in failures:
        say(f"error: {failure}")
    return 1 if failures else 0


def measure_model(
    run: Run, config: AblateModelsConfig, judged: Mapping[str, Sequence[JudgementSet]]
) -> Figures:
    """Retrieval and the published figures of every set, by the exported model of a run."""
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
    judge = JudgeConfig(
        target=config.reward, kwargs={"backbone": encoder} | config.kwargs
    )
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


def over_seeds(
    results: Mapping[str, Sequence[Figures]],
) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a table: mean and standard deviation of every figure of each cell."""
    columns = dict.fromkeys(
        name for seeds in results.values() for one in seeds for name in one
    )
    lines = []
    for label, seeds in results.items():
        cells = [label, str(len(seeds))]
        for name in columns:
            found = [one.get(name) for one in seeds]
            values = [value for value in found if value is not None]
            text = f"{mean(values):.1f}" if values else LEFT_OUT
            cells.append(text + (f" ± {stdev(values):.1f}" if len(values) > 1 else ""))
        lines.append(cells)
    return ["cell", "seeds", *columns], lines
