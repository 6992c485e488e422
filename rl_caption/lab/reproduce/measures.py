"""What the columns of the published tables measure, by the programs' own functions."""

# ruff: noqa: B019 - one table is made in a run

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rewards.clip.encoder import CachedEncoder
from rl_caption.config.build import build_data
from rl_caption.config.commands import RetrievalConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import Row as Example
from rl_caption.data.files import (
    Captions,
    References,
    find_images,
    read_captions,
    read_references,
    references_for,
    with_ids_of,
)
from rl_caption.evaluation.metrics import Evaluation, evaluate_captions
from rl_caption.evaluation.results import CAPTION_COLUMNS
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.evaluation.zero_shot import zero_shot_accuracy
from rl_caption.lab.config import ReproduceConfig
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.costs import encoder_cost
from rl_caption.lab.meta_evaluation.figures import rated_figures
from rl_caption.lab.meta_evaluation.program import (
    NAMES,
    check_columns,
    score_set,
)
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.lab.meta_evaluation.specificity import (
    Chain,
    SpecificityRates,
    released_specificity_rates,
    score_rows,
)
from rl_caption.lab.reproduce.tables import (
    Column,
    Row,
    Table,
    data_of,
    data_sets,
    describe_data,
    find_data,
)
from rl_caption.lab.retrieval import texts_of
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.runtime.errors import ConfigError, config_errors

VIDEOS = ("vatex_eval", "activitynet_foil")


