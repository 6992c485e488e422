"""The task ``positive_augmented``, PAC-S: generated images and captions are further
positives (docs/papers.md).

Source: Sarto et al., CVPR 2023, and its successor PAC-S++ (LoRA).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

from pydantic import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from torch import Tensor

from rl_caption.data.base import SHOWN, DataError, Row
from rl_caption.data.checks import ImageFile, verify
from rl_caption.reward_models.batch import (
    Addition,
    Captions,
    caption_index,
    draw,
)
from rl_caption.reward_models.clip_models import (
    BestByConfig,
    ClipConfig,
    ClipLossConfig,
    ClipTrainConfig,
    train_embeddings,
)
from rl_caption.reward_models.encoders import train_only
from rl_caption.reward_models.losses import (
    Embeddings,
    Objective,
    contrastive_metrics,
    info_nce,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import LOSS, TrainState
from rl_caption.training.run import CHECKED_IMAGES, Run


def positive_augmented(
    student: Embeddings,
    target: Embeddings,
    positive_images: float = 0.05,
    positive_captions: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PAC-S: ``l(V, T) + λv l(V', T) + λt l(V, T')``, l = 2 ``info_nce`` (Sarto et al.,
    CVPR 2023, section 3.1).

    V and T are ``image`` and ``text``; V' (``image_generated``) was generated for the
    captions T, and T' (``text_generated``) for the images V. Negatives are the other
    rows of the batch; V' and T' are not compared with each other. A weight of 0 leaves
    its term out. Nats; terms are logged unweighted.
    """
    images = student["image"]
    texts = student["text"]
    scale = student["scale"]
    loss = 2 * info_nce(images, texts, scale)
    metrics = contrastive_metrics(student) | {"positive/pairs": loss}
    if positive_images:
        metrics["positive/images"] = 2 * info_nce(
            student["image_generated"], texts, scale
        )
        loss = loss + positive_images * metrics["positive/images"]
    if positive_captions:
        metrics["positive/captions"] = 2 * info_nce(
            images, student["text_generated"], scale
        )
        loss = loss + positive_captions * metrics["positive/captions"]
    return loss, metrics


class PositiveAugmentedLossConfig(ClipLossConfig):
    """The loss of PAC-S."""

    positive_images: NonNegativeFloat = 0.05
    """Weight of the term between captions and images generated from them; 0 leaves it
    out.
    """
    positive_captions: NonNegativeFloat = 0.1
    """Weight of the term between images and captions generated from them; 0 leaves it
    out.
    """


class PositiveAugmentedTrainConfig(ClipTrainConfig):
    """Training on generated positives."""

    trainable: Literal["projections", "lora", "all"] = "projections"
    """Train the final ``projections`` of both towers and the temperature (PAC-S),
    ``lora`` in both towers (PAC-S++), or ``all`` weights.
    """
    lora_rank: PositiveInt = 4
    """Rank of LoRA."""
    lora_alpha: PositiveFloat = 1.0
    """The LoRA update is scaled by ``lora_alpha / lora_rank``."""


class PositiveAugmentedConfig(ClipConfig):
    """``reward_model --task positive_augmented``: PAC-S."""

    task: Literal["positive_augmented"] = "positive_augmented"
    loss: PositiveAugmentedLossConfig = PositiveAugmentedLossConfig()
    train: PositiveAugmentedTrainConfig = PositiveAugmentedTrainConfig()
    eval: BestByConfig = BestByConfig()

    @model_validator(mode="after")
    def _check_positive_augmented(self) -> Self:
        trains_all = self.train.trainable == "all"
        if not (trains_all or self.model.has_parts or self.model.init is not None):
            raise ConfigError(
                f"train.trainable is {self.train.trainable!r} with random weights, most of which "
                "would stay random: set model.init, or train.trainable all"
            )
        return self

    def objective(self) -> Objective:
        """``positive_augmented`` with the weights of this configuration."""
        weights = self.loss.model_dump(exclude={"max_scale"})
        return partial(positive_augmented, **weights)

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        train = self.train
        tune = partial(
            train_only,
            what=train.trainable,
            rank=train.lora_rank,
            alpha=train.lora_alpha,
        )
        model = self.build_model(run.accelerator.num_processes, tune)
        positives = []
        if self.loss.positive_images:
            positives.append("image")
        if self.loss.positive_captions:
            positives.append("text")
        splits = {"train": run.train_rows}
        if self.eval.best_by == LOSS:
            splits[self.eval.split] = run.val_rows
        cache = run.folder / CHECKED_IMAGES
        checks = self.data.check_images
        # The others then find the verdicts in the cache.
        with run.accelerator.main_process_first():
            for split, rows in splits.items():
                check_positives(rows, positives, train.captions, checks, cache, split)
        generated = GeneratedPositives(positives, train.captions, train.seed)
        return train_embeddings(run, self, model, additions=[generated])


@dataclass(frozen=True)
class GeneratedPositives:
    """Adds generated positives to a batch.

    Args:
        which: ``image``: the image that was generated for the chosen caption, as
            ``image_generated``; ``text``: a random caption that was generated for the
            image, as ``text_generated``.
        captions: which reference a step uses.
        seed: random seed of all draws.
    """

    which: Collection[str]
    captions: Captions = "random"
    seed: int = 0

    def __call__(
        self, items: Sequence[tuple[Row, int]], captions: list[str]
    ) -> Addition:
        added = Addition()
        if "text" in self.which:
            added.texts["text_generated"] = [
                draw(row["positive_captions"], row, self.seed, step, "generated")
                for row, step in items
            ]
        if "image" in self.which:
            images = added.images["image_generated"] = []
            for row, step in items:
                number = caption_index(row, self.captions, self.seed, step)
                key = f"{row['image_id']}/generated/{number}"
                images.append((key, row["positive_images"][number]))
        return added


def check_positives(
    rows: Sequence[Row],
    which: Collection[str],
    captions: Captions,
    check_pixels: bool = True,
    cache: str | Path | None = None,
    split: str = "train",
) -> None:
    """Check that every row of a split has the positives that its steps may draw (docs/papers.md).

    ``which``: ``image`` checks ``positive_images``, one for each reference that is
    used; ``text`` checks ``positive_captions``, at least one in a row. ``check_pixels``
    and ``cache`` are as in ``check_data``.

    Raises:
        DataError: positives are missing, or files of images cannot be read; with the
            count and the first offenders.
    """
    wrong = []
    files = dict[ImageFile, str]()
    for row in rows:
        name = f"{split} {row['image_id']!r}"
        if "text" in which and not row.get("positive_captions"):
            wrong.append(f"{name} has no positive_captions")
        if "image" in which:
            images = row.get("positive_images", [])
            texts = len(row["references"])
            if not (1 if captions == "first" else texts) <= len(images) <= texts:
                wrong.append(
                    f"{name} has {len(images)} positive_images for {texts} reference(s)"
                )
            for image in images:
                if isinstance(image, str | Path):
                    files[ImageFile(str(image))] = name
    for file, verdict in verify(files, read=check_pixels, cache=cache).items():
        if verdict.error:
            wrong.append(f"{files[file]}, {file.path!r}: {verdict.error}")
    if wrong:
        raise DataError(
            f"{'; '.join(wrong[:SHOWN])} ({len(wrong)} in all): expected positive_captions "
            "generated for the image, and positive_images generated for its references, one each "
            "in their order (the first alone with train.captions: first). A weight of 0 "
            "(loss.positive_captions, loss.positive_images) needs none"
        )
