"""Losses of dual encoders: pure functions of the embeddings of the global batch. B pairs, D
dimensions.

Embeddings are raw, of any length above 0: cosines normalise them. First come the losses of tensors,
each with its equation, then the objectives of the tasks, which are weighted sums of these losses
and name what is logged.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Reduction = Literal["mean", "sum"]
Embeddings: TypeAlias = Mapping[str, Tensor]
"""Raw embeddings [B, D] of the global batch by name, such as ``image`` and ``text``; scalars are
further parameters of the loss, such as ``scale``, the inverse temperature.
"""
Objective: TypeAlias = Callable[[Embeddings, Embeddings], tuple[Tensor, dict[str, Tensor]]]
"""(the model's embeddings, targets) -> scalar loss and what is logged, by key of docs/metrics.md.
Targets are the teacher's embeddings [B, D], ``triplet`` [B] (1 where a row has a triplet, else 0),
or none.
"""


def cosine_matrix(images: Tensor, texts: Tensor) -> Tensor:
    """Cosines [B, C] of every row of [B, D] with every row of [C, D]."""
    return F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T


def _cross_entropies(
    logits: Tensor,
    label_smoothing: float,
    symmetric: bool = True,
    excluded: Tensor | None = None,
    false: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of [B, B] logits (image by text) with the diagonal as target, of columns
    or both ways.

    ``excluded`` bool [B, B], symmetric, False on the diagonal: pairs that are left out of the
    softmax. ``false`` [B, F] are logits of further texts, from which images do not pick.
    """
    if excluded is not None:
        logits = logits.masked_fill(excluded, float("-inf"))
    target = torch.arange(len(logits), device=logits.device)
    to_images = F.cross_entropy(logits.T, target, label_smoothing=label_smoothing)
    if not symmetric:
        return to_images
    texts = logits if false is None else torch.cat([logits, false], dim=1)
    return (F.cross_entropy(texts, target, label_smoothing=label_smoothing) + to_images) / 2


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
    """InfoNCE ``(CE(scale * S, i) + CE(scale * Sᵀ, i)) / 2`` with S the cosines [B, B] (Radford et
    al. 2021, figure 3).

    ``images`` and ``texts`` are [B, D], row i of one matching row i of the other; a scalar, nats.
    ``scale`` is the inverse temperature, ``label_smoothing`` the fraction of the target that is
    spread evenly over the batch (0.1 in Long-CLIP's code). Without ``symmetric`` only texts pick
    images, ``CE(scale * Sᵀ, i)`` (SPECS's code).

    Other pairs with the same caption are negatives like any other: where their text embeddings are
    equal, a target that is uniform over them (Khosla et al. 2020; Yang et al. 2022) has the same
    value and gradient. ``excluded`` bool [B, B] leaves pairs out of the softmax
    (``false_negatives``); it cannot be combined with ``label_smoothing``, which gives every pair a
    share of the target.

    ``false`` [F, D] are texts that belong to no image (NegCLIP: Yuksekgonul et al. 2023). They are
    further columns of S
    in the first term: every image has them as negatives. ``false_excluded`` bool [B, F], or [F],
    leaves some out.
    """
    logits = None
    if false is not None:
        logits = scale * cosine_matrix(images, false)
        if false_excluded is not None:
            logits = logits.masked_fill(false_excluded, float("-inf"))
    return _cross_entropies(
        scale * cosine_matrix(images, texts), label_smoothing, symmetric, excluded, logits
    )


def false_negatives(*groups: Tensor) -> Tensor:
    """Pairs i != j of a batch whose group numbers are equal in any of ``groups`` ([B] each); bool
    [B, B].

    With groups of images and of captions these pairs are no true negatives: caption j was written
    for image i as well, or is word for word the caption of image i.
    """
    same = torch.stack([group[:, None] == group[None] for group in groups]).any(dim=0)
    return same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)


def principal_reconstruction(rows: Tensor, rank: int) -> Tensor:
    """The projection of [B, D] rows on their first ``rank`` principal components, the mean added
    back; [B, D].

    ``(X - m) V Vᵀ + m`` with V the right singular vectors of X - m of the ``rank`` largest singular
    values: the coarse image features that Long-CLIP matches with short captions (Zhang et al. 2024,
    section 3.3). V has no gradient: its derivative has no bound where singular values come close.
    With ``rank`` at least min(B - 1, D), the rows themselves.
    """
    mean = rows.mean(dim=0, keepdim=True)
    centred = rows - mean
    basis = torch.linalg.svd(centred.detach(), full_matrices=False).Vh[:rank]
    return centred @ basis.T @ basis + mean


def short_info_nce(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    rank: int,
    label_smoothing: float = 0.0,
    excluded: Tensor | None = None,
) -> Tensor:
    """``info_nce`` of short captions with the ``principal_reconstruction`` of the normalised images
    (Long-CLIP).

    The reconstruction is not normalised again (Long-CLIP's code): images that it explains less of
    have lower logits.
    """
    coarse = principal_reconstruction(F.normalize(images, dim=-1), rank)
    return _cross_entropies(
        scale * coarse @ F.normalize(texts, dim=-1).T, label_smoothing, excluded=excluded
    )


def dynamic_margin(gaps: Tensor, counts: Tensor, largest: float) -> Tensor:
    """Mean of the [B] gaps that count (``counts`` 1, else 0), clamped to [0, ``largest``] and
    detached; a scalar.

    A gap is the score of the better text less that of the worse one: the margin asks of every row
    the mean gap of the batch (SPECS, section 3). 0 where no row counts.
    """
    return ((gaps * counts).sum() / counts.sum().clamp(min=1)).detach().clamp(0, largest)


def similarity_regulator(
    student_images: Tensor,
    student_texts: Tensor,
    teacher_images: Tensor,
    teacher_texts: Tensor,
    reduction: Reduction = "mean",
) -> Tensor:
    """Similarity Regulator of L-CLIPScore: matching cosines at least the teacher's, all others at
    most the teacher's.

    With S and T the cosine matrices of student and teacher: ``Σᵢ relu(Tᵢᵢ - Sᵢᵢ) + Σᵢⱼ relu(Sᵢⱼ -
    Tᵢⱼ)``, i ≠ j. The L-CLIPScore paper writes sums; its code takes the mean of each of the two
    parts, which gives a negative pair B - 1 times less weight. The code's average over S and Sᵀ is
    the same number.

    The student's embeddings are [B, D], the teacher's [B, E]; E may differ from D. A scalar, at
    least 0.
    """
    student = cosine_matrix(student_images, student_texts)
    teacher = cosine_matrix(teacher_images, teacher_texts)
    diagonal = torch.eye(*student.shape, dtype=torch.bool, device=student.device)
    missing = F.relu(teacher - student)[diagonal]
    excess = F.relu(student - teacher)[~diagonal]
    if reduction == "sum":
        return missing.sum() + excess.sum()
    return missing.mean() + excess.sum() / max(excess.numel(), 1)


@torch.no_grad()
def contrastive_metrics(student: Embeddings) -> dict[str, Tensor]:
    """The inverse temperature, and the fraction of the batch whose pair has the highest cosine,
    mean of both ways.
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
