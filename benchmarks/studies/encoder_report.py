"""Dual encoders and metrics on one split: retrieval and, on generated scenes, agreement with the truth, as tables."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewards.base import Reward
from rewards.clip.backbone import Backbone
from rewards.clip.encoder import DualEncoder
from rewards.images import ImageSource
from rewards.registry import build
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import NEGATIVE_KINDS
from rl_caption.meta_evaluation.correlation import (
    ALL,
    UndefinedCorrelation,
    grouped_tau_b,
    kendall_tau_b,
    kendall_tau_c,
    pairwise_accuracy,
)
from rl_caption.meta_evaluation.figures import UNDEFINED, markdown
from rl_caption.meta_evaluation.scenes import SceneCaptions
from rl_caption.reward_models.retrieval import retrieval_recall

logger = logging.getLogger(__name__)


class RememberingEncoder:
    """A ``DualEncoder`` around another one: every image and every text is embedded once.

    Images are told apart by path or, otherwise, as objects: pass the same object again. Nothing is ever forgotten
    (4 D bytes each), which suits one split and not training.
    """

    def __init__(self, encoder: DualEncoder) -> None:
        self.encoder = encoder
        self.fingerprint, self.signature = encoder.fingerprint, encoder.signature
        self.context_length = encoder.context_length
        self._images: dict[Hashable, Tensor] = {}
        self._texts: dict[Hashable, Tensor] = {}
        self._objects: dict[int, Any] = {}  # keeps the objects alive whose ids are keys

    def encode_images(self, images: Sequence[ImageSource]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        for image in images:
            if not isinstance(image, str | Path):
                self._objects[id(image)] = image
        keys = [str(image) if isinstance(image, str | Path) else id(image) for image in images]
        return _remembered(self._images, keys, images, self.encoder.encode_images)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        return _remembered(self._texts, texts, texts, self.encoder.encode_texts)


def _remembered(
    known: dict[Hashable, Tensor], keys: Sequence[Hashable], items: Sequence[Any], encode: Callable[[list[Any]], Tensor]
) -> Tensor:
    missing = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
    if missing:
        known.update(zip(missing, encode(list(missing.values())).unbind(), strict=True))
    return torch.stack([known[key] for key in keys]) if keys else torch.zeros(0, 0)


@dataclass(frozen=True)
class Agreement:
    """How one metric agrees with oracle F1. A correlation that is not defined is None and ``notes`` says why."""

    signature: str
    tau_b: float | None
    """Kendall's tau_b over all captions of all images, in [-1, 1]; likewise ``tau_c``."""
    tau_c: float | None
    within_image_tau_b: float | None
    """Mean over images of tau_b among the captions of one image, in [-1, 1]."""
    images: int
    """Images in that mean: those whose captions differ in F1."""
    constant_images: int
    """Of these, images to whose captions the metric gives one score; they count 0."""
    accuracy: dict[str, float]
    """Kind of hard negative -> share of pairs with the true caption strictly above, in [0, 1]; ``all`` is overall."""
    notes: list[str] = field(default_factory=list)


def agreement(metric: Reward, judged: SceneCaptions) -> Agreement:
    """Score all judged captions in one call and compare.

    Raises:
        RewardError: the metric cannot score them.
        ValueError: fewer than two captions, or no hard negative.
    """
    texts = [caption.text for caption in judged.captions]
    return scores_agreement(metric(None, texts, **judged.columns()), judged, metric.signature)


def scores_agreement(scores: Sequence[float], judged: SceneCaptions, signature: str = "") -> Agreement:
    """Compare [N] scores of the judged captions with oracle F1.

    Raises:
        ValueError: another number of scores, one that is not finite, fewer than two captions, or no hard negative.
    """
    f1 = [caption.f1 for caption in judged.captions]
    groups = [caption.row for caption in judged.captions]
    notes: list[str] = []
    tau_b = tau_c = within = None
    images = constant = 0
    try:
        tau_b, tau_c = kendall_tau_b(scores, f1), kendall_tau_c(scores, f1)
    except UndefinedCorrelation as error:
        notes.append(f"over all captions: {error}")
    try:
        grouped = grouped_tau_b(scores, f1, groups)
        within, images, constant = grouped.mean, grouped.groups, grouped.constant_scores
    except UndefinedCorrelation as error:
        notes.append(f"within images: {error}")
    accuracy = pairwise_accuracy(
        [scores[pair.correct] for pair in judged.pairs],
        [scores[pair.wrong] for pair in judged.pairs],
        [pair.kind for pair in judged.pairs],
    )
    return Agreement(signature, tau_b, tau_c, within, images, constant, accuracy, notes)


