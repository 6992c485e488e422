"""The task ``contrastive``: InfoNCE on image-caption pairs, with hard negatives, and
Long-CLIP's short captions.

Sources: Radford et al. 2021 (CLIP); Yuksekgonul et al. 2023 (NegCLIP); Zhang et al.
2024 (Long-CLIP). docs/reward_models.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor
from torch.nn import functional as F

from rl_caption.data.base import DataError, Row
from rl_caption.data.loader import row_generator
from rl_caption.data.negatives import NEGATIVES, NegativeSource
from rl_caption.reward_models.batch import Addition, draw
from rl_caption.reward_models.clip_models import (
    BestByConfig,
    ClipConfig,
    ClipLossConfig,
    ClipTrainConfig,
    train_embeddings,
)
from rl_caption.reward_models.losses import (
    Embeddings,
    Objective,
    contrastive_metrics,
    cross_entropies,
    info_nce,
)
from rl_caption.runtime.errors import ConfigError, errors_of_user_code, naming
from rl_caption.runtime.options import (
    Probability,
    Section,
    check_type,
    load_target,
)
from rl_caption.runtime.types import TrainState
from rl_caption.training.run import Run


def contrastive(
    student: Embeddings,
    target: Embeddings,
    label_smoothing: float = 0.0,
    short: float = 0.0,
    pca_rank: int = 32,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``info_nce`` of ``image`` and ``text``, + ``short`` times ``short_info_nce`` of
    ``text_short``.

    Where ``target`` has ``false`` [B, n], the texts ``text_false0`` to ``text_false{n -
    1}`` are hard negatives of all images of the batch. Where it has the group numbers
    ``image_group``, ``text_group`` and so on, [B] each, pairs of the same group are no
    negatives in either term, nor is a hard negative that is word for word an image's
    caption.
    """
    images = student["image"]
    texts = student["text"]
    scale = student["scale"]
    masks = "image_group" in target
    excluded: dict[str, Tensor] = {}
    for name in ("text", "text_short") if masks else ():
        if name in student:
            groups = target["image_group"], target[f"{name}_group"]
            excluded[name] = false_negatives(*groups)
    false = false_excluded = None
    metrics = contrastive_metrics(student)
    if "false" in target:
        names = [f"text_false{n}" for n in range(target["false"].shape[1])]
        columns = [student[name] for name in names]
        false = torch.cat(columns)
        false_excluded = target["false"].T.flatten() == 0
        if masks:
            others = torch.cat([target[f"{name}_group"] for name in names])
            false_excluded = false_excluded | (target["text_group"][:, None] == others)
        metrics["contrastive/hard_negatives"] = _above_false(
            student, columns, target["false"]
        )
    loss = info_nce(
        images,
        texts,
        scale,
        label_smoothing,
        excluded=excluded.get("text"),
        false=false,
        false_excluded=false_excluded,
    )
    if short:
        term = short_info_nce(
            images,
            student["text_short"],
            scale,
            pca_rank,
            label_smoothing,
            excluded.get("text_short"),
        )
        loss = loss + short * term
        metrics = metrics | {"contrastive/short": term}
    return loss, metrics


@torch.no_grad()
def _above_false(
    student: Embeddings, columns: Sequence[Tensor], counts: Tensor
) -> Tensor:
    """Fraction of hard negatives with a lower cosine to their image than its caption."""
    images = student["image"]
    true = F.cosine_similarity(images, student["text"], dim=-1)
    right = [true > F.cosine_similarity(images, column, dim=-1) for column in columns]
    return (torch.stack(right, 1) * counts).sum() / counts.sum().clamp(min=1)


def short_info_nce(
    images: Tensor,
    texts: Tensor,
    scale: Tensor | float,
    rank: int,
    label_smoothing: float = 0.0,
    excluded: Tensor | None = None,
) -> Tensor:
    """``info_nce`` of short captions with the ``principal_reconstruction`` of the
    normalised images (Long-CLIP).

    The reconstruction is not normalised again (Long-CLIP's code): images that it
    explains less of have lower logits.
    """
    coarse = principal_reconstruction(F.normalize(images, dim=-1), rank)
    return cross_entropies(
        scale * coarse @ F.normalize(texts, dim=-1).T,
        label_smoothing,
        excluded=excluded,
    )


