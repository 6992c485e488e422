"""The retrieval program: how well dual encoders find the captions of images, and the
images of captions, in a split.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from rl_caption.config.build import build_data, quiet_libraries
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.confidence import Estimate, Floats, Weights, estimates
from rl_caption.evaluation.metrics import check_has_images
from rl_caption.evaluation.results import markdown
from rl_caption.evaluation.retrieval import KS, both_ways
from rl_caption.lab.config import CompareRetrievalConfig
from rl_caption.programs.evaluate import load_dual_encoder

Texts = tuple[list[str], list[int]]
"""[M] captions, and [M] row indices of their images."""
WAYS = ("i2t", "t2i")
"""Image to text, text to image."""


def compare_retrieval(config: CompareRetrievalConfig) -> str:
    """Measure all models, write ``retrieval.md`` and ``retrieval.json`` after each, and
    return the table.

    Raises:
        ConfigError: a model cannot be loaded.
        DataError: the data cannot be read, or an image has no caption.
        RewardError: an image cannot be read.
    """
    quiet_libraries()
    folder = check_writable(config.out)
    data = build_data(config.data)
    rows = list(data[config.split][: config.max_images])
    check_has_images("retrieval", rows, f"split {config.split!r}")
    texts = texts_of(rows)
    encoders = {
        name: load_dual_encoder(model, f"models.{name}")
        for name, model in config.models.items()
    }
    head = [
        "model",
        "texts",
        *(f"{way} R@{k}" for way in WAYS for k in KS),
        "texts cut",
    ]
    lines: list[list[str]] = []
    results: list[dict[str, Any]] = []
    table = ""
    for name, encoder in encoders.items():
        images = encoder.embed_images([row["image"] for row in rows])
        for text_set, (captions, owners) in texts.items():
            ranks = both_ways(images, encoder.embed_texts(captions), owners)
            cut = encoder.encoder.texts.too_long(captions)  # type: ignore[attr-defined]
            result = {"model": name, "signature": encoder.signature, "texts": text_set}
            recalls = []
            for way, queries in zip(WAYS, (range(len(rows)), owners), strict=True):
                statistic = partial(_recall, ranks[way])
                recalls += estimates(statistic, queries, config.bootstrap, config.seed)
            figures = dict(zip(head[2:-1], recalls, strict=True))
            results.append(result | {"recall": figures, "cut": cut})
            lines.append(
                [
                    name,
                    text_set,
                    *map(_cell, recalls),
                    str(cut),
                ]
            )
        table = markdown(head, lines)
        write_text(folder / "retrieval.md", table + "\n")
        content = {"config": config.model_dump(mode="json"), "images": len(rows)}
        write_json(folder / "retrieval.json", content | {"results": results})
    return f"{table}\n\nRecall in %; in brackets 95 % bootstrap intervals over images"


def texts_of(rows: Sequence[Row]) -> dict[str, Texts]:
    """Captions of rows by kind: ``references`` and, where all rows have a long caption,
    ``long``.

    ``references`` are the short captions where the data use long captions as
    references.

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
        for number, row_texts in enumerate(column):
            captions += row_texts
            owners += [number] * len(row_texts)
            if not row_texts:
                raise DataError(f"image {rows[number]['image_id']!r} has no reference")
    return texts


def _recall(ranks: Floats, weights: Weights) -> Floats:
    """Recalls [K] of Q queries, drawn ``weights`` [Q] times, from ``ranks`` [Q, 1 + K]."""
    return np.average(
        ranks[:, 1:],
        axis=0,
        weights=weights,
    )


def _cell(recall: Estimate) -> str:
    value, *ends = [f"{100 * end:.1f}" for end in recall if end is not None]
    return f"{value} [{', '.join(ends)}]" if ends else value
