"""What a method minimises, from the embeddings of the global batch to a loss and what is logged of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rl_caption.reward_models.losses import (
    Reduction,
    cosine_distance,
    cosine_matrix,
    info_nce,
    l1_distance,
    similarity_regulator,
)

Embeddings: TypeAlias = Mapping[str, Tensor]
"""Raw embeddings [B, D] of the global batch by name, such as ``image`` and ``text``; scalars are further parameters of
the loss, such as ``scale``."""
Objective: TypeAlias = Callable[[Embeddings, Embeddings], tuple[Tensor, dict[str, Tensor]]]
"""(model's, a teacher's or none) to the loss and the values to log by key of docs/metrics.md."""

TOWER_WEIGHT = {1: 1 / 2, 2: 1 / 6}
"""Weight of each distance by the number of towers, as in the L-CLIPScore code: stage 1 averages its two losses; stage 2
averages three (L1, cosine, regulator), and the first two over two towers."""
REGULATOR_WEIGHT = 1 / 30
"""A third as above, times that code's scale of 0.1."""


@dataclass(frozen=True)
class Contrastive:
    """InfoNCE of ``image`` and ``text`` with the model's ``scale``."""

    def __call__(self, student: Embeddings, teacher: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss in nats."""
        images, texts, scale = student["image"], student["text"], student["scale"]
        loss = info_nce(images, texts, scale)
        with torch.no_grad():
            cosines = cosine_matrix(images, texts)
            own = torch.arange(len(cosines), device=cosines.device)
            texts_found = (cosines.argmax(dim=1) == own).float().mean()
            images_found = (cosines.argmax(dim=0) == own).float().mean()
        return loss, {"contrastive/scale": scale, "contrastive/accuracy": (texts_found + images_found) / 2}


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
