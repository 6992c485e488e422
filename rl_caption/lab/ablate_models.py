"""Grids of reward models: train what is missing of a grid and measure every model."""

from collections.abc import Mapping, Sequence
from functools import partial

from rl_caption.config.build import build_data, quiet_libraries, usable_split
from rl_caption.config.evaluation import RetrievalConfig
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.evaluation.results import Column
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
    train_runs,
    write_tables,
)
from rl_caption.programs.evaluate import load_dual_encoder

Figures = dict[str, float | None]
"""Heading of a column -> value, printed times 100; None what is not defined."""


def ablate_models(config: AblateModelsConfig, parse: Parse) -> int:
    """Train the runs that are not complete, measure all, and write their tables. Returns 0, or 1
    where a run failed.

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
    runs = make_runs(config, RewardModelConfig, ["--config", config.recipe], parse)
    with owned(config.out) as out:
        measure = partial(measure_model, config=config, judged=judged)
        results, failures = train_runs("reward_model", runs, config.jobs, measure)
        notes = [f"recipe: {config.recipe}", "x100"]
        return write_tables(
            out, results, lambda key: Column(key, decimals=1), notes, failures
        )


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
        figures["R@1, image to text"] = recall["i2t_r1"]
        figures["R@1, text to image"] = recall["t2i_r1"]
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
                    figures[f"{name}: {figure.name}"] = figure.value
    return figures
