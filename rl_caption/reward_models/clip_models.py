"""Configuration and model of tasks that train an open_clip model or a dual encoder of
pretrained parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator
from torch import Tensor, nn

from rewards.clip.dual import MODEL_TYPE, DualConfig, PretrainedDual
from rewards.clip.preprocessing import Preprocessing, is_causal, preprocessing_of
from rewards.clip.pretrained import Texts, clip_texts, open_blocks
from rewards.model_files import has_model_type
from rl_caption.config.reward_models import (
    CaptionTrainConfig,
    PartConfig,
    RewardModelConfig,
)
from rl_caption.config.schema import EvalConfig
from rl_caption.reward_models.batch import PairCollate, PixelCache
from rl_caption.reward_models.encoders import (
    TrainedEncoder,
    check_batch_norm,
    pretrained_clip,
    random_clip,
    save_clip,
    trained_clip,
)
from rl_caption.reward_models.task import EmbeddingTask
from rl_caption.reward_models.teacher import Teacher
from rl_caption.reward_models.validation import EmbeddingValidator, validation_loss
from rl_caption.runtime.errors import ConfigError, naming
from rl_caption.runtime.options import Fraction, Section
from rl_caption.runtime.types import LOSS, TrainState
from rl_caption.training.loop import train
from rl_caption.training.run import Run

MaxScale = Annotated[float, Field(ge=1, le=10**6)]
"""Largest logit scale (inverse temperature)."""


RETRIEVAL = "val/retrieval_r1"


@dataclass(frozen=True)
class EmbeddingModel:
    """A network to train, and the preprocessing of its inputs."""

    network: nn.Module
    """Maps inputs by name to raw embeddings by name."""
    preprocessing: Preprocessing
    texts: Texts
    """Maps captions to the token ids that the network reads."""
    export: Callable[[Path], None]
    is_trained: bool
    """Whether the network starts from trained weights, which are validated before the
    first step.
    """


def train_embeddings(
    run: Run,
    config: Any,
    model: EmbeddingModel,
    metric: str = RETRIEVAL,
    towers: Sequence[str] = ("image", "text"),
    teacher: Teacher | None = None,
    signature: str = "",
    validated: Mapping[str, Any] | None = None,
    **collated: Any,
) -> TrainState:
    """Train a model on embeddings.

    Args:
        config: configuration of the task.
        metric: metric that chooses the best model, unless ``eval.best_by`` does.
        towers: towers of the model, ``image``, ``text`` or both.
        teacher: gives the embeddings that the objective compares with.
        validated: ``negatives`` or ``triplets`` of ``EmbeddingValidator``.
        **collated: further arguments of ``PairCollate``.
    """
    options, tokens = config.train, model.texts
    objective = config.objective()
    best_by, measured = getattr(config.eval, "best_by", None), signature
    if best_by is not None:
        # Its value depends on the batch, the loss and the negatives.
        sections = config.model_dump(include={"loss", "negatives"})
        metric = best_by
        measured = f"train.batch_size {options.batch_size}, {sections}"
    if metric == "val/hard_negatives" and not (validated or {}).get("negatives"):
        raise ConfigError(
            f"eval.best_by is {metric!r}, but the first captions of the validation split have no "
            "hard negatives: see negatives.count and negatives.source"
        )
    cache_bytes = config.data.cache_mb * 2**20
    collate = PairCollate(
        PixelCache(model.preprocessing, cache_bytes) if "image" in towers else None,
        tokens if "text" in towers else None,
        options.captions,
        config.data.augment,
        options.seed,
        getattr(options, "plain_captions", 0.0),
        **collated,
    )
    loss = None
    if metric == LOSS:
        loss = partial(validation_loss, objective, collate, options.batch_size)
    validate = EmbeddingValidator(
        run.accelerator,
        model.network,
        towers,
        run.val_rows,
        # A cache of its own, which images of training cannot fill.
        PixelCache(model.preprocessing, cache_bytes),
        tokens,
        run.eval.batch_size,
        teacher,
        loss=loss,
        **validated or {},
    )
    if teacher is not None:
        budget = config.teacher.cache_mb * 2**20
        teacher.prepare(run.train_rows, options.captions, budget)
    decays = getattr(config, "decays", None)
    network = run.restore(model.network, signature, decays=decays)
    target = teacher or attrgetter("targets")
    task = EmbeddingTask(run.accelerator, network, objective, target, config.task)
    return train(
        run, task, collate, validate, model.export, metric, measured, model.is_trained
    )


class ClipModelConfig(Section):
    """The model to train: an open_clip model, or a dual encoder of pretrained parts."""

    name: str | None = None
    """Architecture of an open_clip model, such as ``ViT-B-32``."""
    kwargs: dict = {}
    """Shape of a model with random weights: a model JSON of open_clip ``{embed_dim,
    vision_cfg, text_cfg}``, merged into the JSON of ``name``. With ``image`` and
    ``text``: options of ``DualConfig``, such as ``{embed_dim: 256, hidden: 1024,
    dropout: 0.5}``.
    """
    image: PartConfig = PartConfig()
    """Pretrained image encoder, which forms a dual encoder together with ``text``; its
    projection heads start from random weights.
    """
    text: PartConfig = PartConfig()
    """Pretrained text encoder."""
    init: str | None = None
    """Weights to start from: the folder of an open_clip model or of a dual encoder of
    pretrained parts; with ``name``, a tag of open_clip such as ``openai`` or a
    checkpoint file, also one of Long-CLIP.
    """
    context_length: Annotated[int, Field(ge=2, le=16384)] | None = None
    """Number of positions to which the text tower of ``init``, an open_clip model, is
    stretched, as Long-CLIP does (77 to 248).
    """
    keep_positions: NonNegativeInt = 20
    """Number of positions, the first, that are not stretched; 20 in Long-CLIP."""

    @property
    def has_parts(self) -> bool:
        """Whether the model is made of pretrained parts that this section names."""
        return self.image.encoder is not None or self.text.encoder is not None

    @property
    def is_dual(self) -> bool:
        """Whether it is a dual encoder of parts, named here or in the folder ``init``.
        Raises ``ConfigError`` for a damaged folder.
        """
        with naming("model.init"):
            is_folder = self.init is not None and self.name is None
            return self.has_parts or (
                is_folder and has_model_type(str(self.init), MODEL_TYPE)
            )

    @model_validator(mode="after")
    def _check_clip_model(self) -> Self:
        if self.has_parts:
            with naming("model.kwargs", (TypeError, ValueError)):
                DualConfig("", "", {}, {}, **self.kwargs)
        for name, encoder in (("image", self.image), ("text", self.text)):
            if not encoder.pretrained and encoder.train_blocks is not None:
                raise ConfigError(
                    f"{name}.train_blocks is {encoder.train_blocks} with random weights, most of "
                    "which would stay random: set it to null"
                )
        return self


class ClipTrainConfig(CaptionTrainConfig):
    """Training an open_clip model or a dual encoder."""

    plain_captions: Fraction = 0.0
    """Fraction of captions that are lower-cased and lose their punctuation, as the
    output of captioners with a word vocabulary; for rewards of such captioners.
    """
    freeze_positions: NonNegativeInt = 0
    """Number of position embeddings of an open_clip model, the first, to freeze; 20 in
    Long-CLIP, 0 in SPECS.
    """


class ClipLossConfig(Section):
    """The loss of a dual encoder."""

    max_scale: MaxScale = 100.0
    """Largest logit scale (inverse temperature)."""


class BestByConfig(EvalConfig):
    """Validation of a contrastive model."""

    best_by: Literal["val/loss", "val/hard_negatives"] | None = None
    """Metric that chooses ``export/best`` and that ``patience`` watches: ``val/loss``,
    the loss on the validation split; ``val/hard_negatives``, how often the true caption
    scores higher than its hard negatives (``contrastive``); null is
    ``val/retrieval_r1``.
    """


class ClipConfig(RewardModelConfig):
    """An open_clip model or a dual encoder of pretrained parts."""

    model: ClipModelConfig = ClipModelConfig()
    """The model to train."""
    loss: ClipLossConfig = ClipLossConfig()
    """Weights of the terms of the loss."""
    train: ClipTrainConfig = ClipTrainConfig()

    def build_model(
        self, processes: int, tune: Callable[[Any], None] = lambda clip: None
    ) -> EmbeddingModel:
        """Build the model to train by ``processes``; ``tune`` freezes the untrained
        parts of an open_clip model.

        Raises:
            ConfigError: it cannot be loaded or made, or it has batch norm and the batch is split.
        """
        model = self.model
        max_scale = self.loss.max_scale
        start = self.model.init
        export: Any
        if model.is_dual:
            dual = pretrained_dual(model)
            encode = {"image": dual.encode_image, "text": dual.encode_text}
            network = TrainedEncoder(dual, encode, max_scale)
            preprocessing = dual.preprocessing
            export = dual.save_pretrained
            texts = dual.texts
        else:
            if start is not None:
                clip, shape = pretrained_clip(
                    model.name, start, model.context_length, model.keep_positions
                )
            else:
                clip, shape = random_clip(model.name, model.kwargs)
            preprocessing = preprocessing_of(clip.visual)
            network = trained_clip(clip, max_scale, self.train.freeze_positions)
            tune(clip)
            export = partial(save_clip, clip, shape)
            texts = clip_texts(int(clip.context_length), is_causal(clip))
        check_batch_norm(network, self.train, processes)
        is_trained = start is not None
        return EmbeddingModel(network, preprocessing, texts, export, is_trained)

    def decays(self, name: str, parameter: Tensor) -> bool:
        """CLIP's rule: weight decay for matrices, none for gains, biases and the
        temperature (Radford et al. 2021).

        Where text positions are frozen, their table has no decay either: it would move
        them without a gradient.
        """
        is_frozen = self.train.freeze_positions and name == "model.positional_embedding"
        return parameter.ndim > 1 and not is_frozen


def pretrained_dual(model: ClipModelConfig) -> PretrainedDual:
    """The dual encoder of ``model.init``, or of ``model.image`` and ``model.text``,
    frozen as ``train_blocks`` says.

    Raises:
        ConfigError: an encoder cannot be loaded, ``kwargs`` do not fit ``DualConfig``,
            or an encoder has fewer blocks than ``train_blocks``.
    """
    towers = {"image": model.image, "text": model.text}
    with naming("model", (TypeError, ValueError)):
        if model.init is not None:
            dual = PretrainedDual.from_pretrained(model.init)
        else:
            image = str(model.image.encoder)
            text = str(model.text.encoder)
            config = DualConfig(
                image, text, model.image.kwargs, model.text.kwargs, **model.kwargs
            )
            pretrained = [name for name, tower in towers.items() if tower.pretrained]
            dual = PretrainedDual(config, pretrained=pretrained)
    dual.requires_grad_(True)
    for name, encoder in towers.items():
        with naming(f"model.{name}.train_blocks is {encoder.train_blocks}"):
            open_blocks(getattr(dual, f"{name}_encoder"), encoder.train_blocks)
    return dual
