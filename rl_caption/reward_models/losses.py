"""Losses of embedding models: pure functions of the embeddings of a whole global batch.

B pairs, D dimensions. Embeddings are raw (of any length above 0); cosines normalise them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Reduction = Literal["mean", "sum"]


def cosine_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """Cosines [B, C] of every row of [B, D] with every row of [C, D]."""
    return F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T


def matches(size: int, keys: Tensor | None, device: torch.device) -> Tensor:
    """Which pairs of image i and text j are right, [B, B] bool: i = j or, with integer ``keys`` [B], equal keys."""
    if keys is None:
        return torch.eye(size, dtype=torch.bool, device=device)
    return keys[:, None] == keys[None, :]


def info_nce(images: Tensor, texts: Tensor, scale: Tensor | float, keys: Tensor | None = None) -> Tensor:
    """Symmetric cross-entropy of picking a right text of an image, and a right image of a text, among the batch.

    ``(CE(scale * S, Q) + CE(scale * Sᵀ, Q)) / 2`` with S the cosines and row i of Q uniform over the pairs that match
    pair i. Without ``keys`` that is i alone (Radford et al. 2021, CLIP, figure 3); with them, all pairs of the same
    key: the mean over positives outside the logarithm of Khosla et al. 2020 (SupCon, equation 2), in both directions
    as in Yang et al. 2022 (UniCL). Both have the same value and gradient where pairs of one key have one and the same
    text embedding: the sum over them is the same.

    Args:
        images: [B, D].
        texts: [B, D], row i belongs to image i.
        scale: factor of the cosines, the inverse of the temperature.
        keys: [B], integers; equal where the captions are.

    Returns:
        Scalar, nats; at least the mean of ln(number of equal keys) over the pairs.
    """
    logits = scale * cosine_matrix(images, texts)
    right = matches(len(logits), keys, logits.device).to(logits.dtype)
    wanted = right / right.sum(dim=1, keepdim=True)
    return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2


def l1_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean absolute difference of [B, D] and [B, D] over batch and dimensions; a scalar, 0 and up."""
    return (student - teacher).abs().mean()


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over B of 1 - cosine of row i of [B, D] and row i of [B, D]; a scalar in [0, 2]."""
    return (1 - F.cosine_similarity(student, teacher, dim=-1)).mean()


def embedding_distance(student: Tensor, teacher: Tensor, l1_weight: float = 0.5, cosine_weight: float = 0.5) -> Tensor:
    """Weighted sum of ``l1_distance`` and ``cosine_distance`` of raw embeddings [B, D].

    Source: the first distillation stage of L-CLIP; its released code gives each of the two terms one half.
    """
    return l1_weight * l1_distance(student, teacher) + cosine_weight * cosine_distance(student, teacher)


def similarity_regulator(
    student_images: Tensor,
    student_texts: Tensor,
    teacher_images: Tensor,
    teacher_texts: Tensor,
    reduction: Reduction = "mean",
) -> Tensor:
    """Keep the student's cosines of own pairs at least as high, and of other pairs at most as high, as the teacher's.

    With S and T the cosine matrices of student and teacher: ``Σᵢ relu(Tᵢᵢ - Sᵢᵢ) + Σᵢⱼ relu(Sᵢⱼ - Tᵢⱼ)``, i ≠ j. The
    L-CLIPScore paper writes sums; its code takes the mean of each of the two parts, which gives a negative pair B - 1
    times less weight. The code's average over S and Sᵀ is the same number.

    Args:
        student_images, student_texts: [B, D].
        teacher_images, teacher_texts: [B, E], any width E.
        reduction: ``mean`` (code) or ``sum`` (paper).

    Returns:
        Scalar, 0 and up; the second part is 0 where B is 1.
    """
    student = cosine_matrix(student_images, student_texts)
    teacher = cosine_matrix(teacher_images, teacher_texts)
    own = torch.eye(len(student), dtype=torch.bool, device=student.device)
    missing = F.relu(teacher - student)[own]
    excess = F.relu(student - teacher)[~own]
    if reduction == "sum":
        return missing.sum() + excess.sum()
    return missing.mean() + excess.sum() / max(excess.numel(), 1)
