"""The tasks ``distill_image``, ``distill_text`` and ``distill_dual``: L-CLIP's two stages
(docs/reward_models.md).

A student (``students.py``) learns the embeddings of a frozen teacher (``teacher.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.student import LCLIPConfig
from rl_caption.config.reward_models import CaptionTrainConfig, RewardModelConfig, TeacherConfig
from rl_caption.config.schema import TrainConfig
from rl_caption.data.checks import check_row_images
from rl_caption.reward_models.batch import Captions, PairCollate
from rl_caption.reward_models.embedding import (
    RETRIEVAL,
    EmbeddingModel,
    image_inputs,
    text_inputs,
    train_embeddings,
)
from rl_caption.reward_models.encoders import (
    TOKENS,
    TrainedTowers,
    check_batch_norm,
    check_vocabulary,
)
from rl_caption.reward_models.losses import Embeddings, Objective, Reduction, similarity_regulator
from rl_caption.reward_models.students import (
    TOWERS,
    build_dual,
    build_tower,
    copy_patch_embedding,
    save_tower,
)
from rl_caption.reward_models.teacher import Teacher, Tower, check_teacher, load_teacher
from rl_caption.reward_models.validation import EmbeddingValidator
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Section, Weight
from rl_caption.runtime.types import TrainState
from rl_caption.training.run import CHECKED_IMAGES, Run

TOWER_WEIGHT = {1: 1 / 2, 2: 1 / 6}
"""Number of towers -> weight of the L1 and of the cosine distance of each tower, as in the
L-CLIPScore code: stage 1 averages these two losses; stage 2 averages three (L1, cosine, regulator),
and the first two over both towers.
"""
REGULATOR_WEIGHT = 1 / 30
"""In stage 2: one of the three losses that are averaged, times 0.1, which that code scales it by.
"""


class StudentConfig(Section):
    """The student, an L-CLIP or one of its towers."""

    kwargs: dict = {}
    """Shape of a student with random weights, options of ``LCLIPConfig``."""
    init: str | None = None
    """Weights to start from: the export of such a run; of ``distill_dual``, a whole L-CLIP."""


class DualStudentConfig(StudentConfig):
    """The student, a whole L-CLIP."""

    image_init: str | None = None
    """The export of ``distill_image``; null starts from random weights."""
    text_init: str | None = None
    """The export of ``distill_text``; null starts from random weights."""


class DistanceConfig(Section):
    """The loss of a tower. Null is the published code's value."""

    l1: Weight | None = None
    """Mean absolute difference to the teacher's raw embedding, per tower. Null: 1/2 for one tower,
    1/6 for both.
    """
    cosine: Weight | None = None
    """1 - cosine to the teacher's embedding, per tower. Null: 1/2 for one tower, 1/6 for both."""


class DualDistanceConfig(DistanceConfig):
    """The loss of both towers."""

    regulator: Weight | None = None
    """The Similarity Regulator; 0 leaves it out. Null: 1/30."""
    regulator_reduction: Reduction = "mean"
    """``mean``, over diagonal and other pairs separately (released code), or ``sum`` (paper)."""


class ImageTrainConfig(TrainConfig):
    """Distilling an image tower."""

    freeze_patch_embed: bool = True
    """Copy the patch projection, the class token and, if they fit, the position embeddings from the
    teacher, and freeze them.
    """


class DualTrainConfig(CaptionTrainConfig):
    """Distilling both towers."""

    freeze_text: bool = True
    """Freeze the text tower; one with random weights is always trained."""


class DistillConfig(RewardModelConfig):
    """A student of a frozen dual encoder."""

    model: StudentConfig = Field(default_factory=StudentConfig)
    """The model to train."""
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    """The model to distil."""
    loss: DistanceConfig = Field(default_factory=DistanceConfig)
    """Weights of the terms of the loss."""

    @model_validator(mode="after")
    def _check_distill(self) -> Self:
        check_teacher(self.teacher, f"{self.task} distils a")
        if self.data.features_kwargs.get("views"):
            raise ConfigError(
                "data.features_kwargs.views is set, but the teacher would not see these views: "
                "leave it out"
            )
        return self

    def check(self) -> None:
        """Raise ``ConfigError`` where the student has fewer tokens than CLIP's tokenizer."""
        if self.model.init is None:
            check_vocabulary(self.model.kwargs.get("vocab_size", TOKENS), "model.kwargs.vocab_size")

    @property
    def towers(self) -> tuple[Tower, ...]:
        """Those that the student has."""
        return tuple(tower for tower in TOWERS if tower in self.needs)

    def objective(self, **further: Any) -> Objective:
        """``distillation`` with the weights of this configuration; null is that of the released
        code.

        ``further`` are options that not all tasks have.
        """
        distance, loss = TOWER_WEIGHT[len(self.towers)], self.loss
        l1, cosine = (distance if weight is None else weight for weight in (loss.l1, loss.cosine))
        return partial(distillation, towers=self.towers, l1=l1, cosine=cosine, **further)

    def folders(self) -> dict[str, str | None]:
        """See ``RewardModelConfig.folders``."""
        return {"model.init": self.model.init, "teacher.name": self.teacher.folder}