def principal_reconstruction(rows: Tensor, rank: int) -> Tensor:
    """The projection of [B, D] rows on their first ``rank`` principal components, the
    mean added back; [B, D].

    ``(X - m) V Vᵀ + m`` with V the right singular vectors of X - m of the ``rank``
    largest singular values: the coarse image features that Long-CLIP matches with short
    captions (Zhang et al. 2024, section 3.3). V has no gradient: its derivative has no
    bound where singular values come close. With ``rank`` at least min(B - 1, D), the
    rows themselves.
    """
    mean = rows.mean(dim=0, keepdim=True)
    centred = rows - mean
    basis = torch.linalg.svd(centred.detach(), full_matrices=False).Vh[:rank]
    return centred @ basis.T @ basis + mean


def false_negatives(*groups: Tensor) -> Tensor:
    """Pairs i != j of a batch whose group numbers are equal in any of ``groups`` ([B]
    each); bool [B, B].

    With groups of images and of captions these pairs are no true negatives: caption j
    was written for image i as well, or is word for word the caption of image i.
    """
    same = torch.stack([group[:, None] == group[None] for group in groups]).any(dim=0)
    return same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)


ShortSource = Literal["first_sentence", "references"]
NumSentences = Annotated[int, Field(ge=1, le=1000)]


class NegativesConfig(Section):
    """Hard negatives: false captions of an image, in addition to the captions of other
    images of the batch (NegCLIP).
    """

    count: Annotated[int, Field(ge=0, le=64)] = 0
    """Hard negatives per caption; 0 uses none."""
    source: str = "data"
    """``data`` (the column ``negatives``), ``scenes`` (exact, of generated scenes), or
    ``package.module:Class`` of a ``NegativeSource``.
    """
    kwargs: dict = {}
    """Options of the source, of ``scenes`` such as ``{kinds: [replace_relation]}``."""


class ContrastiveLossConfig(ClipLossConfig):
    """The contrastive loss."""

    false_negatives: Literal["keep", "mask"] = "keep"
    """``mask`` removes false negatives from the softmax: other pairs of the same image
    or the same caption, and hard negatives that are captions of the image. ``keep``
    keeps them, as CLIP does.
    """
    short: NonNegativeFloat = 0.0
    """Weight of Long-CLIP's second term, between short captions and the principal
    components of the images; 0 leaves it out, 1 in Long-CLIP.
    """
    pca_rank: PositiveInt = 32
    """Number of principal components."""


class ContrastiveTrainConfig(ClipTrainConfig):
    """Contrastive training."""

    label_smoothing: Probability = 0.0
    """Fraction of the target that is spread evenly over the batch; 0.1 in Long-CLIP's code."""
    short_captions: ShortSource = "first_sentence"
    """With ``loss.short``: the short caption is the ``first_sentence`` of the caption
    (Long-CLIP), or a random one of the image's short ``references`` (with
    ``data.long_captions``).
    """
    sentences: Annotated[
        list[NumSentences] | None, Field(min_length=2, max_length=2)
    ] = None
    """``[min, max]`` number of sentences of each caption to use, chosen at random at
    every step, in their order; null uses whole captions.
    """


class ContrastiveConfig(ClipConfig):
    """``reward_model --task contrastive``: an open_clip model or a dual encoder, by InfoNCE."""

    task: Literal["contrastive"] = "contrastive"
    loss: ContrastiveLossConfig = ContrastiveLossConfig()
    negatives: NegativesConfig = NegativesConfig()
    """Hard negatives."""
    train: ContrastiveTrainConfig = ContrastiveTrainConfig()
    eval: BestByConfig = BestByConfig()

    @model_validator(mode="after")
    def _check_contrastive(self) -> Self:
        loss = self.loss
        train = self.train
        count = self.negatives.count
        if train.label_smoothing and (count or loss.false_negatives == "mask"):
            raise ConfigError(
                "train.label_smoothing gives a share of the target to every pair, also to hard "
                "negatives and to pairs that loss.false_negatives masks: leave it out"
            )
        if count and self.negatives.source == "data" and train.sentences:
            raise ConfigError(
                "train.sentences changes the captions that negatives.source data was made of: "
                "leave one of them out"
            )
        return self

    def objective(self) -> Objective:
        """``contrastive`` with the weights of this configuration."""
        loss = self.loss
        return partial(
            contrastive,
            label_smoothing=self.train.label_smoothing,
            short=loss.short,
            pca_rank=loss.pca_rank,
        )

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        loss = self.loss
        train = self.train
        negatives = self.negatives
        model = self.build_model(run.accelerator.num_processes)
        rows = run.train_rows
        bare = [row["image_id"] for row in rows if not row.get("short_references")]
        if loss.short and train.short_captions == "references" and bare:
            raise DataError(
                f"{len(bare)} of {len(rows)} training images have no references besides the long "
                f"one (first: {bare[0]!r}), which train.short_captions references needs: set "
                f"data.long_captions, or take first_sentence"
            )
        additions: list[Any] = []
        if loss.short:
            additions.append(
                partial(
                    add_short_captions, source=train.short_captions, seed=train.seed
                )
            )
        hard = None
        if negatives.count:
            source = caption_source(negatives.source, negatives.kwargs, rows)
            hard = HardNegatives(source, negatives.count, train.seed)
            additions.append(hard)
        opposed = validation_negatives(hard, run.val_rows)
        return train_embeddings(
            run,
            self,
            model,
            sentences=train.sentences,
            additions=additions,
            groups=loss.false_negatives == "mask",
            validated={"negatives": opposed},
        )


