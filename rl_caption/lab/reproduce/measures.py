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
from rl_caption.evaluation.metrics import METRIC_KEYS, evaluate_captions
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.evaluation.zero_shot import zero_shot_accuracy
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.costs import encoder_cost
from rl_caption.lab.meta_evaluation.figures import Figure, blind_figures, rated_figures
from rl_caption.lab.meta_evaluation.program import FILE_SCORES, NAMES, check_columns, score_set
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.lab.meta_evaluation.specificity import (
    ChainScores,
    make_chains,
    released_specificity_rates,
    score_chains,
)
from rl_caption.lab.reproduce.tables import Column, Row, Table, data_of, data_sets
from rl_caption.lab.retrieval import texts_of
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.runtime.errors import ConfigError


class NotMeasured(ConfigError):
    """A cell cannot be measured; the message says why."""


@dataclass
class Inputs:
    """What the user names."""

    data: Mapping[str, Path] = field(default_factory=dict)
    """Data set -> folder."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Name of a model -> ``BACKBONE`` or ``BACKBONE@PRETRAINED``, as for CLIP-based rewards."""
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
        data, model = data_of(column), row.model
        if "why" in column:
            return str(column["why"])
        if "captions" in column:
            if row.name not in self.captions:
                return f"needs --captions '{row.name}=FILE': {row.source['how']}"
            model = column.get("model")
        elif row.name in self.scores or data in row.source.get("released", {}):
            model = None
        elif "why" in row.source:
            return str(row.source["why"])
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


