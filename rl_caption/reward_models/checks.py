"""Mistakes that the configuration of a reward model shows by itself, found before data or earlier runs cost time."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rewards.clip.bottleneck import BottleneckConfig
from rewards.clip.dual import MODEL_TYPE, DualConfig
from rewards.clip.grammar_head import GrammarConfig
from rewards.clip.pretrained import LIBRARIES
from rewards.model_files import has_model_type, read_object
from rewards.text.detail_units import default_tagger
from rl_caption.config.checks import mistakes
from rl_caption.config.reward_models import (
    CLIP_TASKS,
    TEXT_TASKS,
    EncoderConfig,
    Method,
    PartConfig,
    RewardModelConfig,
    RewardModelTrainConfig,
)
from rl_caption.data.formats import check_path
from rl_caption.errors import ConfigError, naming
from rl_caption.launch import processes_started
from rl_caption.reward_models.distillation import check_names, student_config
from rl_caption.reward_models.encoders import is_frozen, random_clip

TOKENS = 49408
"""Size of the vocabulary of CLIP's tokenizer, which open_clip models and L-CLIP read."""
_DISTILLATION: tuple[Method, ...] = ("distill_image", "distill_text", "distill_dual")
_KEYS: dict[tuple[Method, ...], str] = {
    CLIP_TASKS: "model.name model.context_length model.keep_positions model.image loss.max_scale "
    "train.freeze_positions train.plain_captions",
    ("contrastive", "positive_augmented"): "train.sentences",
    ("contrastive", "positive_augmented", "distill_dual"): "eval.best_by",
    ("contrastive", "distill_text", "distill_dual"): "loss.hard negatives.count negatives.source negatives.kwargs "
    "negatives.share",
    ("contrastive",): "negatives.positives negatives.positive_source loss.short loss.pca_rank "
    "loss.hard_scale loss.false_negatives train.label_smoothing train.short_captions",
    ("positive_augmented",): "loss.positive_images loss.positive_captions train.trainable train.lora_rank "
    "train.lora_alpha",
    (
        "specificity",
    ): "loss.alpha loss.beta loss.gamma loss.margin_units loss.max_margin loss.fixed_margin loss.symmetric "
    "train.shuffle_rate train.negatives train.shuffle_per",
    (*_DISTILLATION, "semantic_bottleneck"): "teacher.name teacher.pretrained teacher.precision teacher.batch_size "
    "teacher.cache_mb teacher.cache_dir",
    _DISTILLATION: "loss.l1 loss.cosine",
    ("semantic_bottleneck",): "model.language_model",
    ("distill_image",): "train.freeze_patch_embed",
    ("distill_dual",): "model.image_init model.text_init loss.regulator loss.regulator_reduction train.freeze_text",
    (*CLIP_TASKS, "grammar"): "model.text",
    (*CLIP_TASKS, "distill_text", "distill_dual", "grammar", "language_model", "semantic_bottleneck"): "train.captions",
    (*CLIP_TASKS, "distill_image", "distill_dual"): "data.augment data.features_root",
}
READ_BY = {key: tasks for tasks, keys in _KEYS.items() for key in keys.split()}
"""Key -> the tasks that read it; keys that are not here are read by all."""


def check_config(config: RewardModelConfig) -> None:
    """Check all that can be checked without data, weights and the folders of earlier runs.

    Raises:
        ConfigError: a value is out of range, is not read by the task, is missing, or does not fit another.
        RewardError: the task needs detail units of captions, and the package textblob is not installed.
    """
    wrong = [*mistakes(config), *_ignored_keys(config)]
    if config.task in (*_DISTILLATION, "semantic_bottleneck") and config.teacher.name is None:
        reads = "reads the text features of a" if config.task in TEXT_TASKS else "distils a"
        wrong.append(f"teacher.name is not set: {config.task} {reads} teacher, such as ViT-B-32 or a folder")
    if config.model.init is not None and config.model.kwargs and config.task != "grammar":
        wrong.append("model.kwargs and model.init are both set, but init already has a shape: leave kwargs out")
    if config.task == "grammar":
        wrong += _unfit_grammar(config.model)
    else:
        wrong += [*_unfit_trainable(config), *_unfit_long(config), *_unfit_dual(config), *_unfit_text(config)]
    if wrong:
        raise ConfigError("; ".join(wrong))
    if config.task in (*TEXT_TASKS, "grammar"):
        return
    if config.task == "specificity" or (config.negatives.count and config.negatives.source == "rules"):
        default_tagger()  # of the optional package textblob
    if trains_dual(config.model):
        return
    if config.task in CLIP_TASKS:
        network = _meta_clip(config)
        if network is not None:
            _check_vocabulary(network.token_embedding.num_embeddings, "model.kwargs.text_cfg.vocab_size")
            started = processes_started(os.environ)
            network.requires_grad_(not _trains_parts(config))
            check_batch_norm(network, config.train, started[1] if started else 1)
    elif config.model.init is None:
        model = config.model
        check_names(model.kwargs)
        _check_vocabulary(model.kwargs.get("vocab_size", TOKENS), "model.kwargs.vocab_size")
        if model.image_init is None and model.text_init is None:  # else folders have a part of the shape
            student_config(model.kwargs)