@dataclass(frozen=True)
class ModelReport:
    """A dual encoder: its size, and retrieval on a split."""

    folder: str
    signature: str
    parameters: int
    retrieval: dict[str, float]
    """``i2t_r1`` ... ``t2i_r10``, in [0, 1]."""

    @property
    def fp32_mib(self) -> float:
        """Size of the parameters in float32, in MiB."""
        return self.parameters * 4 / 2**20


@dataclass
class Report:
    """What was found on one split."""

    split: str
    images: int
    texts: int
    models: dict[str, ModelReport] = field(default_factory=dict)
    metrics: dict[str, Agreement] = field(default_factory=dict)

    def markdown(self, judged: SceneCaptions | None) -> str:
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


def judge_metrics(report: Report, metrics: Mapping[str, Reward], judged: SceneCaptions) -> None:
    """Add the agreement of every metric to ``report``."""
    for name, metric in metrics.items():
        logger.info("judging %s on %d captions", name, len(judged.captions))
        report.metrics[name] = agreement(metric, judged)


def judge_model(
    report: Report, label: str, backbone: Backbone, rows: Sequence[Row], judged: SceneCaptions | None
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


def models_table(models: Mapping[str, ModelReport]) -> str:
    """Size, and recall at k in per cent in both directions."""
    keys = list(next(iter(models.values())).retrieval)
    names = {"i2t": "image to text", "t2i": "text to image"}
    head = ["model", "parameters, millions", "fp32, MiB"]
    head += [f"{names[key[:3]]} R@{key.removeprefix(key[:3] + '_r')}, %" for key in keys]
    lines = [
        [label, f"{model.parameters / 1e6:.2f}", f"{model.fp32_mib:.1f}"]
        + [f"{100 * model.retrieval[key]:.1f}" for key in keys]
        for label, model in models.items()
    ]
    return markdown(head, lines)


def agreement_table(metrics: Mapping[str, Agreement]) -> str:
    """Kendall's tau against oracle F1, times 100 as papers print it."""
    head = ["metric", "tau_b, x100", "tau_c, x100", "tau_b within images, x100", "images scored all alike"]
    lines = []
    for name, found in metrics.items():
        taus = [_tau(value) for value in (found.tau_b, found.tau_c, found.within_image_tau_b)]
        lines.append([name, *taus, f"{found.constant_images} of {found.images}"])
    return markdown(head, lines)


def accuracy_table(metrics: Mapping[str, Agreement], judged: SceneCaptions) -> str:
    """Share of hard negatives scored below the reference that they were made from, in per cent."""
    found_kinds = Counter(pair.kind for pair in judged.pairs)
    counts = {ALL: len(judged.pairs)} | {kind: found_kinds[kind] for kind in NEGATIVE_KINDS if kind in found_kinds}
    head = ["metric", *(f"{kind} ({count}), %" for kind, count in counts.items())]
    lines = [[name, *(f"{100 * found.accuracy[kind]:.1f}" for kind in counts)] for name, found in metrics.items()]
    return markdown(head, lines)


def sources_table(judged: SceneCaptions) -> str:
    """Where the judged captions come from and how good they are."""
    f1: dict[str, list[float]] = {}
    for caption in judged.captions:
        f1.setdefault(caption.source, []).append(caption.f1)
    head = ["source", "captions", "mean oracle F1, 0 to 1"]
    return markdown(head, [[source, str(len(own)), f"{statistics.fmean(own):.3f}"] for source, own in f1.items()])


def notes(metrics: Mapping[str, Agreement]) -> list[str]:
    """Why correlations are not defined, and the signatures of the metrics."""
    undefined = [f"- {UNDEFINED} {name}, {note}" for name, found in metrics.items() for note in found.notes]
    return undefined + [f"- {name}: `{found.signature}`" for name, found in metrics.items()]


def _tau(value: float | None) -> str:
    return UNDEFINED if value is None else f"{100 * value:.1f}"
