"""What the columns of the published tables measure, by the programs' own functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rewards.clip.encoder import CachedEncoder
from rl_caption.config.build import build_data, usable_split
from rl_caption.config.evaluation import RetrievalConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import Row as Example
from rl_caption.data.files import (
    find_images,
    read_captions,
    read_references,
    references_for,
    with_ids_of,
)
from rl_caption.evaluation.metrics import METRIC_KEYS, Evaluation, evaluate_captions
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.evaluation.zero_shot import zero_shot_accuracy
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.costs import EncoderCost, encoder_cost
from rl_caption.lab.meta_evaluation.figures import (
    Figure,
    blind_figures,
    further_figures,
    rated_figures,
)
from rl_caption.lab.meta_evaluation.program import (
    FILE_SCORES,
    NAMES,
    check_columns,
    score_set,
)
from rl_caption.lab.meta_evaluation.sets import JudgementSet, RatedCaptions
from rl_caption.lab.meta_evaluation.specificity import (
    ChainScores,
    make_chains,
    released_specificity_rates,
    score_chains,
)
from rl_caption.lab.reproduce.tables import Row, Table, data_of, data_sets
from rl_caption.lab.retrieval import texts_of
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.runtime.errors import ConfigError

VIDEOS = ("vatex_eval", "activitynet_foil")
Column = Mapping[str, Any]


class NotMeasured(ConfigError):
    """A cell cannot be measured; the message says why."""


@dataclass
class Inputs:
    """What the user names."""

    data: Mapping[str, Path] = field(default_factory=dict)
    """Data set -> folder."""
    models: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """Name of a model -> backbone and ``pretrained``, as for CLIP-based rewards."""
    captions: Mapping[str, Path] = field(default_factory=dict)
    """Row -> file of captions."""
    scores: Mapping[str, Path] = field(default_factory=dict)
    """Row -> file of scores (``meta_evaluation.program.FileScores``)."""
    images: Path | None = None
    """Folder of images; None looks for it beside the data."""
    partial: bool = False
    """Whether other numbers of judgements than the published ones are accepted."""

    def obstacle(self, table: Table, row: Row, column: Column) -> str | None:
        """What is missing for a cell, as far as that is known without reading anything; None where
        nothing is.
        """
        data = data_of(column)
        model = row.model
        if "captions" in column:
            if row.name not in self.captions:
                return f"needs --captions '{row.name}=FILE': {row.source['how']}"
            model = column.get("model")
        elif row.name in self.scores:
            model = None
        elif "why" in row.source:
            return str(row.source["why"])
        elif data in row.source.get("released", {}):
            model = None
        if model is not None and model not in self.models:
            return f"needs --model '{model}=BACKBONE': {table.models[model]}"
        if data is not None and data not in self.data:
            return f"needs --data with {describe_data(data)}"
        return None


def describe_data(name: str) -> str:
    """Which files a data set has, where they are from and what they cost."""
    entry = data_sets()[name]
    files = " or ".join(", ".join(names) for names in entry.get("files", ())) or "its images"
    return f"{name} ({files}), from {entry['from']}; {entry['cost']}"


@dataclass
class Measures:
    """Measures the cells of a table; data, models and scores are kept for further cells."""

    table: Table
    inputs: Inputs
    _sets: dict[str, Sequence[JudgementSet]] = field(default_factory=dict)
    _figures: dict[tuple[str, str], Mapping[str, Mapping[str, float | None]]] = field(
        default_factory=dict
    )
    _kept: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _builder: RewardBuilder = field(default_factory=RewardBuilder)

    def measure(self, row: Row, column: Column) -> float:
        """Measure a cell in the unit of the table. ``NotMeasured`` where its value is not defined."""
        functions: dict[str, Callable[[Row, Column], float]] = {
            "set": self._agreement,
            "retrieval": self._retrieval,
            "zero_shot": self._zero_shot,
            "specificity": self._specificity,
            "captions": self._captions,
            "size": self._size,
        }
        quantity = next(key for key in functions if key in column)
        default = 100 if quantity == "set" else 1
        return functions[quantity](row, column) * column.get("factor", default)

    def _agreement(self, row: Row, column: Column) -> float:
        key = (row.name, self._set_key(column))
        if key not in self._figures:
            self._figures[key] = {
                judgements.name: {
                    figure.name: figure.value
                    for figure in self._figures_of(row, judgements, column)
                }
                for judgements in self._parts(column)
            }
        alternatives = column.get("figure", ())
        names = [alternatives] if isinstance(alternatives, str) else alternatives
        values = []
        for judgements, figures in self._figures[key].items():
            if column.get("part", judgements) == judgements:
                names_of_figures = (
                    column.get("figures") or [name for name in names if name in figures][:1]
                )
                measured = [figures.get(name) for name in names_of_figures]
                if not measured or None in measured:
                    raise NotMeasured(
                        f"{judgements}: {' and '.join(names_of_figures or names)} is not defined"
                    )
                values.append(_mean([value for value in measured if value is not None]))
        return _mean(values)

    def _figures_of(self, row: Row, judgements: JudgementSet, column: Column) -> list[Figure]:
        name = row.source.get("name", "")
        if name.startswith("blind"):
            return blind_figures(judgements)[name]
        released = row.source.get("released", {}).get(column["set"])
        in_file = row.name in self.inputs.scores
        if released is not None and not in_file and row.model not in self.inputs.models:
            assert isinstance(judgements, RatedCaptions)
            scores = judgements.released[released]
            return rated_figures(judgements, scores) + further_figures(judgements, scores)
        metric = self._metric(row, column)
        try:
            check_columns(row.name, metric.columns, [judgements])
        except ConfigError as error:
            data = describe_data(str(data_of(column)))
            raise NotMeasured(f"{error}; the data are {data}") from error
        return score_set(judgements, metric)

    def _metric(self, row: Row, column: Column) -> Reward:
        """The metric of a row; those of one model share its encoder."""
        video = row.source.get("video") if column["set"] in VIDEOS else None

        def build() -> Reward:
            if row.name in self.inputs.scores:
                options = {"file": str(self.inputs.scores[row.name]), "heading": row.name}
                return self._builder.build(FILE_SCORES, options)
            name = row.source.get("name")
            if name in NAMES:
                ((reward, kwargs),) = NAMES[name].values()
                return self._builder.build(reward, kwargs)
            own = row.source.get("kwargs", {})
            return self._reward(video or row.source["reward"], row.model, row.source, own)

        metric: Reward = self._keep(("metric", row.name, str(video)), build)
        return metric

    def _reward(
        self, name: str, model: str | None, source: Column, kwargs: Mapping[str, Any]
    ) -> Reward:
        """A reward whose weights are those of a ``model`` that the user named."""
        return self._builder.build(name, self._model_kwargs(model, source) | dict(kwargs))

    def _model_kwargs(self, model: str | None, source: Mapping[str, Any]) -> dict[str, Any]:
        if model is None:
            return {}
        backbone, pretrained = self.inputs.models[model]
        if source["reward"] == "icc" or "argument" in source:
            return {source.get("argument", "model"): backbone}
        return {"backbone": backbone} | ({} if pretrained is None else {"pretrained": pretrained})

    def _set_key(self, column: Column) -> str:
        return f"{data_of(column)} {sorted(column.get('kwargs', {}).items())}"

    def _parts(self, column: Column) -> Sequence[JudgementSet]:
        key = self._set_key(column)
        if key not in self._sets:
            folder = self.inputs.data[str(data_of(column))]
            if column["set"] == "ratings":
                folder /= data_sets()[str(data_of(column))]["files"][0][0]
            self._sets[key] = sets.load(
                column["set"], folder, self.inputs.images, self.inputs.partial, column.get("kwargs")
            )
        return self._sets[key]

    def _retrieval(self, row: Row, column: Column) -> float:
        name = str(data_of(column))

        def recall() -> Mapping[str, float]:
            examples, encoder = self._examples(name), self._encoder(str(row.model))
            texts, owners = texts_of(examples)["references"]
            images = encoder.embed_images([example["image"] for example in examples])
            return retrieval_recall(images, encoder.embed_texts(texts), owners)

        figures: Mapping[str, float] = self._keep(("retrieval", row.name, name), recall)
        return figures[column["retrieval"]]

    def _zero_shot(self, row: Row, column: Column) -> float:
        name = column["zero_shot"]
        folder, prompts = self.inputs.data[name], data_sets()[name]["prompts"]
        return zero_shot_accuracy(self._encoder(str(row.model)), folder, prompts)

    def _specificity(self, row: Row, column: Column) -> float:
        """As the released code averages: ``released_specificity_rates``, of cosines."""

        def rates() -> tuple[float, float]:
            """Of positive and negative details."""
            examples = self._examples(str(data_of(column)))
            captions = [example["references"][0] for example in examples]
            chains = make_chains(captions, image_ids=[example["image_id"] for example in examples])
            grown = [
                (chain, example)
                for chain, example in zip(chains, examples, strict=True)
                if chain is not None
            ]
            metric = self._reward("specs", row.model, {"reward": "specs"}, {"scale": "shifted"})
            images = {"image": [example["image"] for _, example in grown]}
            scored = score_chains(metric, [chain for chain, _ in grown], images)
            cosines = [
                ChainScores(*([2 * score - 1 for score in scores] for scores in chain))
                for chain in scored
            ]
            released = released_specificity_rates(cosines)
            return released.positive, released.negative

        positive, negative = self._keep(("specificity", row.name), rates)
        return positive if column["specificity"] == "positive" else negative

    def _captions(self, row: Row, column: Column) -> float:
        """A metric of the COCO toolkit, or the mean of a reward, of captions in a file."""
        name, metric, file = (
            str(data_of(column)),
            column["captions"],
            self.inputs.captions[row.name],
        )
        folder, entry = self.inputs.data[name], data_sets()[name]
        path = next(folder / names[0] for names in entry["files"] if (folder / names[0]).is_file())
        references = read_references(
            path, entry.get("split") if path.name.startswith("dataset") else None
        )
        captions = with_ids_of(read_captions(file), references, references.images, file)
        if metric in chain.from_iterable(METRIC_KEYS.values()):
            evaluation: Evaluation = self._keep(
                ("captions", row.name, name), lambda: evaluate_captions(captions, references)
            )
            if metric not in evaluation.metrics:
                raise NotMeasured(evaluation.left_out[metric])
            return evaluation.metrics[metric]
        reward = self._reward(metric, column.get("model"), {"reward": metric}, {})
        columns: dict[str, Any] = {"references": references_for(captions, references, path)}
        if "image" in reward.columns:
            beside = (folder / name for name in entry["images"])
            images = self.inputs.images or next((path for path in beside if path.is_dir()), None)
            if images is None:
                raise NotMeasured(
                    f"{metric} looks at images, which are not there: name their folder by --images"
                )
            columns["image"] = find_images(images, captions)
        return _mean(score_captions(reward, metric, None, list(captions.values()), columns))

    def _size(self, row: Row, column: Column) -> float:
        def cost() -> EncoderCost:
            encoder: Any = self._encoder(str(row.model)).encoder
            return encoder_cost(encoder)

        measured: EncoderCost = self._keep(("size", row.name), cost)
        return float(getattr(measured, column["size"]))

    def _encoder(self, model: str) -> CachedEncoder:
        config = RetrievalConfig(*self.inputs.models[model])
        encoder: CachedEncoder = self._keep(
            ("encoder", model), lambda: load_dual_encoder(config, f"--model {model}")
        )
        return encoder

    def _examples(self, name: str) -> Sequence[Example]:
        """The images and captions of a data set; all splits where its entry names none."""

        def read() -> Sequence[Example]:
            entry, folder = data_sets()[name], self.inputs.data[name]
            config = DataConfig(path=str(folder / entry.get("path", "")), **entry["reader"])
            data = build_data(config)
            splits = data.splits if entry["split"] is None else [usable_split(data, entry["split"])]
            return [example for split in splits for example in data.split(split)]

        examples: Sequence[Example] = self._keep(("examples", name), read)
        return examples

    def _keep(self, key: tuple[str, ...], compute: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