def _unfit_grammar(model: EncoderConfig) -> Iterator[str]:
    """Mistakes in the text encoder of a grammar head, and in the shape of the head; a sentence each."""
    if (model.init is None) == (model.text.encoder is None):
        yield (
            "a grammar head needs one text encoder: set either model.init (an L-CLIP, its text tower, or a head) or "
            "model.text.encoder"
        )
    if model.init is not None and model.text.kwargs:
        yield "model.text.kwargs is set, but model.text.encoder is not: leave it out"
    if not model.text.pretrained:
        yield "model.text.pretrained is false, but a grammar head needs a pretrained encoder: leave it out"
    yield from _unfit_shape(model.kwargs, GrammarConfig, "a grammar head", text="", text_kwargs={})


def _unfit_shape(kwargs: Mapping[str, Any], kind: Callable[..., Any], what: str, **others: Any) -> Iterator[str]:
    """Mistakes in ``model.kwargs``, arguments of the dataclass ``kind``; a sentence each.

    ``others`` are arguments of ``kind`` that ``model.kwargs`` may not have.
    """
    allowed = inspect.signature(kind).parameters.keys() - others.keys()
    if kwargs.keys() - allowed:
        yield f"model.kwargs has {sorted(kwargs.keys() - allowed)}: {what} takes {sorted(allowed)}"
        return
    try:
        kind(**others, **kwargs)
    except (TypeError, ValueError) as error:
        yield f"model.kwargs: {error}"


def _unfit_text(config: RewardModelConfig) -> Iterator[str]:
    """Mistakes in a model of captions alone; a sentence each."""
    model, data = config.model, config.data
    if config.task == "semantic_bottleneck":
        if model.language_model is None:
            yield "model.language_model is not set: a folder or hub name of a causal language model, such as gpt2"
        others = {
            key: each for key, each in asdict(BottleneckConfig(1, 1)).items() if key not in ("soft_tokens", "ending")
        }
        yield from _unfit_shape(model.kwargs, BottleneckConfig, config.task, **others)
    elif config.task in TEXT_TASKS and model.kwargs.get("vocab_size", 2**16) not in range(260, 2**20):
        yield f"model.kwargs.vocab_size is {model.kwargs['vocab_size']!r}: expected 260 to {2**20 - 1}"
    if config.task == "text_regression" and data.target is None and data.format != "caption_targets":
        yield f"data.format is {data.format!r}: text_regression learns from caption_targets"


def trains_dual(model: EncoderConfig) -> bool:
    """Whether the model is a dual encoder of pretrained parts; ``ConfigError`` where the folder ``init`` is damaged."""
    if model.image.encoder is not None or model.text.encoder is not None:
        return True
    with naming("model.init"):
        return model.init is not None and model.name is None and has_model_type(model.init, MODEL_TYPE)


