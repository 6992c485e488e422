"""The task ``distill``: L-CLIP's two stages (docs/reward_models.md).

A student, both towers of an L-CLIP or one of them, learns the embeddings of a frozen
teacher (``teacher.py``).
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import save_encoder_config
from rewards.clip.student import (
    LCLIP,
    MODEL_TYPE,
    ImageStudent,
    LCLIPConfig,
    TextStudent,
    load_student,
)
from rewards.model_files import MANIFEST, float_state, read_object, save_model
from rl_caption.config.reward_models import (
    CaptionTrainConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rl_caption.reward_models.clip_models import (
    RETRIEVAL,
    EmbeddingModel,
    train_embeddings,
)
from rl_caption.reward_models.encoders import TrainedEncoder, check_batch_norm
from rl_caption.reward_models.losses import (
    Embeddings,
    Objective,
    cosine_matrix,
    info_nce,
)
from rl_caption.reward_models.teacher import Teacher, Tower, load_teacher
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import ConfigError, naming
from rl_caption.runtime.options import Section
from rl_caption.runtime.types import TrainState
from rl_caption.training.run import Run

Reduction = Literal["mean", "sum"]


def distillation(
    student: Embeddings,
    teacher: Embeddings,
    towers: tuple[str, ...],
    l1: float,
    cosine: float,
    regulator: float = 0.0,
    reduction: Reduction = "mean",
    contrastive: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L-CLIPScore: ``l1`` |f - f_T| + ``cosine`` (1 - cos(f, f_T)) of each tower, +
    ``regulator`` Similarity Regulator, + ``contrastive`` InfoNCE at CLIP's temperature
    of 1/100.

    f and f_T are raw embeddings of student and teacher; |.| is the mean over batch and
    dimensions. Stage 1 has one tower, stage 2 both and the regulator, whose weight of 0
    leaves it out. Terms are logged unweighted.
    """
    loss = torch.zeros((), device=student[towers[0]].device)
    metrics: dict[str, Tensor] = {}
    for tower in towers:
        metrics[f"distill/l1_{tower}"] = absolute = F.l1_loss(
            student[tower], teacher[tower]
        )
        angle = (1 - F.cosine_similarity(student[tower], teacher[tower], dim=-1)).mean()
        metrics[f"distill/cosine_{tower}"] = angle
        loss = loss + l1 * absolute + cosine * angle
    if regulator:
        term = similarity_regulator(
            student["image"],
            student["text"],
            teacher["image"],
            teacher["text"],
            reduction,
        )
        loss = loss + regulator * term
        metrics["distill/regulator"] = term
    if contrastive:
        term = info_nce(student["image"], student["text"], 100.0)
        loss = loss + contrastive * term
        metrics["distill/contrastive"] = term
    return loss, metrics


def similarity_regulator(
    student_images: Tensor,
    student_texts: Tensor,
    teacher_images: Tensor,
    teacher_texts: Tensor,
    reduction: Reduction = "mean",
) -> Tensor:
    """Similarity Regulator of L-CLIPScore: matching cosines at least the teacher's, all
    others at most the teacher's.

    With S and T the cosine matrices of student and teacher: ``Σᵢ relu(Tᵢᵢ - Sᵢᵢ) + Σᵢⱼ
    relu(Sᵢⱼ - Tᵢⱼ)``, i ≠ j. The L-CLIPScore paper writes sums; its code takes the mean
    of each of the two parts, which gives a negative pair B - 1 times less weight. The
    code's average over S and Sᵀ is the same number.

    The student's embeddings are [B, D], the teacher's [B, E]; E may differ from D. A
    scalar, at least 0.
    """
    student = cosine_matrix(student_images, student_texts)
    teacher = cosine_matrix(teacher_images, teacher_texts)
    diagonal = torch.eye(*student.shape, dtype=torch.bool, device=student.device)
    missing = F.relu(teacher - student)[diagonal]
    excess = F.relu(student - teacher)[~diagonal]
    if reduction == "sum":
        return missing.sum() + excess.sum()
    return missing.mean() + excess.sum() / max(excess.numel(), 1)