class Measures:
    """Measures the cells of a table; data, models and scores are kept for further cells."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._builder = RewardBuilder()

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

    def _keep(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def _agreement(self, row: Row, column: Column) -> float:
        """The mean of the figures of a column, over the parts of a set."""
        options = str(column.get("kwargs"))
        wanted = column.get("figures") or [column["figure"]]
        values = []
        for judged in self._keep((data_of(column), options), lambda: self._load_set(column)):
            if column.get("part", judged.name) != judged.name:
                continue
            key = row.name, data_of(column), options, judged.name

            def figures(judged: JudgementSet = judged) -> dict[str, float | None]:
                return {one.name: one.value for one in self._figures_of(row, judged, column)}

            found = self._keep(key, figures)
            for name in wanted:
                alternatives = [name] if isinstance(name, str) else name
                value = next((found[one] for one in alternatives if one in found), None)
                if value is None:
                    raise NotMeasured(f"{judged.name}: {' or '.join(alternatives)} is not defined")
                values.append(value)
        return _mean(values)

    def _load_set(self, column: Column) -> Sequence[JudgementSet]:
        name, folder = column["set"], self.inputs.data[str(data_of(column))]
        if name == "ratings":
            folder /= data_sets()[str(data_of(column))]["files"][0][0]
        partial = self.inputs.partial
        return sets.load(name, folder, self.inputs.images, partial, column.get("kwargs"))

    def _figures_of(self, row: Row, judged: JudgementSet, column: Column) -> Sequence[Figure]:
        name = row.source.get("name", "")
        if name.startswith("blind"):
            return blind_figures(judged)[name]
        released = row.source.get("released", {}).get(column["set"])
        in_file = row.name in self.inputs.scores
        if released is not None and not in_file and row.model not in self.inputs.models:
            return rated_figures(judged, judged.released[released])
        metric = self._metric(row, column)
        try:
            check_columns(row.name, metric.columns, [judged])
        except ConfigError as error:
            data = describe_data(str(data_of(column)))
            raise NotMeasured(f"{error}; the data are {data}") from error
        return score_set(judged, metric)

    def _metric(self, row: Row, column: Column) -> Reward:
        """The metric of a row; those of one model share its encoder."""
        source = row.source
        if row.name in self.inputs.scores:
            options = {"file": str(self.inputs.scores[row.name]), "heading": row.name}
            return self._builder.build(FILE_SCORES, options)
        if source.get("name") in NAMES:
            _, reward, options = NAMES[source["name"]]
            return self._builder.build(reward, options)
        return self._reward(source["reward"], row.model, source)

    def _reward(self, name: str, model: str | None, source: Mapping[str, Any]) -> Reward:
        """A reward whose weights are those of a ``model`` that the user named."""
        options: dict[str, Any] = {}
        if model is not None:
            backbone, _, pretrained = self.inputs.models[model].partition("@")
            options[source.get("argument", "backbone")] = backbone
            options |= {"pretrained": pretrained} if pretrained else {}
        options |= source.get("kwargs", {})
        key = "reward", name, str(options)
        reward: Reward = self._keep(key, lambda: self._builder.build(name, options))
        return reward

    def _retrieval(self, row: Row, column: Column) -> float:
        name = str(data_of(column))

        def recall() -> Mapping[str, float]:
            examples, encoder = self._examples(name), self._encoder(row)
            texts, owners = texts_of(examples)["references"]
            images = encoder.embed_images([example["image"] for example in examples])
            return retrieval_recall(images, encoder.embed_texts(texts), owners)

        figures: Mapping[str, float] = self._keep(("retrieval", row.name, name), recall)
        return figures[column["retrieval"]]

    def _zero_shot(self, row: Row, column: Column) -> float:
        name = column["zero_shot"]
        folder, prompts = self.inputs.data[name], data_sets()[name]["prompts"]
        return zero_shot_accuracy(self._encoder(row), folder, prompts)

    def _specificity(self, row: Row, column: Column) -> float:
        """As the released code averages: ``released_specificity_rates``, of cosines."""

        def rates() -> dict[str, float]:
            examples = self._examples(str(data_of(column)))
            captions = [example["references"][0] for example in examples]
            chains = make_chains(captions, image_ids=[example["image_id"] for example in examples])
            grown = [(one, e) for one, e in zip(chains, examples, strict=True) if one is not None]
            metric = self._reward("specs", row.model, {"kwargs": {"scale": "shifted"}})
            images = {"image": [example["image"] for _, example in grown]}
            cosines = []
            for scored in score_chains(metric, [one for one, _ in grown], images):
                grow, false = ([2 * score - 1 for score in scores] for scores in scored)
                cosines.append(ChainScores(grow, false))
            return released_specificity_rates(cosines)._asdict()

        found: dict[str, float] = self._keep(("specificity", row.name), rates)
        return found[column["specificity"]]

    def _captions(self, row: Row, column: Column) -> float:
        """A metric of the COCO toolkit, or the mean of a reward, of captions in a file."""
        name, metric = str(data_of(column)), column["captions"]
        file, folder = self.inputs.captions[row.name], self.inputs.data[name]
        entry = data_sets()[name]
        path = next(folder / names[0] for names in entry["files"] if (folder / names[0]).is_file())
        split = entry.get("split") if path.name.startswith("dataset") else None
        references = read_references(path, split)
        captions = with_ids_of(read_captions(file), references, references.images, file)
        if metric in chain.from_iterable(METRIC_KEYS.values()):
            key = "captions", row.name, name
            evaluation = self._keep(key, lambda: evaluate_captions(captions, references))
            if metric not in evaluation.metrics:
                raise NotMeasured(evaluation.left_out[metric])
            return float(evaluation.metrics[metric])
        reward = self._reward(metric, column.get("model"), column)
        columns: dict[str, Any] = {"references": references_for(captions, references, path)}
        if "image" in reward.columns:
            beside = (folder / below for below in entry["images"])
            images = self.inputs.images or next((path for path in beside if path.is_dir()), None)
            if images is None:
                raise NotMeasured(
                    f"{metric} looks at images, which are not there: name their folder by --images"
                )
            columns["image"] = find_images(images, captions)
        return _mean(score_captions(reward, metric, None, list(captions.values()), columns))

    def _size(self, row: Row, column: Column) -> float:
        encoder: Any = self._encoder(row).encoder
        measured = self._keep(("size", row.name), lambda: encoder_cost(encoder))
        return float(getattr(measured, column["size"]))

    def _encoder(self, row: Row) -> CachedEncoder:
        backbone, _, pretrained = self.inputs.models[str(row.model)].partition("@")
        config = RetrievalConfig(backbone=backbone, pretrained=pretrained or None)
        load = lambda: load_dual_encoder(config, f"--model {row.model}")  # noqa: E731
        encoder: CachedEncoder = self._keep(("encoder", row.model), load)
        return encoder

    def _examples(self, name: str) -> Sequence[Example]:
        """The images and captions of a data set; all splits where its entry names none."""

        def read() -> Sequence[Example]:
            entry, folder = data_sets()[name], self.inputs.data[name]
            path = str(folder / entry.get("path", ""))
            data = build_data(DataConfig(path=path, **entry["reader"]))
            splits = data.splits if entry["split"] is None else [usable_split(data, entry["split"])]
            return [example for split in splits for example in data.split(split)]

        examples: Sequence[Example] = self._keep(("examples", name), read)
        return examples


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
