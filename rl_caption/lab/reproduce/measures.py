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
        self.rows = {row.name: row for row in table.rows}
        self.data = find_data(table, config.data)
        self.models = _named("model", config.model, table.models)
        self.captions = _named("captions", config.captions, self.rows)
        for name, file in self.captions.items():
            if not Path(file).exists():
                raise ConfigError(f"{name}: {file!r} is not there")
        self._builder = RewardBuilder()

    def obstacle(self, row: Row, column: Column) -> str | None:
        """What is missing for a cell, as far as that is known without reading anything; None where
        nothing is.
        """
        data, model = data_of(column), row.model
        if "why" in column:
            return str(column["why"])
        if "captions" in column:
            if row.name not in self.captions:
                return f"needs --captions '{row.name}=FILE': {row.source['how']}"
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

    def measure(self, row: Row, column: Column) -> float:
        """Measure a cell in the unit of the table. ``UserError`` where its value is not defined."""
        data, model = str(data_of(column)), str(row.model)
        factor = float(column.get("factor", 100 if "set" in column else 1))
        if "set" in column:
            return factor * self._agreement(row, column)
        if "retrieval" in column:
            return factor * self._recall(model, data)[column["retrieval"]]
        if "specificity" in column:
            rates = self._specificity(model, data)
            return factor * float(getattr(rates, column["specificity"]))
        if "captions" in column:
            return factor * self._captions(row, column)
        encoder = self._encoder(model)
        if "size" in column:
            cost = encoder_cost(encoder.encoder)  # type: ignore[arg-type]
            return factor * float(getattr(cost, column["size"]))
        prompts = data_sets()[data]["prompts"]
        return factor * zero_shot_accuracy(encoder, self.data[data], prompts)

    def _agreement(self, row: Row, column: Column) -> float:
        """The mean of the figures of a column, over the parts of a set."""
        data, kwargs = str(data_of(column)), json.dumps(column.get("kwargs", {}))
        values = []
        for number, judged in enumerate(self._sets(data, column["set"], kwargs)):
            if column.get("part", judged.name) != judged.name:
                continue
            found = self._figures(row.name, data, column["set"], kwargs, number)
            for name in column.get("figures") or [column["figure"]]:
                names = [name] if isinstance(name, str) else name
                defined = [found[one] for one in names if found.get(one) is not None]
                if not defined:
                    wanted = " or ".join(names)
                    raise ConfigError(f"{judged.name}: {wanted} is not defined")
                values.append(defined[0])
        return fmean(values)

    @cache
    def _sets(self, data: str, name: str, kwargs: str) -> Sequence[JudgementSet]:
        folder, options = self.data[data], json.loads(kwargs)
        if name == "ratings":
            folder /= data_sets()[data]["files"][0][0]
        return sets.load(name, folder, self.config.images, self.config.partial, options)

    @cache
    def _figures(
        self, name: str, data: str, set_name: str, kwargs: str, number: int
    ) -> Mapping[str, Any]:
        row, judged = self.rows[name], self._sets(data, set_name, kwargs)[number]
        source = row.source
        named, released = source.get("name", ""), source.get("released", {})
        if set_name in released and row.model not in self.models:
            figures = rated_figures(judged, judged.released[released[set_name]])
        else:
            if named in NAMES:
                metric = self._builder.build(*NAMES[named][1:])
            else:
                video = source.get("video") if set_name in VIDEOS else None
                metric = self._reward(video or source["reward"], row.model, source)
            check_columns(name, metric.columns, [judged])
            figures = score_set(judged, metric)
        return {figure.name: figure.value for figure in figures}

    def _reward(
        self, name: str, model: str | None, source: Mapping[str, Any]
    ) -> Reward:
        """A reward whose weights are those of a ``model`` that the user named."""
        options: dict[str, Any] = {}
        if model is not None:
            backbone, _, pretrained = self.models[model].partition("@")
            options[source.get("argument", "backbone")] = backbone
            options |= {"pretrained": pretrained} if pretrained else {}
        with config_errors(f"--model {model}"):
            return self._builder.build(name, options | source.get("kwargs", {}))

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
        captions, references = self._read(row.name, data)
        if metric in CAPTION_COLUMNS:
            evaluation = self._evaluation(row.name, data)
            if metric not in evaluation.metrics:
                raise ConfigError(evaluation.left_out[metric])
            return evaluation.metrics[metric]
        reward = self._reward(metric, column.get("model"), column)
        own: Any = references_for(captions, references, data)
        columns = {"references": own}
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
        split = entry.get("split") if path.name.startswith("dataset") else None
        references = read_references(path, split)
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