class DistillImageConfig(DistillConfig):
    """``reward_model --task distill_image``: stage 1 of L-CLIP, the image tower."""

    task: Literal["distill_image"] = "distill_image"
    train: ImageTrainConfig = Field(default_factory=ImageTrainConfig)
    needs = frozenset({"image"})
    unpaired = frozenset({"images"})

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""

        def build(teacher: Teacher) -> EmbeddingModel:
            tower: Any = build_tower("image", self.model.init, self.model.kwargs, teacher.width)
            if self.train.freeze_patch_embed:
                frozen = copy_patch_embedding(tower, teacher.backbone.model)
                print_main(
                    run.accelerator, f"copied from the teacher and frozen: {', '.join(frozen)}"
                )
            return _tower_model(tower, "image", teacher, self.model)

        return distil(self, run, build, "val/teacher_cosine_image")


class DistillTextConfig(DistillConfig):
    """``reward_model --task distill_text``: stage 1 of L-CLIP, the text tower."""

    task: Literal["distill_text"] = "distill_text"
    train: CaptionTrainConfig = Field(default_factory=CaptionTrainConfig)
    needs = frozenset({"text"})
    unpaired = frozenset({"captions"})

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""

        def build(teacher: Teacher) -> EmbeddingModel:
            tower = build_tower("text", self.model.init, self.model.kwargs, teacher.width)
            return _tower_model(tower, "text", teacher, self.model)

        return distil(self, run, build, "val/teacher_cosine_text", self.train.captions)


class DistillDualConfig(DistillConfig):
    """``reward_model --task distill_dual``: stage 2 of L-CLIP, both towers."""

    task: Literal["distill_dual"] = "distill_dual"
    model: DualStudentConfig = Field(default_factory=DualStudentConfig)
    loss: DualDistanceConfig = Field(default_factory=DualDistanceConfig)
    train: DualTrainConfig = Field(default_factory=DualTrainConfig)

    def folders(self) -> dict[str, str | None]:
        """See ``RewardModelConfig.folders``."""
        model = self.model
        return super().folders() | {
            "model.image_init": model.image_init,
            "model.text_init": model.text_init,
        }

    def objective(self, **further: Any) -> Objective:
        """``distillation`` with the weights of this configuration."""
        weight, reduction = self.loss.regulator, self.loss.regulator_reduction
        regulator = REGULATOR_WEIGHT if weight is None else weight
        return super().objective(regulator=regulator, reduction=reduction, **further)

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        model = self.model

        def build(teacher: Teacher) -> EmbeddingModel:
            """The student, of both towers."""
            folders: dict[Tower, str | None] = {"image": model.image_init, "text": model.text_init}
            dual = build_dual(
                model.init, folders, model.kwargs, teacher.width, teacher.backbone.fingerprint
            )
            starts_trained = model.init is not None or model.text_init is not None
            if self.train.freeze_text and starts_trained:
                dual.text.requires_grad_(False)
            is_trained = model.init is not None or None not in folders.values()
            return _student_model(
                {"image": dual.image, "text": dual.text},
                dual.config,
                dual.save_pretrained,
                is_trained,
            )

        return distil(self, run, build, RETRIEVAL, self.train.captions)


