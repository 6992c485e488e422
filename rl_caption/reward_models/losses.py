"""Losses of dual encoders: pure functions of the embeddings of the global batch. B pairs, D dimensions.

Embeddings are raw, of any length above 0: cosines normalise them. First come the losses of tensors, each with its
equation, then the objectives of the tasks, which are weighted sums of these losses and name what is logged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

Reduction = Literal["mean", "sum"]
Embeddings: TypeAlias = Mapping[str, Tensor]
"""Raw embeddings [B, D] of the global batch by name, such as ``image`` and ``text``; scalars are further parameters of
the loss, such as ``scale``, the inverse temperature."""
Objective: TypeAlias = Callable[[Embeddings, Embeddings], tuple[Tensor, dict[str, Tensor]]]
"""(the model's embeddings, targets) -> scalar loss and what is logged, by key of docs/metrics.md. Targets are the
teacher's embeddings [B, D], ``triplet`` [B] (1 where a row has a triplet, else 0), or none."""

TOWER_WEIGHT = {1: 1 / 2, 2: 1 / 6}
"""Number of towers -> weight of the L1 and of the cosine distance of each tower, as in the L-CLIPScore code: stage 1
averages these two losses; stage 2 averages three (L1, cosine, regulator), and the first two over both towers."""
REGULATOR_WEIGHT = 1 / 30
"""In stage 2: one of the three losses that are averaged, times 0.1, which that code scales it by."""
LARGEST_MARGIN = {"logit": 1.5, "cosine": 0.015}
"""Largest dynamic margin: SPECS's code has 1.5 logits, which are a cosine of 0.015 at CLIP's largest scale, 100."""


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
    """Mean cross-entropy of [B, B] logits (image by text) with the diagonal as target, of columns or both ways.

    ``excluded`` bool [B, B], symmetric, False on the diagonal: pairs that are left out of the softmax. ``false``
    [B, F] are logits of further texts, from which images do not pick.
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
    """InfoNCE ``(CE(scale * S, i) + CE(scale * Sᵀ, i)) / 2`` with S the cosines [B, B] (Radford et al. 2021, figure 3).

    ``images`` and ``texts`` are [B, D], row i of one matching row i of the other; a scalar, nats. ``scale`` is the
    inverse temperature, ``label_smoothing`` the fraction of the target that is spread evenly over the batch (0.1 in
    Long-CLIP's code). Without ``symmetric`` only texts pick images, ``CE(scale * Sᵀ, i)`` (SPECS's code).

    Other pairs with the same caption are negatives like any other: where their text embeddings are equal, a target that
    is uniform over them (Khosla et al. 2020; Yang et al. 2022) has the same value and gradient. ``excluded`` bool
    [B, B] leaves pairs out of the softmax (``false_negatives``); it cannot be combined with ``label_smoothing``, which
    gives every pair a share of the target.

    ``false`` [F, D] are texts that belong to no image (NegCLIP: Yuksekgonul et al. 2023). They are further columns of S
    in the first term: every image has them as negatives. ``false_excluded`` bool [B, F], or [F], leaves some out.
    """
    logits = None
    if false is not None:
        logits = scale * cosine_matrix(images, false)
        if false_excluded is not None:
            logits = logits.masked_fill(false_excluded, float("-inf"))
    return _cross_entropies(scale * cosine_matrix(images, texts), label_smoothing, symmetric, excluded, logits)


def false_negatives(*groups: Tensor) -> Tensor:
    """Pairs i != j of a batch whose group numbers are equal in any of ``groups`` ([B] each); bool [B, B].

    With groups of images and of captions these pairs are no true negatives: caption j was written for image i as well,
    or is word for word the caption of image i.
    """
    same = torch.stack([group[:, None] == group[None] for group in groups]).any(dim=0)
    return same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)


def principal_reconstruction(rows: Tensor, rank: int) -> Tensor:
    """The projection of [B, D] rows on their first ``rank`` principal components, the mean added back; [B, D].

    ``(X - m) V Vᵀ + m`` with V the right singular vectors of X - m of the ``rank`` largest singular values: the coarse
    image features that Long-CLIP matches with short captions (Zhang et al. 2024, section 3.3). V has no gradient: its
    derivative has no bound where singular values come close. With ``rank`` at least min(B - 1, D), the rows themselves.
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
    """``info_nce`` of short captions with the ``principal_reconstruction`` of the normalised images (Long-CLIP).

    The reconstruction is not normalised again (Long-CLIP's code): images that it explains less of have lower logits.
    """
    coarse = principal_reconstruction(F.normalize(images, dim=-1), rank)
    return _cross_entropies(scale * coarse @ F.normalize(texts, dim=-1).T, label_smoothing, excluded=excluded)


def dynamic_margin(gaps: Tensor, counts: Tensor, largest: float) -> Tensor:
    """Mean of the [B] gaps that count (``counts`` 1, else 0), clamped to [0, ``largest``] and detached; a scalar.

    A gap is the score of the better text less that of the worse one: the margin asks of every row the mean gap of the
    batch (SPECS, section 3). 0 where no row counts.
    """
    return ((gaps * counts).sum() / counts.sum().clamp(min=1)).detach().clamp(0, largest)


def similarity_regulator(
    student_images: Tensor,
    student_texts: Tensor,
    teacher_images: Tensor,
    teacher_texts: Tensor,
    reduction: Reduction = "mean",
) -> Tensor:
    """Similarity Regulator of L-CLIPScore: matching cosines at least the teacher's, all others at most the teacher's.

    With S and T the cosine matrices of student and teacher: ``Σᵢ relu(Tᵢᵢ - Sᵢᵢ) + Σᵢⱼ relu(Sᵢⱼ - Tᵢⱼ)``, i ≠ j. The
    L-CLIPScore paper writes sums; its code takes the mean of each of the two parts, which gives a negative pair B - 1
    times less weight. The code's average over S and Sᵀ is the same number.

    The student's embeddings are [B, D], the teacher's [B, E]; E may differ from D. There may be more texts than images,
    [C, D] and [C, E]: those after the first B belong to no image. A scalar, at least 0.
    """
    student = cosine_matrix(student_images, student_texts)
    teacher = cosine_matrix(teacher_images, teacher_texts)
    diagonal = torch.eye(*student.shape, dtype=torch.bool, device=student.device)
    missing = F.relu(teacher - student)[diagonal]
    excess = F.relu(student - teacher)[~diagonal]
    if reduction == "sum":
        return missing.sum() + excess.sum()
    return missing.mean() + excess.sum() / max(excess.numel(), 1)


def hard_negative_loss(images: Tensor, texts: Tensor, false: Sequence[Tensor], counts: Tensor, scale: float) -> Tensor:
    """``CE(scale * [cos(Iᵢ, Tᵢ), cos(Iᵢ, Fᵢ₁), ...], 0)``: an image picks its caption among its own false ones alone.

    Unlike the softmax over the batch, in which a true caption and its edits are alike and all compete with what other
    images show, nothing but the edit can lower it. ``images``, ``texts`` and each of the n ``false`` are [B, D];
    ``counts`` [B, n] is 1 where a false caption is one, else 0. The mean over the rows that have any, a scalar, nats;
    0 where no row has.

    Source: the global hard negative loss of Oh et al., EMNLP 2024 (FSC-CLIP); there ``scale`` is CLIP's own.
    """
    cosines = torch.stack([F.cosine_similarity(images, column, dim=-1) for column in (texts, *false)], dim=1)
    missing = F.pad(counts == 0, (1, 0))
    target = torch.zeros(len(images), dtype=torch.long, device=images.device)
    losses = F.cross_entropy((scale * cosines).masked_fill(missing, float("-inf")), target, reduction="none")
    return losses.sum() / (counts > 0).any(dim=1).sum().clamp(min=1)


def contrastive(
    student: Embeddings,
    target: Embeddings,
    label_smoothing: float = 0.0,
    short: float = 0.0,
    pca_rank: int = 32,
    hard: float = 0.0,
    hard_scale: float = 50.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``info_nce`` of ``image`` and ``text``, + ``short`` times ``short_info_nce`` of ``text_short``.

    Where ``target`` has ``false`` [B, n], the texts ``text_false0`` to ``text_false{n - 1}`` are hard negatives of all
    images of the batch, and ``hard`` times ``hard_negative_loss`` is added. Where it has the group numbers
    ``image_group``, ``text_group`` and so on, [B] each, pairs of the same group are no negatives in either of the first
    two terms, nor is a hard negative that is word for word an image's caption.
    """
    images, texts, scale = student["image"], student["text"], student["scale"]
    masks = "image_group" in target

    def excluded(name: str) -> Tensor | None:
        return false_negatives(target["image_group"], target[f"{name}_group"]) if masks else None

    false = false_excluded = None
    columns: list[Tensor] = []
    metrics = _contrastive_metrics(student)
    if "false" in target:
        names = [f"text_false{n}" for n in range(target["false"].shape[1])]
        columns = [student[name] for name in names]
        false, false_excluded = torch.cat(columns), target["false"].T.flatten() == 0
        if masks:
            groups = torch.cat([target[f"{name}_group"] for name in names])
            false_excluded = false_excluded | (target["text_group"][:, None] == groups)
        metrics["contrastive/hard_negatives"] = _above_false(student, columns, target["false"])
    loss = info_nce(
        images, texts, scale, label_smoothing, excluded=excluded("text"), false=false, false_excluded=false_excluded
    )
    if hard and "false" in target:
        term = hard_negative_loss(images, texts, columns, target["false"], hard_scale)
        loss, metrics = loss + hard * term, metrics | {"contrastive/hard": term}
    if short:
        term = short_info_nce(images, student["text_short"], scale, pca_rank, label_smoothing, excluded("text_short"))
        loss, metrics = loss + short * term, metrics | {"contrastive/short": term}
    return loss, metrics


@torch.no_grad()
def _above_false(student: Embeddings, columns: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Fraction of hard negatives whose cosine to their image is below that of its caption."""
    images, true = student["image"], F.cosine_similarity(student["image"], student["text"], dim=-1)
    right = torch.stack([true > F.cosine_similarity(images, column, dim=-1) for column in columns], dim=1)
    return (right * counts).sum() / counts.sum().clamp(min=1)


@torch.no_grad()
def _contrastive_metrics(student: Embeddings) -> dict[str, Tensor]:
    cosines = cosine_matrix(student["image"], student["text"])
    index = torch.arange(len(cosines), device=cosines.device)
    texts_found, images_found = ((cosines.argmax(dim=dim) == index).float().mean() for dim in (1, 0))
    return {"contrastive/scale": student["scale"], "contrastive/accuracy": (texts_found + images_found) / 2}


def positive_augmented(
    student: Embeddings, target: Embeddings, positive_images: float = 0.05, positive_captions: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """PAC-S: ``l(V, T) + λv l(V', T) + λt l(V, T')``, l = 2 ``info_nce`` (Sarto et al., CVPR 2023, section 3.1).

    V and T are ``image`` and ``text``; V' (``image_generated``) was generated for the captions T, and T'
    (``text_generated``) for the images V. Negatives are the other rows of the batch; V' and T' are not compared with
    each other. A weight of 0 leaves its term out. Nats; terms are logged unweighted.
    """
    images, texts, scale = student["image"], student["text"], student["scale"]
    loss = 2 * info_nce(images, texts, scale)
    metrics = _contrastive_metrics(student) | {"positive/pairs": loss}
    if positive_images:
        metrics["positive/images"] = 2 * info_nce(student["image_generated"], texts, scale)
        loss = loss + positive_images * metrics["positive/images"]
    if positive_captions:
        metrics["positive/captions"] = 2 * info_nce(images, student["text_generated"], scale)
        loss = loss + positive_captions * metrics["positive/captions"]
    return loss, metrics


def specificity(
    student: Embeddings,
    target: Embeddings,
    alpha: float = 1.0,
    beta: float = 8.0,
    gamma: float = 0.8,
    margin_units: Literal["logit", "cosine"] = "logit",
    max_margin: float | None = None,
    symmetric: bool = False,
    fixed_margin: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SPECS: a caption with one more true detail scores higher, one with a false detail lower (Chen et al., section 3).

    ``alpha * InfoNCE(image, text) + beta * hinge(s(positive) - s(base)) + gamma * hinge(s(base) - s(negative))`` with s
    the cosine to the image. ``hinge(gaps)`` is the mean of relu(margin - gap) over the rows with a triplet, 0 where no
    row has one; each of the two has its own ``dynamic_margin``, or both have ``fixed_margin`` (the paper's Table 5).
    Terms are logged unweighted.

    ``student`` has ``image``, ``text``, ``text_base``, ``text_positive``, ``text_negative`` and ``scale``; ``target``
    has ``triplet`` [B]. ``margin_units`` of s: ``logit``, cosines times scale (released code), or ``cosine``;
    ``max_margin`` is in these units, None is ``LARGEST_MARGIN``. ``symmetric`` is that of ``info_nce``.
    """
    counts, scale = target["triplet"], student["scale"]
    counted = counts.sum().clamp(min=1)
    factor = scale if margin_units == "logit" else torch.ones_like(scale)
    largest = LARGEST_MARGIN[margin_units] if max_margin is None else max_margin
    base, positive, negative = (
        factor * F.cosine_similarity(student["image"], student[f"text_{name}"], dim=-1)
        for name in ("base", "positive", "negative")
    )
    contrast = info_nce(student["image"], student["text"], scale, symmetric=symmetric)
    loss, metrics = alpha * contrast, _contrastive_metrics(student) | {"specificity/contrastive": contrast}
    for name, weight, gaps in (("positive", beta, positive - base), ("negative", gamma, base - negative)):
        margin = dynamic_margin(gaps, counts, largest) if fixed_margin is None else gaps.new_tensor(fixed_margin)
        term = (F.relu(margin - gaps) * counts).sum() / counted
        loss = loss + weight * term
        metrics[f"specificity/{name}_hinge"] = term
        metrics[f"specificity/{name}_margin"] = margin
        metrics[f"specificity/{name}_rate"] = ((gaps > 0) * counts).sum() / counted
    return loss, metrics


def distillation(
    student: Embeddings,
    teacher: Embeddings,
    towers: tuple[str, ...],
    l1: float,
    cosine: float,
    regulator: float = 0.0,
    reduction: Reduction = "mean",
    hard: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L-CLIPScore: ``l1`` |f - f_T| + ``cosine`` (1 - cos(f, f_T)) of each tower, + ``regulator`` Similarity Regulator.

    f and f_T are raw embeddings of student and teacher; |.| is the mean over batch and dimensions. Stage 1 has one
    tower, stage 2 both and the regulator, whose weight of 0 leaves it out. Terms are logged unweighted.

    Where ``teacher`` has ``false`` [B, n], those of the hard negatives ``text_false0`` to ``text_false{n - 1}`` that it
    marks with 1 are further texts, in the terms of the text tower and as columns of the regulator. ``hard`` is the
    weight of ``directional_loss`` on them, which the paper does not have.
    """
    edits = directional_loss(student, teacher, teacher["false"]) if hard else None
    if "false" in teacher:
        counts = teacher["false"].T.flatten() == 1
        student, teacher = (_with_false_texts(own, counts) for own in (student, teacher))
    loss = torch.zeros((), device=student[towers[0]].device)
    metrics: dict[str, Tensor] = {}
    if edits is not None:
        metrics["distill/hard"] = edits
        loss = loss + hard * edits
    for tower in towers:
        metrics[f"distill/l1_{tower}"] = absolute = F.l1_loss(student[tower], teacher[tower])
        angle = (1 - F.cosine_similarity(student[tower], teacher[tower], dim=-1)).mean()
        metrics[f"distill/cosine_{tower}"] = angle
        loss = loss + l1 * absolute + cosine * angle
    if regulator:
        term = similarity_regulator(student["image"], student["text"], teacher["image"], teacher["text"], reduction)
        loss = loss + regulator * term
        metrics["distill/regulator"] = term
    return loss, metrics


def directional_loss(student: Embeddings, teacher: Embeddings, counts: Tensor) -> Tensor:
    """Mean 1 - cos(d, d_T), in [0, 2], over the hard negatives that ``counts`` [B, n] marks with 1; 0 without any.

    d and d_T are raw embeddings of ``text`` less those of ``text_false0`` to ``text_false{n - 1}``. What an edit
    changes is a small part of an embedding, which the distance of whole embeddings hardly sees. The name is that of the
    loss between pairs of images and of texts in StyleGAN-NADA (Gal et al. 2022).
    """
    names = [f"text_false{n}" for n in range(counts.shape[1])]
    own, wanted = (torch.stack([side["text"] - side[name] for name in names], dim=1) for side in (student, teacher))
    distances = 1 - F.cosine_similarity(own, wanted, dim=-1)
    return (distances * counts).sum() / counts.sum().clamp(min=1)


def _with_false_texts(embeddings: Embeddings, counts: Tensor) -> Embeddings:
    """``text`` [B, D] with those of the hard negatives [n B, D] that count after it."""
    columns = [embeddings[f"text_false{n}"] for n in range(len(counts) // len(embeddings["text"]))]
    return {**embeddings, "text": torch.cat([embeddings["text"], torch.cat(columns)[counts]])}
