"""The retrieval program: how well dual encoders find the captions of images, and the images of
captions, in a split.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn.functional import normalize

from rewards.clip.encoder import CachedEncoder, Embeddings
from rl_caption.config.build import build_data, quiet_libraries, usable_split
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.metrics import check_has_images
from rl_caption.evaluation.results import markdown
from rl_caption.evaluation.retrieval import KS, both_ways
from rl_caption.lab.config import CompareRetrievalConfig
from rl_caption.lab.meta_evaluation.figures import intervals
from rl_caption.programs.evaluate import load_dual_encoder
from rl_caption.reward_models.teacher import embed_features, reads_features

Texts = tuple[list[str], list[int]]
"""[M] captions, and [M] the row of each."""
WAYS = {"i2t": "image to text", "t2i": "text to image"}
FIGURES = {
    f"{way}_{name}": f"{words}, {heading}"
    for way, words in WAYS.items()
    for name, heading in [*((f"r{k}", f"R@{k}, %") for k in KS), ("median_rank", "median rank")]
}
"""Key in ``retrieval.json`` -> heading."""


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
    rows = list(data.split(usable_split(data, config.split))[: config.max_images])
    check_has_images("retrieval", rows, f"split {config.split!r}")
    texts = texts_of(rows)
    encoders = {
        name: load_dual_encoder(model, f"models.{name}") for name, model in config.models.items()
    }
    table = ""
    results: dict[str, Any] = {}
    for name, encoder in encoders.items():
        results[name] = _measure(encoder, rows, texts, config)
        table = _table(
            config,
            results,
            {name: len(captions) for name, (captions, _) in texts.items()},
            len(rows),
        )
        write_text(folder / "retrieval.md", table)
        write_json(
            folder / "retrieval.json",
            {"config": asdict(config), "images": len(rows), "models": results},
        )
    print(f"wrote {folder / 'retrieval.md'}, {folder / 'retrieval.json'}", file=sys.stderr)
    return table


def texts_of(rows: Sequence[Row]) -> dict[str, Texts]:
    """Return the captions of rows by kind: ``references`` and, where all rows have a long caption,
    ``long``.

    ``references`` are the short ones where the data use long captions as references.

    Raises:
        DataError: an image has no reference.
    """
    kinds = {"references": [row.get("short_references", row["references"]) for row in rows]}
    if rows and all(row.get("long_reference") for row in rows):
        kinds["long"] = [[row["long_reference"]] for row in rows]
    for row, captions in zip(rows, kinds["references"], strict=True):
        if not captions:
            raise DataError(
                f"image {row['image_id']!r} has no reference: retrieval needs at least one per "
                f"image"
            )
    texts = {}
    for name, column in kinds.items():
        pairs = [(text, number) for number, captions in enumerate(column) for text in captions]
        texts[name] = [text for text, _ in pairs], [number for _, number in pairs]
    return texts


def _measure(
    encoder: CachedEncoder,
    rows: Sequence[Row],
    texts: Mapping[str, Texts],
    config: CompareRetrievalConfig,
) -> dict[str, Any]:
    """What the model is, and its figures for each set of texts."""
    backbone: Any = encoder.encoder
    if reads_features(backbone, config.data.features_root):
        images: Embeddings = normalize(embed_features(backbone, rows), dim=1).numpy()
    else:
        images = encoder.embed_images([row["image"] for row in rows])
    results = {}
    for name, (captions, owners) in texts.items():
        distinct = {text: row for row, text in enumerate(dict.fromkeys(captions))}
        embedded = encoder.embed_texts(list(distinct))[[distinct[text] for text in captions]]
        ranks = both_ways(images, embedded, owners)
        figures: dict[str, Any] = {}
        for way, groups in (("i2t", list(range(len(rows)))), ("t2i", owners)):
            figures |= _figures(way, ranks[way], groups, config)
        results[name] = {
            "texts": len(captions),
            "cut": backbone.too_long(captions),
            "figures": figures,
        }
    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    return {"signature": encoder.signature, "parameters": parameters, "captions": results}


def _figures(
    way: str, ranks: NDArray[np.float64], images: Sequence[int], config: CompareRetrievalConfig
) -> dict[str, dict[str, float | None]]:
    """Recall and median rank of Q queries by their ``ranks``, [Q, 1 + K], with intervals over their
    images, [Q].
    """

    def statistic(weights: NDArray[np.int64]) -> NDArray[np.float64]:
        drawn = np.repeat(ranks, weights, axis=0)
        return np.append(drawn[:, 1:].mean(axis=0), np.median(drawn[:, 0]))

    values = statistic(np.ones(len(ranks), np.int64)).tolist()
    bounds = intervals(statistic, images, config.bootstrap, config.seed) or [None] * len(values)
    keys = [key for key in FIGURES if key.startswith(way)]
    figures = {}
    for key, value, interval in zip(keys, values, bounds, strict=True):
        low, high = interval or (None, None)
        figures[key] = {"value": value, "low": low, "high": high}
    return figures


def _table(
    config: CompareRetrievalConfig,
    results: Mapping[str, Any],
    counts: Mapping[str, int],
    images: int,
) -> str:
    """A line for each model and set of texts; notes below."""
    lines = []
    for name, model in results.items():
        for texts, result in model["captions"].items():
            cells = [_format_figure(key, result["figures"][key]) for key in FIGURES]
            lines.append(
                [name, f"{model['parameters'] / 1e6:.2f}", texts, *cells, f"{result['cut']}"]
            )
    head = ["model", "parameters, millions", "texts", *FIGURES.values(), "texts cut"]
    described = " and ".join(
        f"{count} {'long captions' if name == 'long' else name}" for name, count in counts.items()
    )
    notes = [f"- {name}: `{model['signature']}`" for name, model in results.items()]
    if config.bootstrap:
        notes.insert(
            0,
            f"- In brackets: 95 % bootstrap interval, {config.bootstrap} resamples of images as "
            f"queries",
        )
    title = f"## Retrieval on {config.split}: {images} images, {described}"
    return "\n".join([title, "", markdown(head, lines), "", *notes]) + "\n"


def _format_figure(key: str, figure: Mapping[str, float | None]) -> str:
    factor = 1 if key.endswith("rank") else 100
    value, *ends = (None if end is None else f"{factor * end:.1f}" for end in figure.values())
    return f"{value}" if None in ends else f"{value} [{ends[0]}, {ends[1]}]"
