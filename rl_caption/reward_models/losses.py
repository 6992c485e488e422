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


def info_nce(
    images: Tensor, texts: Tensor, scale: Tensor | float, label_smoothing: float = 0.0, symmetric: bool = True
) -> Tensor:
    """Cross-entropy of picking the own text of an image, and the own image of a text, among the batch.

    ``(CE(scale * S, i) + CE(scale * Sᵀ, i)) / 2`` with S the cosines (Radford et al. 2021, CLIP, figure 3). Other pairs
    whose caption is the same need no care: where their text embeddings are equal, a target that is uniform over them
    (Khosla et al. 2020; Yang et al. 2022) has the same value and gradient.

    Args:
        images: [B, D].
        texts: [B, D], row i belongs to image i.
        scale: factor of the cosines, the inverse of the temperature.
        label_smoothing: share of the target that is spread evenly over the batch (Long-CLIP's code: 0.1).
        symmetric: both directions; False takes only texts that pick images, ``CE(scale * Sᵀ, i)`` (SPECS's code).

    Returns:
        Scalar, nats, 0 and up; at least the mean over the pairs of ln m, m being how many have the same text embedding.
    """
    return _cross_entropies(scale * cosine_matrix(images, texts), label_smoothing, symmetric)


def summed_info_nce(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """``CE(scale * S, i) + CE(scale * Sᵀ, i)``, both directions of ``info_nce`` without the half; a scalar, nats."""
    return 2 * info_nce(images, texts, scale)


def positive_augmented_info_nce(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    positive_images: tuple[float, Tensor] | None = None,
    positive_texts: tuple[float, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``l(V, T) + λv l(V', T) + λt l(V, T')`` with l the ``summed_info_nce`` (Sarto et al., CVPR 2023, section 3.1).

    Images V' were generated for the captions T, captions T' for the images V: further views of the same pairs. Only
    other rows are negatives, and V' and T' do not meet.

    Args:
        images, texts: V and T, [B, D].
        scale: factor of the cosines.
        positive_images: λv (0.05 in the paper) and V', [B, D], row i belonging to text i; None leaves the term out.
        positive_texts: λt (0.1 in the paper) and T', [B, D], row i belonging to image i; None leaves the term out.

    Returns:
        Scalar, nats, 0 and up; and its terms before their weights: ``pairs``, ``images`` and ``captions``.
    """
    loss = summed_info_nce(images, texts, scale)
    terms = {"pairs": loss}
    if positive_images is not None:
        weight, generated = positive_images
        terms["images"] = summed_info_nce(generated, texts, scale)
        loss = loss + weight * terms["images"]
    if positive_texts is not None:
        weight, generated = positive_texts
        terms["captions"] = summed_info_nce(images, generated, scale)
        loss = loss + weight * terms["captions"]
    return loss, terms


def _cross_entropies(logits: Tensor, label_smoothing: float, symmetric: bool = True) -> Tensor:
    own = torch.arange(len(logits), device=logits.device)
    to_images = F.cross_entropy(logits.T, own, label_smoothing=label_smoothing)
    if not symmetric:
        return to_images
    return (F.cross_entropy(logits, own, label_smoothing=label_smoothing) + to_images) / 2


def principal_reconstruction(rows: Tensor, rank: int) -> Tensor:
    """What the first ``rank`` principal components of [B, D] rows tell of them, the mean included; [B, D].

    ``(X - m) V Vᵀ + m`` with V the right singular vectors of X - m of the ``rank`` largest singular values: the coarse
    image features that Long-CLIP matches with short captions (Zhang et al. 2024, section 3.3). V has no gradient: its
    derivative has no bound where singular values come close. With ``rank`` at least min(B - 1, D), the rows themselves.
    """
    mean = rows.mean(dim=0, keepdim=True)
    centred = rows - mean
    basis = torch.linalg.svd(centred.detach(), full_matrices=False).Vh[:rank]
    return centred @ basis.T @ basis + mean


def short_info_nce(
    images: Tensor, texts: Tensor, scale: Tensor | float, rank: int, label_smoothing: float = 0.0
) -> Tensor:
    """``info_nce`` of short captions with the ``principal_reconstruction`` of the images, both of length 1 before it.

    The reconstruction is not brought back to length 1 (Long-CLIP's code): images that the components tell less of have
    lower logits. Arguments as for ``info_nce``; a scalar, nats.
    """
    coarse = principal_reconstruction(F.normalize(images, dim=-1), rank)
    return _cross_entropies(scale * coarse @ F.normalize(texts, dim=-1).T, label_smoothing)


def dynamic_margin(gaps: Tensor, counts: Tensor, largest: float) -> Tensor:
    """Mean of the [B] gaps that count, within [0, ``largest``], without gradient; a scalar.

    Gaps are what a better text is ahead by; the margin asks of each to be as far ahead as the mean (SPECS, section 3:
    the dynamic margin, detached and clamped).

    Args:
        gaps: [B].
        counts: [B], 1 where a row counts, else 0; where none does, the margin is 0.
        largest: in the unit of the gaps.
    """
    return ((gaps * counts).sum() / counts.sum().clamp(min=1)).detach().clamp(0, largest)


def hinge(gaps: Tensor, counts: Tensor, margin: Tensor | float) -> Tensor:
    """Mean of relu(margin - gap) over the [B] gaps that count (``counts`` 1, else 0); a scalar, 0 where none does.

    With gaps ``s(positive) - s(base)`` it is the positive, with ``s(base) - s(negative)`` the negative term of SPECS
    (section 3).
    """
    return (F.relu(margin - gaps) * counts).sum() / counts.sum().clamp(min=1)


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