def distil(
    config: DistillConfig,
    run: Run,
    build: Callable[[Teacher], EmbeddingModel],
    metric: str,
    captions: Captions = "random",
) -> TrainState:
    """Train a student, which ``build`` makes for a teacher; ``metric`` chooses its best
    weights.

    ``captions`` is which reference a step learns. Raises ``ConfigError`` where teacher or student
    cannot be loaded or made, or do not fit each other or the data.
    """
    train, data, rows, towers = config.train, config.data, run.train_rows, config.towers
    teacher = load_teacher(run.accelerator, config.teacher, data, towers)
    model = build(teacher)
    _check_views(config, model, teacher)
    check_batch_norm(model.network, train, run.accelerator.num_processes)
    _check_images(config, run, teacher)
    pixels, tokens = (
        image_inputs(data, model),
        text_inputs(run, model, needs_text="text" in towers),
    )
    collate = PairCollate(
        pixels if "image" in towers else None,
        tokens if "text" in towers else None,
        captions,
        data.augment,
        train.seed,
    )
    validate = EmbeddingValidator(
        run.accelerator,
        model.network,
        towers,
        run.val_rows,
        pixels,
        tokens,
        config.eval.batch_size,
        teacher,
    )
    teacher.prepare(rows, captions, config.teacher.cache_mb * 2**20)
    return train_embeddings(
        run,
        model,
        config.task,
        config.objective(),
        collate,
        validate,
        metric,
        "0 to 1" if len(towers) > 1 else "-1 to 1",
        teacher,
        f"{config.task}[{teacher.backbone.signature}]",
    )


def _check_views(config: DistillConfig, model: EmbeddingModel, teacher: Teacher) -> None:
    """Raise ``ConfigError`` where images are augmented, and student and teacher would not see the
    same view.
    """
    preprocessing = teacher.backbone.preprocessing
    if config.data.augment and "image" in teacher.towers and preprocessing != model.preprocessing:
        raise ConfigError(
            f"data.augment is set, but the teacher reads {preprocessing} and the student "
            f"{model.preprocessing}: both "
            "must see the same view. Give the student the teacher's image_size, or leave "
            "data.augment out"
        )


def _check_images(config: DistillConfig, run: Run, teacher: Teacher) -> None:
    """Check that the teacher can read the images, also where the student reads features of them."""
    if config.data.features_root is not None and not teacher.reads_features:
        rows = [*run.train_rows, *run.val_rows]  # whose images are not checked yet
        check_row_images(rows, "the teacher", config.data.check_images, run.folder / CHECKED_IMAGES)


def _student_model(
    towers: Mapping[str, nn.Module],
    shape: LCLIPConfig,
    export: Callable[[Path], None],
    is_trained: bool,
) -> EmbeddingModel:
    image: Any = towers.get("image")
    preprocessing = Preprocessing(shape.image_size) if image is None else image.preprocessing
    trims = shape.pad_attention == "masked"
    return EmbeddingModel(
        TrainedTowers(towers), preprocessing, shape.context_length, trims, export, is_trained
    )


def _tower_model(tower: Any, name: Tower, teacher: Teacher, model: StudentConfig) -> EmbeddingModel:
    export = partial(save_tower, tower, name, teacher=teacher.backbone.fingerprint)
    return _student_model({name: tower}, tower.config, export, model.init is not None)


def distillation(
    student: Embeddings,
    teacher: Embeddings,
    towers: tuple[str, ...],
    l1: float,
    cosine: float,
    regulator: float = 0.0,
    reduction: Reduction = "mean",
) -> tuple[Tensor, dict[str, Tensor]]:
    """L-CLIPScore: ``l1`` |f - f_T| + ``cosine`` (1 - cos(f, f_T)) of each tower, + ``regulator``
    Similarity Regulator.

    f and f_T are raw embeddings of student and teacher; |.| is the mean over batch and dimensions.
    Stage 1 has one tower, stage 2 both and the regulator, whose weight of 0 leaves it out. Terms
    are logged unweighted.
    """
    loss = torch.zeros((), device=student[towers[0]].device)
    metrics: dict[str, Tensor] = {}
    for tower in towers:
        metrics[f"distill/l1_{tower}"] = absolute = F.l1_loss(student[tower], teacher[tower])
        angle = (1 - F.cosine_similarity(student[tower], teacher[tower], dim=-1)).mean()
        metrics[f"distill/cosine_{tower}"] = angle
        loss = loss + l1 * absolute + cosine * angle
    if regulator:
        term = similarity_regulator(
            student["image"], student["text"], teacher["image"], teacher["text"], reduction
        )
        loss = loss + regulator * term
        metrics["distill/regulator"] = term
    return loss, metrics
