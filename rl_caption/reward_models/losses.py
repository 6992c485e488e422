"""Losses of dual encoders: pure functions of the embeddings of the global batch. B
pairs, D dimensions.

Embeddings are raw, of any length above 0: cosines normalise them. The loss of a task,
made of these functions, is in the task's own file.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Embeddings: TypeAlias = Mapping[str, Tensor]
"""Raw embeddings [B, D] of the global batch by name, such as ``image`` and ``text``;
scalars are further parameters of the loss, such as ``scale``, the inverse temperature.
"""
Objective: TypeAlias = Callable[
    [Embeddings, Embeddings], tuple[Tensor, dict[str, Tensor]]
]
"""(the model's embeddings, targets) -> scalar loss, and scalars by log key. Targets are
the teacher's embeddings [B, D], ``triplet`` [B] (1 where a row has a triplet, else 0),
or empty.
"""


def cosine_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """Cosines [B, C] of every row of [B, D] with every row of [C, D]."""
    return F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T


def cross_entropies(
    logits: Tensor,
    label_smoothing: float,
    symmetric: bool = True,
    excluded: Tensor | None = None,
    false: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of [B, B] logits (image by text) with the diagonal as target:
    a scalar, nats.

    Without ``symmetric`` only of columns (texts pick images), otherwise the mean of
    columns and rows. ``excluded`` bool [B, B], symmetric, False on the diagonal: pairs
    that are left out of the softmax. ``false`` [B, F] are logits of further texts,
    negatives of the images.
    """
    if excluded is not None:
        logits = logits.masked_fill(excluded, float("-inf"))
    target = torch.arange(len(logits), device=logits.device)
    to_images = F.cross_entropy(logits.T, target, label_smoothing=label_smoothing)
    if not symmetric:
        return to_images
    texts = logits if false is None else torch.cat([logits, false], dim=1)
    return (
        F.cross_entropy(texts, target, label_smoothing=label_smoothing) + to_images
    ) / 2


def info_nce(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    label_smoothing: float = 0.0,
    symmetric: bool = True,
    excluded: Tensor | None = None,
    false: Tensor | None = None,
    false_excluded: Tensor | None = None,
) -> Tensor:
    """InfoNCE ``(CE(scale * S, i) + CE(scale * Sᵀ, i)) / 2`` with S the cosines [B, B]
    (Radford et al. 2021, figure 3).

    Returns a scalar, nats. Row i of ``images`` [B, D] matches row i of ``texts`` [B,
    D]. ``scale`` is the inverse temperature, ``label_smoothing`` the fraction of the
    target that is spread evenly over the batch (0.1 in Long-CLIP's code). Without
    ``symmetric`` only texts pick images, ``CE(scale * Sᵀ, i)`` (SPECS's code).

    Other pairs with the same caption are negatives like any other: where their text
    embeddings are equal, a target that is uniform over them (Khosla et al. 2020; Yang
    et al. 2022) has the same value and gradient. ``excluded`` bool [B, B] leaves pairs
    out of the softmax (``false_negatives``); it cannot be combined with
    ``label_smoothing``, which gives every pair a share of the target.

    ``false`` [F, D] are texts that belong to no image (NegCLIP: Yuksekgonul et al.
    2023). They are further columns of S in the first term: every image has them as
    negatives. ``false_excluded`` bool [B, F], or [F], leaves some out.
    """
    logits = None
    if false is not None:
        logits = scale * cosine_matrix(images, false)
        if false_excluded is not None:
            logits = logits.masked_fill(false_excluded, float("-inf"))
    return cross_entropies(
        scale * cosine_matrix(images, texts),
        label_smoothing,
        symmetric,
        excluded,
        logits,
    )


@torch.no_grad()
def contrastive_metrics(student: Embeddings) -> dict[str, Tensor]:
    """The inverse temperature, and the accuracy in the batch: the fraction of rows
    whose own pair has the highest cosine, mean of both directions. By log key.
    """
    cosines = cosine_matrix(student["image"], student["text"])
    index = torch.arange(len(cosines), device=cosines.device)
    texts_found, images_found = (
        (cosines.argmax(dim=dim) == index).float().mean() for dim in (1, 0)
    )
    return {
        "contrastive/scale": student["scale"],
        "contrastive/accuracy": (texts_found + images_found) / 2,
    }