def _unfit_dual(config: RewardModelConfig) -> Iterator[str]:
    """Mistakes in a dual encoder of pretrained parts; a sentence each."""
    model, train, data = config.model, config.train, config.data
    parts, frozen = (model.image.encoder, model.text.encoder), model.image.train_blocks == 0
    if data.features_root is not None and data.augment:
        yield "data.features_root and data.augment are both set, but stored features have one view: leave augment out"
    if data.features_root is not None and not frozen:
        yield "data.features_root needs a frozen image encoder: set model.image.train_blocks to 0"
    if data.features_root is not None and config.task == "positive_augmented" and config.loss.positive_images:
        yield "loss.positive_images needs pixels: set it to 0, or leave data.features_root out"
    if data.features_kwargs.keys() - {"pattern", "views"}:
        yield f"data.features_kwargs is {data.features_kwargs}: reward models read only pattern and views"
    if data.features_kwargs.get("views") and config.task not in CLIP_TASKS:
        yield "data.features_kwargs.views is set, but the teacher would not see these views: leave it out"
    if not trains_dual(model):
        comes = model.init is not None and model.name is None and not Path(model.init).exists()  # warm_start makes it
        if config.task not in CLIP_TASKS or comes:
            return
        if data.features_root is not None:
            yield "data.features_root is set, but model.image, whose features it holds, is not: set both or neither"
        if (model.image, model.text) != (PartConfig(), PartConfig()):
            yield "model.image and model.text are for dual encoders, but this is an open_clip model: leave them out"
        return
    if model.init is None and None in parts:
        yield f"model.image.encoder and model.text.encoder are {parts[0]!r} and {parts[1]!r}: set both"
    if model.name is not None or (model.init is not None and parts != (None, None)):
        yield "model.image and model.text are set together with model.name or model.init: leave one of them out"
    others: dict[str, Any] = {"image": "", "text": "", "image_kwargs": {}, "text_kwargs": {}}
    yield from _unfit_shape(model.kwargs, DualConfig, "a dual encoder", **others)
    for name, part in (("image", model.image), ("text", model.text)):
        if not part.pretrained and (part.encoder or "").partition(":")[0] not in LIBRARIES:
            yield (
                f"model.{name}.pretrained is false, but model.{name}.encoder is {part.encoder!r}: random weights are "
                f"for models of {', '.join(LIBRARIES)}"
            )
        if not part.pretrained and part.train_blocks is not None:
            yield (
                f"model.{name}.train_blocks is {part.train_blocks} with random weights, most of which would stay "
                "random: set it to null"
            )
    if model.context_length is not None or train.freeze_positions or train.trainable != "projections":
        yield (
            "model.context_length, train.freeze_positions and train.trainable are for open_clip models: leave them out "
            "and set train_blocks of model.image and model.text"
        )


def _trains_parts(config: RewardModelConfig) -> bool:
    is_clip = not trains_dual(config.model)
    return is_clip and config.task == "positive_augmented" and config.train.trainable != "all"


def _unfit_trainable(config: RewardModelConfig) -> Iterator[str]:
    """Mistakes in which weights are trained; a sentence each."""
    train, default = config.train, RewardModelTrainConfig()
    if _trains_parts(config) and config.model.init is None:
        yield (
            f"train.trainable is {train.trainable!r} with random weights, most of which would stay random: set "
            "model.init, or train.trainable all"
        )
    for name in ("lora_rank", "lora_alpha"):
        value = getattr(train, name)
        if config.task == "positive_augmented" and train.trainable != "lora" and value != getattr(default, name):
            yield f"train.{name} is {value}, but train.trainable is {train.trainable!r}: leave it out, or take lora"


def _unfit_long(config: RewardModelConfig) -> Iterator[str]:
    """Mistakes in what only training on long captions reads; a sentence each."""
    model, loss, train = config.model, config.loss, config.train
    if loss.false_negatives == "mask" and train.label_smoothing:
        yield "loss.false_negatives mask removes pairs that train.label_smoothing needs: set one of them"
    if config.eval.best_by == "val/hard_negatives" and not config.negatives.count:
        yield "eval.best_by is 'val/hard_negatives', but there are no hard negatives: set negatives.count"
    if loss.hard and not config.negatives.count:
        yield f"loss.hard is {loss.hard}, but there are no hard negatives: set negatives.count"
    if loss.hard and config.task == "distill_dual" and train.freeze_text and (model.init or model.text_init):
        yield f"loss.hard is {loss.hard}, which trains the text tower, but train.freeze_text is on: set one of them"
    if config.eval.best_by == "val/loss" and config.task == "distill_dual":
        yield "eval.best_by val/loss is for contrastive and positive_augmented: leave it out, or set val/hard_negatives"
    if config.negatives.count and config.negatives.source == "data":
        changing = {"train.sentences": train.sentences, "negatives.positives": config.negatives.positives}
        for key in [key for key, value in changing.items() if value]:
            yield f"{key} changes the captions that negatives.source 'data' was made from: leave one of them out"
    if config.negatives.count and train.label_smoothing:
        yield "train.label_smoothing would reward hard negatives: leave it out, or set negatives.count to 0"
    if train.sentences is not None and not (len(train.sentences) == 2 and train.sentences == sorted(train.sentences)):
        yield f"train.sentences is {train.sentences}: expected [least, most]"
    if model.context_length is not None and model.init is None:
        yield "model.context_length stretches model.init, which is not set: use model.kwargs.text_cfg.context_length"
    if loss.short and loss.pca_rank >= train.batch_size:
        yield (
            f"loss.pca_rank is {loss.pca_rank}: expected less than train.batch_size, {train.batch_size}, as so many "
            "principal components reproduce the whole batch"
        )
    if loss.short and train.short_captions == "references" and not config.data.long_captions:
        yield "train.short_captions is 'references', which needs data.long_captions: set that to true"


