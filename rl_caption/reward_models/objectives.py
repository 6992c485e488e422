"""What a method minimises, from the embeddings of the global batch to a loss and what is logged of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_caption.reward_models.losses import (
    Reduction,
    cosine_distance,
    cosine_matrix,
    dynamic_margin,
    hinge,
    info_nce,
    l1_distance,
    positive_augmented_info_nce,
    short_info_nce,
    similarity_regulator,
)

Embeddings: TypeAlias = Mapping[str, Tensor]
"""Raw embeddings [B, D] of the global batch by name, such as ``image`` and ``text``; scalars are further parameters of
the loss, such as ``scale``."""
Objective: TypeAlias = Callable[[Embeddings, Embeddings], tuple[Tensor, dict[str, Tensor]]]
"""(model's; a teacher's, which rows have a triplet, or none) to loss and what is logged by key of docs/metrics.md."""

TOWER_WEIGHT = {1: 1 / 2, 2: 1 / 6}
"""Weight of each distance by the number of towers, as in the L-CLIPScore code: stage 1 averages its two losses; stage 2
averages three (L1, cosine, regulator), and the first two over two towers."""
REGULATOR_WEIGHT = 1 / 30
"""A third as above, times that code's scale of 0.1."""


LARGEST_MARGIN = {"logit": 1.5, "cosine": 0.015}
"""Of SPECS's code, in logits; and the same at a scale of 100, where CLIP's ends."""


@dataclass(frozen=True)
class Contrastive:
    """InfoNCE of ``image`` and ``text`` with the model's ``scale``.

    Args:
        label_smoothing: of the cross-entropies.
        short_weight: of the same between ``text_short`` and the images' principal components; 0 leaves it out.
        pca_rank: how many components.
    """

    label_smoothing: float = 0.0
    short_weight: float = 0.0
    pca_rank: int = 32

    def __call__(self, student: Embeddings, teacher: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss in nats."""
        images, texts, scale = student["image"], student["text"], student["scale"]
        loss = info_nce(images, texts, scale, self.label_smoothing)
        metrics = _contrastive_metrics(student)
        if self.short_weight:
            short = short_info_nce(images, student["text_short"], scale, self.pca_rank, self.label_smoothing)
            loss, metrics = loss + self.short_weight * short, metrics | {"contrastive/short": short}
        return loss, metrics


def _contrastive_metrics(student: Embeddings) -> dict[str, Tensor]:
    with torch.no_grad():
        cosines = cosine_matrix(student["image"], student["text"])
        own = torch.arange(len(cosines), device=cosines.device)
        texts_found = (cosines.argmax(dim=1) == own).float().mean()
        images_found = (cosines.argmax(dim=0) == own).float().mean()
    return {"contrastive/scale": student["scale"], "contrastive/accuracy": (texts_found + images_found) / 2}


@dataclass(frozen=True)
class PositiveAugmented:
    """``positive_augmented_info_nce`` of ``image``, ``text``, ``image_generated`` and ``text_generated``.

    Args:
        images: weight of generated images; 0 leaves them out.
        captions: of generated captions; 0 leaves them out.
    """

    images: float = 0.05
    captions: float = 0.1

    def __call__(self, student: Embeddings, teacher: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss in nats; terms are logged unweighted."""
        loss, terms = positive_augmented_info_nce(
            student["image"],
            student["text"],
            student["scale"],
            (self.images, student["image_generated"]) if self.images else None,
            (self.captions, student["text_generated"]) if self.captions else None,
        )
        return loss, _contrastive_metrics(student) | {f"positive/{name}": term for name, term in terms.items()}


@dataclass(frozen=True)
class Specificity:
    """A caption that says one more true thing scores higher, one that says a false thing lower (SPECS, section 3).

    ``alpha * InfoNCE(image, text) + beta * hinge(s(positive) - s(base)) + gamma * hinge(s(base) - s(negative))`` with s
    the cosine to the own image, and a ``dynamic_margin`` of its own for either hinge.

    Args:
        alpha, beta, gamma: weights.
        units: of s in the hinges: ``logit``, cosines times the model's scale (released code), or ``cosine``.
        max_margin: largest margin, in these units; None takes ``LARGEST_MARGIN``.
        symmetric: InfoNCE in both directions; False is text to image alone (released code).
    """

    alpha: float = 1.0
    beta: float = 8.0
    gamma: float = 0.8
    units: Literal["logit", "cosine"] = "logit"
    max_margin: float | None = None
    symmetric: bool = False

    def __call__(self, student: Embeddings, target: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss; ``target`` has ``triplet`` [B], 1 where a row has a triplet. Terms are logged unweighted."""
        counts, scale = target["triplet"], student["scale"]
        factor = scale if self.units == "logit" else torch.ones_like(scale)
        largest = LARGEST_MARGIN[self.units] if self.max_margin is None else self.max_margin
        base, positive, negative = (
            factor * F.cosine_similarity(student["image"], student[f"text_{name}"], dim=-1)
            for name in ("base", "positive", "negative")
        )
        contrast = info_nce(student["image"], student["text"], scale, symmetric=self.symmetric)
        loss, metrics = self.alpha * contrast, _contrastive_metrics(student) | {"specificity/contrastive": contrast}
        for name, weight, gaps in (("positive", self.beta, positive - base), ("negative", self.gamma, base - negative)):
            margin = dynamic_margin(gaps, counts, largest)
            term = hinge(gaps, counts, margin)
            loss = loss + weight * term
            share = ((gaps > 0) * counts).sum() / counts.sum().clamp(min=1)
            metrics |= {
                f"specificity/{name}_hinge": term,
                f"specificity/{name}_margin": margin,
                f"specificity/{name}_rate": share,
            }
        return loss, metrics


@dataclass(frozen=True)
class Distillation:
    """Distances of raw embeddings to the teacher's, and the Similarity Regulator between ``image`` and ``text``.

    Args:
        towers: names of the embeddings that are compared.
        l1_weight, cosine_weight: of each tower's distances.
        regulator_weight: 0 leaves the regulator out.
        reduction: of the regulator.
    """

    towers: tuple[str, ...]
    l1_weight: float
    cosine_weight: float
    regulator_weight: float = 0.0
    reduction: Reduction = "mean"

    def __call__(self, student: Embeddings, teacher: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss; every term is logged before its weight."""
        loss = torch.zeros((), device=student[self.towers[0]].device)
        metrics: dict[str, Tensor] = {}
        for tower in self.towers:
            absolute = l1_distance(student[tower], teacher[tower])
            angle = cosine_distance(student[tower], teacher[tower])
            loss = loss + self.l1_weight * absolute + self.cosine_weight * angle
            metrics |= {f"distill/l1_{tower}": absolute, f"distill/cosine_{tower}": angle}
        if self.regulator_weight:
            regulator = similarity_regulator(
                student["image"], student["text"], teacher["image"], teacher["text"], self.reduction
            )
            loss = loss + self.regulator_weight * regulator
            metrics["distill/regulator"] = regulator
        return loss, metrics
