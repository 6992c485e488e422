"""Measure the cells of published tables, by the programs' own functions."""

# ruff: noqa: B019 - one table is made in a run

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from statistics import fmean
from typing import Any

from rewards.base import Reward
from rewards.build import RewardBuilder
from rewards.clip.encoder import CachedEncoder
from rl_caption.config.build import build_data
from rl_caption.config.commands import RetrievalConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import Row
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.evaluation.zero_shot import zero_shot_accuracy
from rl_caption.lab.config import ReproduceConfig
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.figures import rated_figures
from rl_caption.lab.meta_evaluation.program import (
    NAMES,
    check_columns,
    score_set,
)
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.lab.meta_evaluation.specificity import (
    Chain,
    released_specificity_rates,
    score_rows,
)
from rl_caption.lab.reproduce.tables import (
    Cell,
    Table,
    data_sets,
    describe_data,
    find_data,
)
from rl_caption.lab.retrieval import texts_of
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.runtime.errors import ConfigError, config_errors

VIDEOS = ("vatex_eval", "activitynet_foil")
CHOICES = ("figure", "figures", "part", "factor")
"""Keys that choose among the values of one measurement."""
Values = Mapping[str, Any]


class Measures:
    """Measures the cells of a table; keeps data, models and scores for further cells."""

    def __init__(self, table: Table, config: ReproduceConfig) -> None:
        self.table, self.config = table, config
        self.data = find_data(table, config.data)
        self.models = dict(pair.partition("=")[::2] for pair in config.model)
        if unknown := self.models.keys() - table.models.keys():
            names = ", ".join(table.models)
            raise ConfigError(f"model has {unknown}: expected NAME=BACKBONE of {names}")
        self._builder = RewardBuilder()

    def obstacle(self, cell: Cell) -> str | None:
        """What is missing for a cell, as far as known without reading a file; None
        where nothing is missing.
        """
        how = cell.how
        model: Any = how.get("model")
        data = how["data"]
        if "why" in how:
            return str(how["why"])
        if "mean" in how:
            return next(
                filter(None, map(self.obstacle, self._averaged_cells(cell))), None
            )
        if "captions" in how:
            return f"by rl-caption evaluate --predictions FILE: {how['how']}"
        if data not in how.get("released", ()) and model not in (None, *self.models):
            return f"needs --model '{model}=BACKBONE': {self.table.models[model]}"
        if data not in (None, *self.data):
            return f"needs --data with {describe_data(data)}"
        return None

    def measure(self, cell: Cell) -> float:
        """Measure a cell in the unit of the table. Raises ``UserError`` where its value
        is not defined.
        """
        how = cell.how
        if "mean" in how:
            return fmean(map(self.measure, self._averaged_cells(cell)))
        if "set" in how:
            return self._agreement(cell) * float(how.get("factor", 100))
        model, data = str(how.get("model")), str(how["data"])
        if "retrieval" in how:
            value = self._recall(model, data)[how["retrieval"]]
        elif "specificity" in how:
            value = self._specificity(model, data)[how["specificity"]]
        elif "size" in how:
            model_of: Any = self._encoder(model).encoder
            count = sum(weights.numel() for weights in model_of.model.parameters())
            value = {"parameters": count, "half_mib": 2 * count / 2**20}[how["size"]]
        else:
            options = self.data[data], data_sets()[data]["prompts"]
            value = zero_shot_accuracy(self._encoder(model), *options)
        return value * float(how.get("factor", 1))

    def _averaged_cells(self, cell: Cell) -> list[Cell]:
        """The cells that a cell is the mean of."""
        names = cell.how["mean"]
        row = [one for one in self.table.cells if one.row == cell.row]
        plain = [one for one in row if "mean" not in one.how]
        return [one for one in plain if one.column in names]

    def _agreement(self, cell: Cell) -> float:
        """The mean of the figures of a cell, over the parts of a set."""
        how = cell.how
        shared = {key: how[key] for key in how if key not in CHOICES}
        values = []
        for set_name, figures in self._figures(cell.row, json.dumps(shared)).items():
            if how.get("part", set_name) != set_name:
                continue
            for name in how.get("figures") or [how["figure"]]:
                # Metrics without references have it without "1 reference, ".
                value = figures.get(name, figures.get(name.rpartition(", ")[2]))
                if value is None:
                    raise ConfigError(f"{set_name}: {name} is not defined")
                values.append(value)
        return fmean(values)

    @cache
    def _figures(self, row: str, text: str) -> Mapping[str, Mapping[str, float | None]]:
        """Part of a set -> figure of a row's metric -> value; ``text`` is how it is measured."""
        how = json.loads(text)
        judgement_sets = self._sets(
            how["data"],
            how["set"],
            json.dumps(how.get("options", {})),
        )
        released = how.get("released", {}).get(how["set"])
        if released is not None and how["model"] not in self.models:
            results = [
                rated_figures(judged, judged.released[released])
                for judged in judgement_sets
            ]
        else:
            if "name" in how:
                metric = self._builder.build(*NAMES[how["name"]][1:])
            else:
                is_video = how["set"] in VIDEOS and "video" in how
                metric = self._reward(how["video" if is_video else "reward"], how)
            check_columns(row, metric.columns, judgement_sets)
            results = [score_set(judged, metric) for judged in judgement_sets]
        return {
            judged.name: {figure.name: figure.value for figure in figures}
            for judged, figures in zip(judgement_sets, results, strict=True)
        }

    @cache
    def _sets(self, data: str, name: str, options: str) -> Sequence[JudgementSet]:
        folder = self.data[data]
        if name == "ratings":
            folder /= data_sets()[data]["files"][0][0]
        images, partial = self.config.images, self.config.partial
        return sets.load(
            name,
            folder,
            images,
            partial,
            json.loads(options),
        )

    def _reward(self, name: str, how: Values) -> Reward:
        """A reward with the weights that the user named for the model."""
        options = dict(how.get("kwargs", {}))
        if "model" in how:
            backbone, _, pretrained = self.models[how["model"]].partition("@")
            options.setdefault(how.get("argument", "backbone"), backbone)
            options |= {"pretrained": pretrained} if pretrained else {}
        with config_errors(f"--model {how.get('model')}"):
            return self._builder.build(name, options)

    @cache
    def _recall(self, model: str, data: str) -> Mapping[str, float]:
        rows, encoder = self._rows(data), self._encoder(model)
        texts, owners = texts_of(rows)["references"]
        images = encoder.embed_images([row["image"] for row in rows])
        return retrieval_recall(images, encoder.embed_texts(texts), owners)

    @cache
    def _specificity(self, model: str, data: str) -> Mapping[str, float]:
        """``released_specificity_rates`` of the model's cosines."""
        how = {"model": model, "kwargs": {"scale": "shifted"}}
        cosines = []
        for scored in score_rows(self._reward("specs", how), self._rows(data)):
            cosines.append(
                Chain(*([2 * score - 1 for score in scores] for scores in scored))
            )
        return released_specificity_rates(cosines)._asdict()

    @cache
    def _encoder(self, model: str) -> CachedEncoder:
        backbone, _, pretrained = self.models[model].partition("@")
        config = RetrievalConfig(backbone=backbone, pretrained=pretrained or None)
        return load_dual_encoder(config, f"--model {model}")

    @cache
    def _rows(self, data: str) -> Sequence[Row]:
        """The images and captions of a data set; all splits where its entry names none."""
        entry = data_sets()[data]
        path = str(self.data[data] / entry.get("path", ""))
        read = build_data(DataConfig(path=path, **entry["reader"]))
        splits = [entry["split"]] if entry["split"] else list(read)
        return list(chain.from_iterable(read[split] for split in splits))
