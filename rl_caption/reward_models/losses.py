"""Losses of dual encoders: pure functions of the embeddings of the global batch. B pairs, D dimensions.

Embeddings are raw (of any length above 0); cosines normalise them. The first half are losses of tensors, each with its
equation; the second half are the objectives of the tasks: weighted sums of these, with what is logged of each.
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
"""Weight of each distance by the number of towers, as in the L-CLIPScore code: stage 1 averages its two losses; stage 2
averages three (L1, cosine, regulator), and the first two over two towers."""
REGULATOR_WEIGHT = 1 / 30
"""A third as above, times that code's scale of 0.1."""
LARGEST_MARGIN = {"logit": 1.5, "cosine": 0.015}
"""Largest dynamic margin of SPECS's code, in logits; and the same at a scale of 100, where CLIP's ends."""


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

    Other pairs with the same caption are negatives like all: where their text embeddings are equal, a target that is
    uniform over them (Khosla et al. 2020; Yang et al. 2022) has the same value and gradient. ``excluded`` bool [B, B]
    leaves pairs out (``false_negatives``); not together with ``label_smoothing``, which gives every pair a share.

    ``false`` [F, D] are texts that belong to no image, further columns of S (NegCLIP: Yuksekgonul et al. 2023): each
    image has them as negatives, and no text has them. ``false_excluded`` bool [B, F], or [F], leaves some out.
    """
    logits = None
    if false is not None:
        logits = scale * cosine_matrix(images, false)
        if false_excluded is not None:
            logits = logits.masked_fill(false_excluded, float("-inf"))
    return _cross_entropies(scale * cosine_matrix(images, texts), label_smoothing, symmetric, excluded, logits)


def false_negatives(*groups: Tensor) -> Tensor:
    """Pairs i, j of a batch, i not j, that are equal in any of ``groups`` ([B] each); bool [B, B].

    With the images and the captions as groups: caption j is true of image i, or is word for word its caption.
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

    A gap is how far a better text is ahead of a worse one; the margin asks of each to be as far ahead as the mean
    (SPECS, section 3). 0 where no row counts.
    """
    return ((gaps * counts).sum() / counts.sum().clamp(min=1)).detach().clamp(0, largest)


def hinge(gaps: Tensor, counts: Tensor, margin: Tensor | float) -> Tensor:
    """Mean of relu(margin - gap) over the [B] gaps that count (``counts`` 1, else 0); a scalar, 0 where none does.

    With gaps ``s(positive) - s(base)`` it is the positive, with ``s(base) - s(negative)`` the negative term of SPECS
    (section 3).
    """
    return (F.relu(margin - gaps) * counts).sum() / counts.sum().clamp(min=1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over B of 1 - cosine of row i of [B, D] and row i of [B, D]; a scalar in [0, 2]."""
    return (1 - F.cosine_similarity(student, teacher, dim=-1)).mean()


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

    The student's embeddings are [B, D], the teacher's [B, E] of any width E. Texts may be more, [C, D] and [C, E]:
    those after the first B belong to no image. A scalar, 0 and up.
    """
    student = cosine_matrix(student_images, student_texts)
    teacher = cosine_matrix(teacher_images, teacher_texts)
    diagonal = torch.eye(*student.shape, dtype=torch.bool, device=student.device)
    missing = F.relu(teacher - student)[diagonal]
    excess = F.relu(student - teacher)[~diagonal]
    if reduction == "sum":
        return missing.sum() + excess.sum()
    return missing.mean() + excess.sum() / max(excess.numel(), 1)


def contrastive(
    student: Embeddings, target: Embeddings, label_smoothing: float = 0.0, short: float = 0.0, pca_rank: int = 32
) -> tuple[Tensor, dict[str, Tensor]]:
    """``info_nce`` of ``image`` and ``text``, + ``short`` times ``short_info_nce`` of ``text_short``.

    Where ``target`` has ``false`` [B, n], ``text_false0`` to ``text_false{n - 1}`` are hard negatives of the whole
    batch's images. Where it has ``image_group`` and those of the texts, ``text_group`` and so on, [B] each, pairs of
    the same are no negatives: of either term, and of hard negatives those that are word for word an image's caption.
    """
    images, texts, scale = student["image"], student["text"], student["scale"]
    masks = "image_group" in target

    def excluded(name: str) -> Tensor | None:
        return false_negatives(target["image_group"], target[f"{name}_group"]) if masks else None

    false = false_excluded = None
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

    V and T are ``image`` and ``text``. ``image_generated`` V' were generated for the captions T, ``text_generated`` T'
    for the images V: further views of the same pairs. Only other rows are negatives, and V' and T' do not meet. A
    weight of 0 leaves its term out. Nats; terms are logged unweighted.
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
) -> tuple[Tensor, dict[str, Tensor]]:
    """SPECS: a caption with one more true detail scores higher, one with a false detail lower (Chen et al., section 3).

    ``alpha * InfoNCE(image, text) + beta * hinge(s(positive) - s(base)) + gamma * hinge(s(base) - s(negative))`` with s
    the cosine to the image, and a ``dynamic_margin`` of its own for either hinge. Terms are logged unweighted.

    ``student`` has ``image``, ``text``, ``text_base``, ``text_positive``, ``text_negative`` and ``scale``; ``target``
    has ``triplet`` [B]. ``margin_units`` of s: ``logit``, cosines times scale (released code), or ``cosine``;
    ``max_margin`` is in these units, None is ``LARGEST_MARGIN``. ``symmetric`` is that of ``info_nce``.
    """
    counts, scale = target["triplet"], student["scale"]
    factor = scale if margin_units == "logit" else torch.ones_like(scale)
    largest = LARGEST_MARGIN[margin_units] if max_margin is None else max_margin
    base, positive, negative = (
        factor * F.cosine_similarity(student["image"], student[f"text_{name}"], dim=-1)
        for name in ("base", "positive", "negative")
    )
    contrast = info_nce(student["image"], student["text"], scale, symmetric=symmetric)
    loss, metrics = alpha * contrast, _contrastive_metrics(student) | {"specificity/contrastive": contrast}
    for name, weight, gaps in (("positive", beta, positive - base), ("negative", gamma, base - negative)):
        margin = dynamic_margin(gaps, counts, largest)
        term = hinge(gaps, counts, margin)
        loss = loss + weight * term
        metrics[f"specificity/{name}_hinge"] = term
        metrics[f"specificity/{name}_margin"] = margin
        metrics[f"specificity/{name}_rate"] = ((gaps > 0) * counts).sum() / counts.sum().clamp(min=1)
    return loss, metrics


def distillation(
    student: Embeddings,
    teacher: Embeddings,
    towers: tuple[str, ...],
    l1: float,
    cosine: float,
    regulator: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Tensor, dict[str, Tensor]]:
    """L-CLIPScore: ``l1`` |f - f_T| + ``cosine`` (1 - cos(f, f_T)) of each tower, + ``regulator`` Similarity Regulator.

    f and f_T are raw embeddings of student and teacher; |.| is the mean over batch and dimensions. Stage 1 has one
    tower, stage 2 both and the regulator, whose weight of 0 leaves it out. Terms are logged unweighted.

    Where ``teacher`` has ``false`` [B, n], the hard negatives ``text_false0`` to ``text_false{n - 1}`` that count are
    further texts: in the terms of the text tower, and as further columns of the regulator.
    """
    if "false" in teacher:
        counts = teacher["false"].T.flatten() == 1
        student, teacher = (_with_false_texts(own, counts) for own in (student, teacher))
    loss = torch.zeros((), device=student[towers[0]].device)
    metrics: dict[str, Tensor] = {}
    for tower in towers:
        metrics[f"distill/l1_{tower}"] = absolute = F.l1_loss(student[tower], teacher[tower])
        metrics[f"distill/cosine_{tower}"] = angle = cosine_distance(student[tower], teacher[tower])
        loss = loss + l1 * absolute + cosine * angle
    if regulator:
        term = similarity_regulator(student["image"], student["text"], teacher["image"], teacher["text"], reduction)
        loss = loss + regulator * term
        metrics["distill/regulator"] = term
    return loss, metrics


def _with_false_texts(embeddings: Embeddings, counts: Tensor) -> Embeddings:
    """``text`` [B, D] with those of the hard negatives [n B, D] that count after it."""
    columns = [embeddings[f"text_false{n}"] for n in range(len(counts) // len(embeddings["text"]))]
    return {**embeddings, "text": torch.cat([embeddings["text"], torch.cat(columns)[counts]])}