def _ignored_keys(config: RewardModelConfig) -> Iterator[str]:
    """Keys that ``config.task`` does not read and that are not at their default; a sentence each."""
    default = RewardModelConfig()
    for key, tasks in READ_BY.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if config.task not in tasks and value != getattr(getattr(default, section), name):
            readers = f"only {', '.join(tasks)}" if tasks else "no reward model does"
            yield f"{key} is {value!r}, but the task {config.task} does not read it ({readers}): leave it out"


def check_batch_norm(network: nn.Module, train: RewardModelTrainConfig, processes: int) -> None:
    """Raise ``ConfigError`` where ``network`` trains batch norm, and a step has several micro-batches or processes.

    Batch norm takes the statistics of one micro-batch of one process: the step would depend on how the batch is split,
    and the running statistics, which the exported model uses, on the process. Frozen layers keep their statistics.
    """
    layers = [
        name for name, module in network.named_modules() if isinstance(module, _BatchNorm) and not is_frozen(module)
    ]
    micro = train.micro_batch_size or train.batch_size
    if not layers or (processes == 1 and micro == train.batch_size):
        return
    split = [f"{processes} processes train together: start one"] if processes > 1 else []
    if micro != train.batch_size:
        split.append(f"train.micro_batch_size is {micro} with train.batch_size {train.batch_size}: leave it null")
    raise ConfigError(
        f"the model has {len(layers)} layers of batch norm (such as {layers[0]}), so every step must be one "
        f"micro-batch of one process. {'; '.join(split)}; or choose an image encoder without batch norm, a ViT"
    )


def check_inputs(to_train: Sequence[RewardModelConfig], complete: Sequence[RewardModelConfig]) -> None:
    """Check that the data of every run exist, and every folder that it starts from, unless another run will make it.

    Args:
        to_train: runs that one call of a program trains.
        complete: finished runs that these start from; they are not trained again.

    Raises:
        ConfigError: a folder will not be there; the message says what to do.
        DataError: ``data.path`` of a run does not exist; the message has its ``data.source``.
    """
    for config in to_train:
        check_path(config.data, f"the run {config.run.dir}: ")
    made = [Path(config.run.dir).resolve() for config in to_train]
    for config in to_train:
        for key, folder in _folders_read(config).items():
            if Path(folder).exists() or any(Path(folder).resolve().is_relative_to(run) for run in made):
                continue
            message = f"{key} is {folder!r}, which does not exist, and no run of warm_start writes it"
            if complete:
                done = ", ".join(known.run.dir for known in complete)
                message += (
                    f". {done}, which comes before {config.run.dir}, is complete, so runs before it are not trained "
                    f"again. Put {folder} back, or remove {done}: then this command trains all of them again"
                )
            raise ConfigError(message)


def _folders_read(config: RewardModelConfig) -> dict[str, str]:
    """Configuration key -> local folder that the run starts from."""
    model, teacher = config.model, config.teacher
    found = {"model.image_init": model.image_init, "model.text_init": model.text_init}
    if model.name is None and config.task not in TEXT_TASKS:  # theirs may be a name on the hub
        found["model.init"] = model.init
    if teacher.name is not None and teacher.pretrained is None and not teacher.name.startswith("hf-hub:"):
        found["teacher.name"] = teacher.name if "/" in teacher.name else None
    return {key: folder for key, folder in found.items() if folder is not None}


def _meta_clip(config: RewardModelConfig) -> Any:
    """The open_clip model on the meta device; None where its folder is not there yet, or damaged (loading it tells)."""
    name, kwargs = config.model.name, config.model.kwargs
    if config.model.init is not None and name is None:
        try:
            kwargs = read_object(Path(config.model.init) / "open_clip_config.json")["model_cfg"]
        except (OSError, ValueError, KeyError):
            return None
    with torch.device("meta"):
        return random_clip(name, kwargs)[0]


def _check_vocabulary(tokens: Any, key: str) -> None:
    if isinstance(tokens, int) and tokens < TOKENS:
        raise ConfigError(f"{key} is {tokens}: captions are read with CLIP's tokenizer, which has {TOKENS} tokens")