class StudentConfig(Section):
    """The student, an L-CLIP or one of its towers."""

    kwargs: dict = {}
    """Shape of a student with random weights, options of ``LCLIPConfig``."""
    init: str | None = None
    """Weights to start from: the export of such a run."""
    image_init: str | None = None
    """With ``towers: dual``: the export of ``towers: image``; null starts from random weights."""
    text_init: str | None = None
    """With ``towers: dual``: the export of ``towers: text``; null starts from random
    weights.
    """


class DistanceConfig(Section):
    """The loss of a student. Null is the published code's value.

    Stage 1 of that code averages two losses; stage 2 averages three (L1, cosine,
    regulator), the first two over both towers, and scales the third by 0.1.
    """

    l1: NonNegativeFloat | None = None
    """Mean absolute difference to the teacher's raw embedding, per tower. Null: 1/2 for
    one tower, 1/6 for both.
    """
    cosine: NonNegativeFloat | None = None
    """1 - cosine to the teacher's embedding, per tower. Null: 1/2 for one tower, 1/6 for both."""
    regulator: NonNegativeFloat | None = None
    """With both towers: the Similarity Regulator; 0 leaves it out. Null: 1/30."""
    regulator_reduction: Reduction = "mean"
    """``mean``, over diagonal and other pairs separately (released code), or ``sum`` (paper)."""
    contrastive: NonNegativeFloat = 0.0
    """With both towers: CLIP's loss at its temperature of 1/100, which the paper tried
    in place of the regulator.
    """


class DistillTrainConfig(CaptionTrainConfig):
    """Distilling a student."""

    freeze_patch_embed: bool = True
    """With ``towers: image``: copy the patch projection, the class token and, if they
    fit, the position embeddings from the teacher, and freeze them.
    """
    freeze_text: bool = True
    """With ``towers: dual``: freeze the text tower; one with random weights is always trained."""


