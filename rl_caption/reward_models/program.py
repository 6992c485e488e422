"""The training program of reward models: from a configuration to a finished run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rewards.clip.backbone import load_backbone
from rewards.clip.preprocessing import Preprocessing, preprocessing_of
from rewards.clip.student import LCLIPConfig
from rl_caption.config.build import ConfigError
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import PairCollate, PixelCache, TokenCache
from rl_caption.reward_models.checks import check_batch_norm, check_config
from rl_caption.reward_models.config import CLIP_TASKS, LossConfig, RewardModelConfig
from rl_caption.reward_models.encoders import ClipTowers, Towers, pretrained_clip, random_clip, save_clip
from rl_caption.reward_models.long_texts import StepTriplets, donors_of, short_caption, validation_triplets
from rl_caption.reward_models.objectives import (
    REGULATOR_WEIGHT,
    TOWER_WEIGHT,
    Contrastive,
    Distillation,
    Objective,
    PositiveAugmented,
    Specificity,
)
from rl_caption.reward_models.positives import check_positives
from rl_caption.reward_models.students import (
    Tower,
    build_dual,
    build_tower,
    copy_patch_embedding,
    save_tower,
    tower_teacher,
)
from rl_caption.reward_models.task import EmbeddingTask, batch_targets
from rl_caption.reward_models.teacher import Teacher
from rl_caption.reward_models.trainable import train_only
from rl_caption.reward_models.validation import embedding_validator
from rl_caption.training.engines import print_main
from rl_caption.training.loop import Trainer
from rl_caption.training.setup import CHECKED_IMAGES, Context, setup
from rl_caption.types import TrainState

TOWERS_OF: dict[str, tuple[Tower, ...]] = {
    "contrastive": ("image", "text"),
    "positive_augmented": ("image", "text"),
    "specificity": ("image", "text"),
    "distill_image": ("image",),
    "distill_text": ("text",),
    "distill_dual": ("image", "text"),
}


@dataclass(frozen=True)
class EmbeddingModel:
    """What is trained, and what it reads."""

    network: nn.Module
    """From inputs by name to raw embeddings by name."""
    preprocessing: Preprocessing
    context_length: int
    trims: bool
    """Padding cannot change a text embedding, so ids may be cut after the longest caption."""
    export: Callable[[Path], None]
    is_trained: bool


def train_reward_model(config: RewardModelConfig) -> TrainState:
    """Train a dual encoder, or a tower of one; the best by validation lies in ``export/best``.

    Raises:
        ConfigError: see ``check_config``, ``check_batch_norm`` and what builds the models.
    """
    check_config(config)
    towers = TOWERS_OF[config.task]
    with setup(config) as context:
        teacher = None if config.task in CLIP_TASKS else _teacher(context, config, towers)
        model = _clip_model(config) if teacher is None else _student(context, config, teacher)
        check_batch_norm(model.network, config.train, context.accelerator.num_processes)
        if teacher is not None:
            _check_same_view(config, teacher, model)
        positives = _positives(config, context)
        pixels, tokens = _inputs(context, config, model, "text" in towers)
        collate = PairCollate(
            pixels if "image" in towers else None,
            tokens if "text" in towers else None,
            config.train.captions,
            config.data.augment,
            config.train.seed,
            _short_captions(config),
            _triplets(config, context.train_rows),
            config.train.plain_captions,
            positives,
        )
        is_specific = config.task == "specificity"
        validate = embedding_validator(
            context.accelerator,
            model.network,
            towers,
            context.val_rows,
            pixels,
            tokens,
            config.eval.batch_size,
            teacher,
            validation_triplets(context.val_rows, config.train.seed) if is_specific else None,
        )
        if teacher is not None:
            teacher.prepare(context.train_rows, config.train.captions, config.teacher.cache_mb * 2**20)
        signature = "" if teacher is None else f"{config.task}[{teacher.backbone.signature}]"
        state = context.start(signature, _metric(config))
        decays = _decays(config.train.freeze_positions) if config.task in CLIP_TASKS else None
        network, optimizer = context.prepare(model.network, decays)
        target = batch_targets if is_specific else teacher
        return Trainer(
            context,
            EmbeddingTask(context.accelerator, network, objective(config), target, config.task),
            network,
            optimizer,
            collate,
            state,
            validate=validate,
            export=model.export,
            metric_range="0 to 1" if len(towers) > 1 else "-1 to 1",
            validate_first=model.is_trained,
        ).fit()


def _metric(config: RewardModelConfig) -> str:
    """What chooses the best model."""
    if config.task == "specificity":
        return "val/specificity"
    towers = TOWERS_OF[config.task]
    return "val/retrieval_r1" if len(towers) > 1 else f"val/teacher_cosine_{towers[0]}"


def _decays(frozen_positions: int) -> Callable[[str, Tensor], bool]:
    """CLIP's rule: weight decay for matrices, none for gains, biases and the temperature (Radford et al. 2021).

    Nor for the table of text positions where some are frozen: decay would move them without a gradient.
    """
    return lambda name, parameter: parameter.ndim > 1 and not (frozen_positions and name == "clip.positional_embedding")


def _short_captions(config: RewardModelConfig) -> Callable[[Row, str, int], str] | None:
    if not config.loss.short:
        return None
    return partial(short_caption, source=config.train.short_captions, seed=config.train.seed)


def _positives(config: RewardModelConfig, context: Context) -> list[Tower]:
    """The kinds of positives that the loss reads, found to be there."""
    if config.task != "positive_augmented":
        return []
    weights: dict[Tower, float] = {"image": config.loss.positive_images, "text": config.loss.positive_captions}
    wanted = [kind for kind, weight in weights.items() if weight]
    with context.accelerator.main_process_first():  # the others then find the verdicts in the cache
        check_positives(
            context.train_rows, wanted, config.train.captions, config.data.check_images, context.folder / CHECKED_IMAGES
        )
    return wanted


def _triplets(config: RewardModelConfig, rows: Sequence[Row]) -> StepTriplets | None:
    train = config.train
    if config.task != "specificity":
        return None
    donors = donors_of(rows) if train.negatives == "data" else None
    return StepTriplets(
        rows, train.batch_size, train.seed, train.captions, train.shuffle_rate, train.shuffle_per, donors
    )


def objective(config: RewardModelConfig) -> Objective:
    """The loss of a method, with its own defaults where weights are null."""
    towers, loss = TOWERS_OF[config.task], config.loss
    if config.task == "contrastive":
        return Contrastive(config.train.label_smoothing, loss.short, loss.pca_rank)
    if config.task == "positive_augmented":
        return PositiveAugmented(loss.positive_images, loss.positive_captions)
    if config.task == "specificity":
        return Specificity(loss.alpha, loss.beta, loss.gamma, loss.margin_units, loss.max_margin, loss.symmetric)
    dual = len(towers) > 1
    return Distillation(
        towers,
        _weight(loss, "l1", TOWER_WEIGHT[len(towers)]),
        _weight(loss, "cosine", TOWER_WEIGHT[len(towers)]),
        _weight(loss, "regulator", REGULATOR_WEIGHT) if dual else 0.0,
        loss.regulator_reduction,
    )


def _weight(loss: LossConfig, name: str, default: float) -> float:
    value: float | None = getattr(loss, name)
    return default if value is None else value


def _teacher(context: Context, config: RewardModelConfig, towers: tuple[Tower, ...]) -> Teacher:
    wanted = config.teacher
    assert wanted.name is not None  # check_config
    try:
        with context.accelerator.main_process_first():  # which downloads, where that is needed
            backbone = load_backbone(
                wanted.name, wanted.pretrained, str(context.accelerator.device), precision=wanted.precision,
                batch_size=wanted.batch_size,
            )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"teacher: {error}") from error
    return Teacher(backbone, towers, context.accelerator, bool(config.data.augment), wanted.cache_dir)


def _clip_model(config: RewardModelConfig) -> EmbeddingModel:
    model = config.model
    if model.init is not None:
        clip, shape, preprocessing = pretrained_clip(model.name, model.init, model.context_length, model.keep_positions)
    else:
        clip, shape = random_clip(model.name, model.kwargs)
        preprocessing = preprocessing_of(clip.visual)
    network = ClipTowers(clip, config.loss.max_scale, config.train.freeze_positions)
    if config.task == "positive_augmented":
        train_only(clip, config.train.trainable, config.train.lora_rank, config.train.lora_alpha)
    return EmbeddingModel(
        network,
        preprocessing,
        int(clip.context_length),
        network.trims,
        lambda folder: save_clip(clip, shape, folder),
        model.init is not None,
    )


def _student(context: Context, config: RewardModelConfig, teacher: Teacher) -> EmbeddingModel:
    model, train, fingerprint = config.model, config.train, teacher.backbone.fingerprint
    if config.task == "distill_dual":
        folders: dict[Tower, str | None] = {"image": model.image_init, "text": model.text_init}
        dual = build_dual(model.init, folders, model.kwargs, teacher.width, fingerprint)
        for kind, folder in folders.items():
            if folder is not None and tower_teacher(folder) is None:
                print_main(
                    context.accelerator,
                    f"WARNING: model.{kind}_init {folder} does not say which teacher it was distilled from: it is "
                    "taken as it is, see to it that it was this one",
                )
        trained = model.init is not None or None not in (model.image_init, model.text_init)
        if train.freeze_text and (model.init is not None or model.text_init is not None):
            dual.text.requires_grad_(False)
        towers: dict[str, nn.Module] = {"image": dual.image, "text": dual.text}
        return _student_model(towers, dual.config, dual.save_pretrained, trained)
    kind = "image" if config.task == "distill_image" else "text"
    tower: Any = build_tower(kind, model.init, model.kwargs, teacher.width)
    if kind == "image" and train.freeze_patch_embed:
        frozen = copy_patch_embedding(tower, teacher.backbone.model)
        print_main(context.accelerator, f"copied from the teacher and frozen: {', '.join(frozen)}")

    def export(folder: Path) -> None:
        save_tower(tower, kind, folder, fingerprint)

    return _student_model({kind: tower}, tower.config, export, model.init is not None)


def _student_model(
    towers: dict[str, nn.Module], config: LCLIPConfig, export: Callable[[Path], None], is_trained: bool
) -> EmbeddingModel:
    trims = config.pad_attention == "masked"
    preprocessing = Preprocessing(config.image_size)
    return EmbeddingModel(Towers(towers), preprocessing, config.context_length, trims, export, is_trained)


def _check_same_view(config: RewardModelConfig, teacher: Teacher, model: EmbeddingModel) -> None:
    """With augmentation the teacher embeds the very pixels that the student sees."""
    theirs = teacher.backbone.preprocessing
    if config.data.augment and "image" in teacher.towers and theirs != model.preprocessing:
        raise ConfigError(
            f"data.augment is set, but the teacher reads {theirs} and the student {model.preprocessing}: both see the "
            "same view, so give the student the teacher's image_size, or leave data.augment out"
        )


def _inputs(
    context: Context, config: RewardModelConfig, model: EmbeddingModel, with_text: bool
) -> tuple[PixelCache, TokenCache]:
    from open_clip import SimpleTokenizer

    pixels = PixelCache(model.preprocessing, config.data.cache_mb * 2**20)
    tokens = TokenCache(SimpleTokenizer(context_length=model.context_length), model.context_length, model.trims)
    references = [caption for row in context.val_rows for caption in row["references"]]
    cut = tokens.too_long(references) if with_text else 0
    if cut:
        print_main(
            context.accelerator,
            f"{cut} of {len(references)} validation captions have more than {model.context_length} tokens (the model's "
            "context_length) and lose their end, as training captions do",
        )
    return pixels, tokens