def add_short_captions(
    items: Sequence[tuple[Row, int]],
    captions: list[str],
    source: ShortSource,
    seed: int,
) -> Addition:
    """Add the text ``text_short`` to a batch, for Long-CLIP's second term: a pure
    function of (seed, step, image id).

    ``first_sentence`` is the caption up to the first full stop before a space or line
    end (Long-CLIP's code, which leaves the full stop out); ``references`` draws one of
    the row's ``short_references``.
    """
    texts = []
    for (row, step), caption in zip(items, captions, strict=True):
        if source == "first_sentence":
            head, stop, _ = caption.replace("\n", " ").partition(". ")
            texts.append(head + stop.strip())
        else:
            texts.append(draw(row["short_references"], row, seed, step, "short"))
    return Addition({"text_short": texts})


@dataclass(frozen=True)
class HardNegatives:
    """Adds the texts ``text_false0`` and so on to a batch, and the target ``false`` [B,
    ``count``]: 1 where the text is a false caption, 0 where it is missing.

    Args:
        source: gives the false captions of a row.
        count: false captions of each caption.
        seed: random seed of all draws.
    """

    source: NegativeSource
    count: int
    seed: int = 0

    def __call__(
        self, items: Sequence[tuple[Row, int]], captions: list[str]
    ) -> Addition:
        drawn = []
        for (row, step), caption in zip(items, captions, strict=True):
            drawn.append(self.of(row, caption, step))
        texts = {}
        counts = []
        for n in range(self.count):
            texts[f"text_false{n}"] = [
                false[n] if n < len(false) else "" for false in drawn
            ]
            counts.append([float(n < len(false)) for false in drawn])
        return Addition(texts, {"false": torch.tensor(counts).T.contiguous()})

    def of(self, row: Row, caption: str, step: int) -> list[str]:
        """At most ``count`` false captions of a row."""
        generator = row_generator(self.seed, step, f"negatives/{row['image_id']}")
        return [text for _, text in self.source(row, caption, generator)[: self.count]]


def validation_negatives(
    negatives: HardNegatives | None, rows: Sequence[Row]
) -> list[tuple[int, str, str]]:
    """(index of a row, its first caption, a false caption); the same at every
    validation.
    """
    false_captions = []
    for index, row in enumerate(rows if negatives else ()):
        caption = row["references"][0]
        for text in negatives.of(row, caption, -1):  # type: ignore[union-attr]
            false_captions.append((index, caption, text))
    return false_captions


def caption_source(name: str, kwargs: Mapping[str, Any], rows: Sequence[Row]) -> Any:
    """The source that ``negatives.source`` names, tried on the first row (``data``: on
    all rows).

    Raises:
        ConfigError: there is no such source, or it cannot be made.
        DataError: it cannot make captions of a row.
    """
    what = f"negatives.source: {name}"
    target = load_target(name, "negatives.source", NEGATIVES)
    cannot = naming(f"{what} cannot be made", (TypeError, ValueError))
    with cannot, errors_of_user_code(what):
        source = target(**kwargs)
    checked = partial(_checked_negatives, source, what) if ":" in name else source
    generator = np.random.default_rng(0)
    # Fails where the column is absent, or the data have no scenes.
    for row in rows if name == "data" else rows[:1]:
        checked(row, row["references"][0], generator)
    return checked


def _checked_negatives(
    source: Any, what: str, row: Row, caption: str, generator: np.random.Generator
) -> Any:
    """Checked captions of a source from outside. Raises ``DataError``, which names it."""
    with errors_of_user_code(what, error=DataError):
        captions = source(row, caption, generator)
    where = f"{what}: what it returned of image {row['image_id']!r}"
    check_type(captions, list[tuple[str, str]], where, DataError)
    return captions