class DistillConfig(RewardModelConfig):
    """``reward_model --task distill``: an L-CLIP of a frozen dual encoder."""

    task: Literal["distill"] = "distill"
    towers: Literal["image", "text", "dual"] = "dual"
    """``image`` or ``text``: one tower, stage 1 of L-CLIP; ``dual``: both, stage 2."""
    model: StudentConfig = StudentConfig()
    """The model to train."""
    teacher: TeacherConfig
    """The model to distil."""
    loss: DistanceConfig = DistanceConfig()
    """Weights of the terms of the loss."""
    train: DistillTrainConfig = DistillTrainConfig()

    @property
    def names(self) -> tuple[Tower, ...]:
        """Names of the student's towers."""
        return ("image", "text") if self.towers == "dual" else (self.towers,)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What every row of the data must have."""
        return frozenset(self.names)

    def objective(self) -> Objective:
        """``distillation`` with the weights of this configuration."""
        loss = self.loss
        weight = 1 / 6 if self.towers == "dual" else 1 / 2
        regulator = 0.0
        if self.towers == "dual":
            regulator = 1 / 30 if loss.regulator is None else loss.regulator
        return partial(
            distillation,
            towers=self.names,
            l1=weight if loss.l1 is None else loss.l1,
            cosine=weight if loss.cosine is None else loss.cosine,
            regulator=regulator,
            reduction=loss.regulator_reduction,
            contrastive=loss.contrastive if self.towers == "dual" else 0.0,
        )

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        names = self.names
        is_dual = self.towers == "dual"
        teacher = load_teacher(run.accelerator, self.teacher, self.data, names)
        model = self._student(run, teacher)
        preprocessing = teacher.backbone.preprocessing
        augments = self.data.augment and "image" in names
        if augments and preprocessing != model.preprocessing:
            raise ConfigError(
                f"data.augment is set, but the teacher reads {preprocessing} and the student "
                f"{model.preprocessing}: both must see the same view. Give the student the "
                "teacher's image_size, or leave data.augment out"
            )
        check_batch_norm(model.network, self.train, run.accelerator.num_processes)
        return train_embeddings(
            run,
            self,
            model,
            RETRIEVAL if is_dual else f"val/teacher_cosine_{self.towers}",
            names,
            teacher,
            f"distill_{self.towers}[{teacher.backbone.signature}]",
        )

    def _student(self, run: Run, teacher: Teacher) -> EmbeddingModel:
        """Build the student of a teacher."""
        model = self.model
        width = teacher.width
        fingerprint = teacher.backbone.fingerprint
        towers: dict[str, Any]
        if self.towers == "dual":
            folders = {"image": model.image_init, "text": model.text_init}
            dual = build_dual(model.init, folders, model.kwargs, width, fingerprint)
            if self.train.freeze_text and (model.init or model.text_init):
                dual.text.requires_grad_(False)
            towers = {"image": dual.image, "text": dual.text}
            is_trained = model.init is not None or None not in folders.values()
            shape = dual.config
            export = dual.save_pretrained
        else:
            tower: Any = build_tower(self.towers, model.init, model.kwargs, width)
            if self.towers == "image" and self.train.freeze_patch_embed:
                frozen = copy_patch_embedding(tower, teacher.backbone.model)
                print_main(
                    run.accelerator,
                    f"copied from the teacher and frozen: {', '.join(frozen)}",
                )
            towers = {self.towers: tower}
            is_trained = model.init is not None
            shape = tower.config
            export = partial(save_tower, tower, self.towers, teacher=fingerprint)
        if shape.embed_dim != width:
            raise ConfigError(
                f"model.kwargs.embed_dim is {shape.embed_dim}, the teacher's embeddings have "
                f"{width} dimensions: set it to that"
            )
        preprocessing = Preprocessing(shape.image_size)
        if "image" in towers:
            preprocessing = towers["image"].preprocessing
        network = TrainedEncoder(nn.ModuleDict(towers), towers)
        return EmbeddingModel(network, preprocessing, shape.texts, export, is_trained)


TOWERS: Mapping[str, Any] = {"image": ImageStudent, "text": TextStudent}
TEACHER = "teacher_fingerprint"
"""Key in a tower's config.json: ``FrozenEncoder.fingerprint`` of the model that it was
distilled from.
"""


def student_config(kwargs: Mapping[str, Any], embed_dim: int) -> LCLIPConfig:
    """Shape of a student, whose joint width is the teacher's ``embed_dim`` unless
    ``kwargs`` have another. Raises ``ConfigError`` for wrong arguments.
    """
    with naming("model.kwargs", (TypeError, ValueError)):
        return LCLIPConfig(**{"embed_dim": embed_dim, **kwargs})


def save_tower(tower: Any, which: str, folder: Path, teacher: str = "") -> None:
    """Write ``model.safetensors`` and ``config.json`` of one tower to ``folder``;
    ``teacher`` is its fingerprint.
    """
    save_encoder_config(getattr(tower, "encoder", None), folder / "image_encoder")
    origin = {"model_type": f"{MODEL_TYPE}_{which}", TEACHER: teacher}
    save_model(float_state(tower), origin | asdict(tower.config), folder)


def build_tower(
    which: str,
    init: str | None,
    kwargs: Mapping[str, Any],
    embed_dim: int,
    teacher: str = "",
    key: str = "model.init",
) -> Any:
    """One tower: with random weights, or from a folder ``init`` of ``save_tower``, the
    value of ``key`` in the configuration.

    Raises ``ConfigError`` where it cannot be built or loaded, and for a folder that
    names another ``teacher`` (a fingerprint; "" accepts any).
    """
    if init is None:
        return TOWERS[which](student_config(kwargs, embed_dim))
    folder = Path(init)
    with naming(f"{key}, the export of distill with towers {which}"):
        model_type = f"{MODEL_TYPE}_{which}"
        tower: Any = load_student(TOWERS[which], folder, model_type, [TEACHER])
        origin = read_object(folder / "config.json").get(TEACHER, "")
    if "" not in (origin, teacher) and origin != teacher:
        raise ConfigError(
            f"{key} is {init!r}, distilled from a teacher of fingerprint {origin}; this run's "
            f"teacher has {teacher}: name the same (weights, preprocessing and precision), or "
            "distil the tower from this one. If only library versions differ, remove "
            f"{TEACHER} from the tower's config.json, and {MANIFEST}"
        )
    return tower


def build_dual(
    init: str | None,
    towers: Mapping[str, str | None],
    kwargs: Mapping[str, Any],
    embed_dim: int,
    teacher: str = "",
) -> LCLIP:
    """A whole L-CLIP: from its folder, from one folder for each tower, or with random
    weights where there is none.

    ``kwargs`` are arguments of ``LCLIPConfig`` that no folder gives, ``embed_dim`` is
    the teacher's joint width. ``teacher`` is the fingerprint of the teacher that towers
    must be distilled from; "" accepts any.

    Raises:
        ConfigError: a folder cannot be loaded, the towers or ``kwargs`` do not fit each
            other, or a tower was distilled from another teacher.
    """
    if init is not None:
        with naming("model.init"):
            return LCLIP.from_pretrained(init).train()
    loaded: dict[str, Any] = {}
    values = dict(kwargs)
    for which, path in towers.items():
        if path is None:
            continue
        key = f"model.{which}_init"
        loaded[which] = build_tower(which, path, {}, embed_dim, teacher, key)
        for name, value in asdict(loaded[which].config).items():
            is_image = name.startswith("image_") or name == "patch_size"
            if name not in ("embed_dim", "mlp_ratio") and is_image != (
                which == "image"
            ):
                continue
            if values.setdefault(name, value) != value:
                raise ConfigError(
                    f"{key} has {name} {value!r}, but the other tower or model.kwargs has "
                    f"{values[name]!r}: expected equal values"
                )
    config = student_config(values, embed_dim)
    with torch.device("meta"):
        model = LCLIP(replace(config, image_encoder=None))
    model.config = config
    for which, build in TOWERS.items():
        tower = loaded[which] if which in loaded else build(config)
        tower.config = config
        setattr(model, which, tower)
    return model


@torch.no_grad()
def copy_patch_embedding(student: ImageStudent, teacher: Any) -> list[str]:
    """Copy patch projection, class token and, where they fit, positions of an open_clip
    ViT, and freeze them.

    The bias of the student's patch projection has no counterpart in the teacher: it
    stays random and is trained, as in the released code. Returns the names of the
    frozen parameters.

    Raises:
        ConfigError: the teacher is no ViT, or its patches have another size or width.
    """
    visual: Any = getattr(teacher, "visual", None)
    expected = student.get_parameter("patch_embed.weight").shape
    try:
        sources = {
            "patch_embed.weight": visual.conv1.weight,
            "cls_token": visual.class_embedding,
            "pos_embed": visual.positional_embedding,
        }
        is_vit = visual.conv1.weight.shape == expected
        is_vit = is_vit and visual.conv1.stride[0] == expected[-1]
    except AttributeError:
        is_vit = False
    if not is_vit:
        raise ConfigError(
            "the teacher's image encoder is not a ViT with patches of the student's width and "
            f"size, {expected[0]} and {expected[-1]} pixels, to copy: set train.freeze_patch_embed "
            "to false"
        )
    frozen = []
    for name, source in sources.items():
        target = student.get_parameter(name)
        if source.numel() == target.numel():
            target.copy_(source.reshape(target.shape))
            target.requires_grad_(False)
            frozen.append(name)
    return frozen
