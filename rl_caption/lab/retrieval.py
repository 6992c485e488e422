"""The retrieval program: how well dual encoders find the captions of images, and the images of
captions, in a split.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rewards.clip.encoder import CachedEncoder
from rl_caption.config.build import build_data, quiet_libraries
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.confidence import Floats, Weights, estimates
from rl_caption.evaluation.metrics import check_has_images
from rl_caption.evaluation.results import markdown
from rl_caption.evaluation.retrieval import KS, both_ways
from rl_caption.lab.config import CompareRetrievalConfig
from rl_caption.programs.evaluate import load_dual_encoder

Texts = tuple[list[str], list[int]]
"""[M] captions, and [M] the row of each."""
FIGURES = [*(f"r{k}" for k in KS), "median_rank"]


def compare_retrieval(config: CompareRetrievalConfig) -> str:
    """Measure all models, write ``retrieval.md`` and ``retrieval.json`` after each, and return the
    table.

    Raises:
        ConfigError: a model cannot be loaded.
        DataError: the data cannot be read, or an image has no caption.
        RewardError: an image cannot be read.
    """
    quiet_libraries()
    folder = check_writable(config.out)
    data = build_data(config.data)
    rows = list(data.split(config.split)[: config.max_images])
    check_has_images("retrieval", rows, f"split {config.split!r}")
    texts = texts_of(rows)
    encoders = {
        name: load_dual_encoder(model, f"models.{name}")
        for name, model in config.models.items()
    }
    lines: list[list[str]] = []
    results: dict[str, Any] = {}
    table = ""
    for name, encoder in encoders.items():
        result = results[name] = _measure(encoder, rows, texts, config)
        size = f"{result['parameters'] / 1e6:.2f}"
        for kind, found in result["captions"].items():
            cells = [_cell(key, figure) for key, figure in found["figures"].items()]
            lines.append([name, size, kind, *cells, str(found["cut"])])
            head = ["model", "parameters, M", "texts", *found["figures"], "texts cut"]
            table = markdown(head, lines)
        write_text(folder / "retrieval.md", table + "\n")
        plain = config.model_dump(mode="json")
        content = {"config": plain, "images": len(rows), "models": results}
        write_json(folder / "retrieval.json", content)
    return f"{table}\n\nRecall in %; in brackets 95 % bootstrap intervals over images"


def texts_of(rows: Sequence[Row]) -> dict[str, Texts]:
    """Return the captions of rows by kind: ``references`` and, where all rows have a long caption,
    ``long``.

    ``references`` are the short ones where the data use long captions as references.

    Raises:
        DataError: an image has no reference.
    """
    kinds = {
        "references": [row.get("short_references", row["references"]) for row in rows]
    }
    if rows and all(row.get("long_reference") for row in rows):
        kinds["long"] = [[row["long_reference"]] for row in rows]
    texts: dict[str, Texts] = {}
    for name, column in kinds.items():
        captions, owners = texts[name] = [], []
        for number, own in enumerate(column):
            captions += own
            owners += [number] * len(own)
            if not own:
                raise DataError(f"image {rows[number]['image_id']!r} has no reference")
    return texts


def _measure(
    encoder: CachedEncoder,
    rows: Sequence[Row],
    texts: Mapping[str, Texts],
    config: CompareRetrievalConfig,
) -> dict[str, Any]:
    """What the model is, and its figures for each set of texts."""
    backbone: Any = encoder.encoder
    images = encoder.embed_images([row["image"] for row in rows])
    results = {}
    for kind, (captions, owners) in texts.items():
        ranks = both_ways(images, encoder.embed_texts(captions), owners)
        figures = {}
        for way, queries in (("i2t", range(len(rows))), ("t2i", owners)):
            statistic = partial(_recall, ranks[way])
            found = estimates(statistic, queries, config.bootstrap, config.seed)
            for name, estimate in zip(FIGURES, found, strict=True):
                figures[f"{way}_{name}"] = estimate._asdict()
        cut = backbone.texts.too_long(captions)
        results[kind] = {"texts": len(captions), "cut": cut, "figures": figures}
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    return {
        "signature": encoder.signature,
        "parameters": parameters,
        "captions": results,
    }


def _recall(ranks: Floats, weights: Weights) -> Floats:
    """Recall and median rank of drawn queries by their ``ranks``, [Q, 1 + K]."""
    drawn = np.repeat(ranks, weights, axis=0)
    return np.append(drawn[:, 1:].mean(axis=0), np.median(drawn[:, 0]))


def _cell(key: str, figure: Mapping[str, float | None]) -> str:
    factor = 1 if key.endswith("rank") else 100
    value, *ends = [f"{factor * end:.1f}" for end in figure.values() if end is not None]
    return f"{value} [{', '.join(ends)}]" if ends else value