class Measures:
    """Measures the cells of a table; data, models and scores are kept for further cells."""

    def __init__(self, table: Table, config: ReproduceConfig) -> None:
        self.table, self.config = table, config
        self.data = find_data(table, config.data)
        self.models = _named("model", config.model, table.models)
        self.captions = _named("captions", config.captions, table.rows)
        for name, file in self.captions.items():
            if not Path(file).exists():
                raise ConfigError(f"{name}: {file!r} is not there")
        self._builder = RewardBuilder()

    def obstacle(self, row_name: str, column_name: str) -> str | None:
        """What is missing for a cell, as far as that is known without reading anything; None where
        nothing is.
        """
        row, column = self.table.rows[row_name], self.table.columns[column_name]
        data, model = data_of(column), row.model
        if "why" in column:
            return str(column["why"])
        if "mean" in column:
            others = self._averaged(row, column)
            return next(
                filter(None, (self.obstacle(row_name, n) for n in others)), None
            )
        if "captions" in column:
            if row_name not in self.captions:
                return f"needs --captions '{row_name}=FILE': {row.source['how']}"
            model = column.get("model")
        elif data in row.source.get("released", {}):
            model = None
        elif "why" in row.source:
            return str(row.source["why"])
        if model is not None and model not in self.models:
            return f"needs --model '{model}=BACKBONE': {self.table.models[model]}"
        if data is not None and data not in self.data:
            return f"needs --data with {describe_data(data)}"
        return None

    @cache
    def measure(self, row_name: str, column_name: str) -> float:
        """Measure a cell in the unit of the table. ``UserError`` where its value is not defined."""
        row, column = self.table.rows[row_name], self.table.columns[column_name]
        data, model = str(data_of(column)), str(row.model)
        if "mean" in column:
            others = self._averaged(row, column)
            return fmean(self.measure(row_name, name) for name in others)
        if "set" in column:
            value = self._agreement(row, column)
        elif "retrieval" in column:
            value = self._recall(model, data)[column["retrieval"]]
        elif "specificity" in column:
            value = getattr(self._specificity(model, data), column["specificity"])
        elif "captions" in column:
            value = self._captions(row, column)
        elif "size" in column:
            cost = encoder_cost(self._encoder(model).encoder)  # type: ignore[arg-type]
            value = getattr(cost, column["size"])
        else:
            prompts = data_sets()[data]["prompts"]
            folder = self.data[data]
            value = zero_shot_accuracy(self._encoder(model), folder, prompts)
        return float(value) * column.get("factor", 100 if "set" in column else 1)

    def _averaged(self, row: Row, column: Column) -> list[str]:
        """The columns whose mean a column is, of those in which the row has a value."""
        names, columns = column["mean"], self.table.columns
        printed = [name for name in row.values if "mean" not in columns[name]]
        return [name for name in printed if names == "all" or name in names]

    def _agreement(self, row: Row, column: Column) -> float:
        """The mean of the figures of a column, over the parts of a set."""
        kwargs = json.dumps(column.get("kwargs", {}))
        figures = self._figures(row.name, str(data_of(column)), column["set"], kwargs)
        values = []
        for part, found in figures.items():
            if column.get("part", part) != part:
                continue
            for name in column.get("figures") or [column["figure"]]:
                # Metrics without references have it without "1 reference, ".
                value = found.get(name, found.get(name.rpartition(", ")[2]))
                if value is None:
                    raise ConfigError(f"{part}: {name} is not defined")
                values.append(value)
        return fmean(values)

    @cache
    def _sets(self, data: str, name: str, kwargs: str) -> Sequence[JudgementSet]:
        folder, options = self.data[data], json.loads(kwargs)
        if name == "ratings":
            folder /= data_sets()[data]["files"][0][0]
        return sets.load(name, folder, self.config.images, self.config.partial, options)

    @cache
    def _figures(
        self, name: str, data: str, set_name: str, kwargs: str
    ) -> Mapping[str, Mapping[str, float | None]]:
        """Part of a set -> figure of a row's metric -> value."""
        row, parts = self.table.rows[name], self._sets(data, set_name, kwargs)
        source = row.source
        released = source.get("released", {}).get(set_name)
        metric = None
        if released is None or row.model in self.models:
            if "name" in source:
                metric = self._builder.build(*NAMES[source["name"]][1:])
            else:
                video = source.get("video") if set_name in VIDEOS else None
                metric = self._reward(video or source["reward"], row.model, source)
            check_columns(name, metric.columns, parts)
        found = {}
        for judged in parts:
            figures = (
                rated_figures(judged, judged.released[str(released)])
                if metric is None
                else score_set(judged, metric)
            )
            found[judged.name] = {figure.name: figure.value for figure in figures}
        return found

    def _reward(
        self, name: str, model: str | None, source: Mapping[str, Any]
    ) -> Reward:
        """A reward whose weights are those of a ``model`` that the user named."""
        options = dict(source.get("kwargs", {}))
        if model is not None:
            backbone, _, pretrained = self.models[model].partition("@")
            options.setdefault(source.get("argument", "backbone"), backbone)
            if pretrained:
                options.setdefault("pretrained", pretrained)
        with config_errors(f"--model {model}"):
            return self._builder.build(name, options)

    @cache
    def _recall(self, model: str, data: str) -> Mapping[str, float]:
        examples, encoder = self._examples(data), self._encoder(model)
        texts, owners = texts_of(examples)["references"]
        images = encoder.embed_images([example["image"] for example in examples])
        return retrieval_recall(images, encoder.embed_texts(texts), owners)

    @cache
    def _specificity(self, model: str, data: str) -> SpecificityRates:
        """As the released code averages: ``released_specificity_rates``, of cosines."""
        metric = self._reward("specs", model, {"kwargs": {"scale": "shifted"}})
        cosines = []
        for scored in score_rows(metric, self._examples(data)):
            cosines.append(Chain(*([2 * score - 1 for score in own] for own in scored)))
        return released_specificity_rates(cosines)

    def _captions(self, row: Row, column: Column) -> float:
        """A metric of the COCO toolkit, or the mean of a reward, of captions in a file."""
        data, metric = str(data_of(column)), column["captions"]
        if metric in CAPTION_COLUMNS:
            evaluation = self._evaluation(row.name, data)
            if metric not in evaluation.metrics:
                raise ConfigError(evaluation.left_out[metric])
            return evaluation.metrics[metric]
        reward = self._reward(metric, column.get("model"), column)
        captions, references = self._read(row.name, data)
        columns: dict[str, Any] = {
            "references": references_for(captions, references, data)
        }
        if "image" in reward.columns:
            beside = [self.data[data] / below for below in data_sets()[data]["images"]]
            images = next(filter(Path.is_dir, beside), beside[0])
            columns["image"] = find_images(self.config.images or images, captions)
        texts = list(captions.values())
        return fmean(score_captions(reward, metric, None, texts, columns))

    @cache
    def _evaluation(self, name: str, data: str) -> Evaluation:
        return evaluate_captions(*self._read(name, data))

    @cache
    def _read(self, name: str, data: str) -> tuple[Captions, References]:
        """The captions of a row's file, and the references of the data set."""
        file, entry = self.captions[name], data_sets()[data]
        paths = [self.data[data] / names[0] for names in entry["files"]]
        path = next(filter(Path.is_file, paths))
        references = read_references(path, entry.get("split"), has_splits=False)
        captions = read_captions(file)
        return with_ids_of(captions, references, references.images, file), references

    @cache
    def _encoder(self, model: str) -> CachedEncoder:
        backbone, _, pretrained = self.models[model].partition("@")
        config = RetrievalConfig(backbone=backbone, pretrained=pretrained or None)
        return load_dual_encoder(config, f"--model {model}")

    @cache
    def _examples(self, data: str) -> Sequence[Example]:
        """The images and captions of a data set; all splits where its entry names none."""
        entry = data_sets()[data]
        path = str(self.data[data] / entry.get("path", ""))
        read = build_data(DataConfig(path=path, **entry["reader"]))
        if entry["split"] is not None:
            return read.split(entry["split"])
        return list(chain.from_iterable(map(read.split, read.splits)))


def _named(option: str, pairs: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """``NAME=VALUE`` of an option -> {name: value}; ``ConfigError`` for another name."""
    values = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not value or name not in names:
            expected = f"NAME=VALUE with a name of {', '.join(names) or 'none'}"
            raise ConfigError(f"--{option} is {pair!r}: expected {expected}")
        values[name] = value
    return values
