"""Judges dual encoders and metrics on one split: retrieval and, on generated scenes, agreement with the truth."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rewards.base import Reward
from rewards.clip.backbone import Backbone
from rewards.registry import build
from rl_caption.data.base import DataError, Row
from rl_caption.meta_evaluation.agreement import Agreement, agreement
from rl_caption.meta_evaluation.captions import JudgedCaptions
from rl_caption.meta_evaluation.embeddings import RememberingEncoder
from rl_caption.meta_evaluation.retrieval import retrieval_recall
from rl_caption.meta_evaluation.tables import (
    ModelReport,
    accuracy_table,
    agreement_table,
    models_table,
    notes,
    sources_table,
)

logger = logging.getLogger(__name__)


@dataclass
class Report:
    """What was found on one split."""

    split: str
    images: int
    texts: int
    models: dict[str, ModelReport] = field(default_factory=dict)
    metrics: dict[str, Agreement] = field(default_factory=dict)

    def markdown(self, judged: JudgedCaptions | None) -> str:
        """Return the tables as text; those of metrics only where captions were judged."""
        parts = []
        if self.models:
            title = f"Retrieval on {self.split}: {self.images} images, {self.texts} texts"
            parts += [title, models_table(self.models)]
        if judged is not None and self.metrics:
            title = f"Agreement with oracle F1 over {len(judged.captions)} captions of {len(judged.rows)} scenes"
            parts += [title, agreement_table(self.metrics), "Judged captions", sources_table(judged)]
            parts += ["Reference above its hard negative (number of pairs)", accuracy_table(self.metrics, judged)]
            parts += ["\n".join(notes(self.metrics))]
        return "\n\n".join(parts) + "\n"

    def content(self) -> dict[str, Any]:
        """Return everything as JSON: shares in [0, 1], tau in [-1, 1], nothing times 100."""
        models = {label: {**asdict(model), "fp32_mib": model.fp32_mib} for label, model in self.models.items()}
        return {**asdict(self), "models": models}


def reference_metrics(names: Sequence[str]) -> dict[str, Reward]:
    """Make the n-gram metrics by name of the registry, as they are published.

    CIDEr-D is without EOS, its document frequencies are those of the references that it sees, one document an image.

    Raises:
        ValueError: an unknown name, or a metric that needs more than references.
    """
    built = [build(name, **({"eos": False} if name == "cider" else {})) for name in names]
    metrics = {metric.__name__: metric for metric in built}
    for name, metric in metrics.items():
        if not metric.columns <= {"references"}:
            raise ValueError(
                f"metric {name!r} needs {', '.join(sorted(metric.columns))}: only metrics of references alone are "
                "asked for by name; scores of a model come with the model"
            )
    return metrics


def judge_metrics(report: Report, metrics: Mapping[str, Reward], judged: JudgedCaptions) -> None:
    """Add the agreement of every metric to ``report``."""
    for name, metric in metrics.items():
        logger.info("judging %s on %d captions", name, len(judged.captions))
        report.metrics[name] = agreement(metric, judged)


def judge_model(
    report: Report, label: str, backbone: Backbone, rows: Sequence[Row], judged: JudgedCaptions | None
) -> None:
    """Add a dual encoder to ``report``: size, retrieval and, where captions are judged, its two scores.

    The scores are CLIPScore and RefCLIPScore over this encoder, without a prefix. Every image is embedded once.

    Raises:
        RewardError: an image cannot be read.
        DataError: an image has no reference.
    """
    encoder = RememberingEncoder(backbone)
    texts, owners = texts_of(rows)
    logger.info("%s: embedding %d images and %d texts", label, len(rows), len(texts))
    embeddings = encoder.encode_images([row["image"] for row in rows]), encoder.encode_texts(texts)
    recall = retrieval_recall(*embeddings, torch.tensor(owners))
    report.models[label] = ModelReport(backbone.name, backbone.signature, backbone.num_parameters, recall)
    if judged is not None:
        names = ("clipscore", "ref_clipscore")
        scores = {f"{name} of {label}": build(name, backbone=encoder, prefix="") for name in names}
        judge_metrics(report, scores, judged)


def texts_of(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """Return [M] references of R rows as written, and [M] the row of each.

    Raises:
        DataError: an image has no reference.
    """
    for row in rows:
        if not row["references"]:
            raise DataError(f"image {row['image_id']!r} has no reference: retrieval needs at least one for each image")
    pairs = [(text, number) for number, row in enumerate(rows) for text in row["references"]]
    return [text for text, _ in pairs], [number for _, number in pairs]
