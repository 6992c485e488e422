"""A decoder-only vision-language model: loaded, frozen in part, adapted, exported."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from rl_caption.build import ConfigError
from rl_caption.captioners.adaptation import freeze, freeze_unused
from rl_caption.trl.config import VlmConfig, VlmLoraConfig

VISION = ("*visual*", "*vision*")
"""Patterns of the names of vision towers."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Vlm:
    """A model with what belongs to it.

    Attributes:
        policy: the model.
        processor: tokenizer, image processor and chat template; pads on the left.
        eos_token_ids: ids that end a caption.
        suppressed: special tokens that are no part of a caption, never sampled (an image token without its image ends
            the scoring of a sample with an error).
        generation_config: the model's own, which TRL changes.
    """

    policy: Any
    processor: Any
    eos_token_ids: list[int]
    suppressed: list[int]
    generation_config: GenerationConfig


def load_processor(config: VlmConfig) -> tuple[Any, Any]:
    """Load what is light of ``model.name``: its configuration and its processor.

    Raises:
        ConfigError: it is not there, is no decoder-only vision-language model, or its processor has no chat template.
    """
    name, revision = config.name, config.revision
    try:
        shape = AutoConfig.from_pretrained(name, revision=revision)
        if getattr(shape, "is_encoder_decoder", False):
            raise ConfigError(
                f"model.name {name!r} is an encoder-decoder ({shape.model_type}), which TRL cannot train: use scst.py"
            )
        processor = AutoProcessor.from_pretrained(
            name, revision=revision, padding_side="left", truncation_side="left", **config.processor_kwargs
        )
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.name {name!r} cannot be loaded: {error}") from error
    _check(shape, processor, name)
    return shape, processor


def load_vlm(config: VlmConfig, dtype: torch.dtype) -> Vlm:
    """Load ``model.name``.

    Raises:
        ConfigError: as for ``load_processor``, and for its weights.
    """
    shape, processor = load_processor(config)
    try:
        policy = AutoModelForImageTextToText.from_pretrained(config.name, revision=config.revision, dtype=dtype)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.name {config.name!r} cannot be loaded: {error}") from error
    tokenizer = processor.tokenizer
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    declared = policy.generation_config.eos_token_id
    declared = declared if isinstance(declared, list) else [declared]
    ends = list(dict.fromkeys(end for end in (tokenizer.eos_token_id, *declared) if end is not None))
    # The list of named special tokens lacks some that no text shows either, such as SmolVLM's <row_1_col_1>.
    unseen = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = {*unseen, *tokenizer.all_special_ids, shape.image_token_id} - set(ends)
    return Vlm(policy, processor, ends, sorted(special), copy.deepcopy(policy.generation_config))


def _check(shape: Any, processor: Any, name: str) -> None:
    if not hasattr(processor, "image_processor"):
        raise ConfigError(f"model.name {name!r} has no image processor: expected a vision-language model")
    if not getattr(processor, "chat_template", None):
        raise ConfigError(
            f"model.name {name!r}: its processor has no chat template, which TRL needs for images; expected a model "
            "such as Qwen2-VL or SmolVLM"
        )
    if not hasattr(shape, "image_token_id"):
        raise ConfigError(
            f"model.name {name!r}: its configuration has no image_token_id, which TRL keeps from being sampled"
        )


def freeze_parameters(policy: Any, patterns: list[str] | None) -> None:
    """Freeze the parameters whose names match one of ``patterns``; None freezes the vision tower.

    Raises:
        CaptionerError: a pattern matches no parameter.
        ConfigError: nothing is left to train.
    """
    if patterns is None:
        freeze_unused(policy, VISION)
    else:
        freeze(policy, patterns)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ConfigError(f"model.freeze {patterns} leaves nothing to train")


def lora_config(lora: VlmLoraConfig, policy: Any, patterns: list[str] | None) -> Any:
    """``peft.LoraConfig`` for the linear layers that ``lora.target_modules`` names and ``patterns`` do not match.

    Args:
        lora: rank, scale and names.
        policy: the model.
        patterns: of names that get none; None is those of the vision tower.

    Raises:
        ConfigError: there is none, or one of ``patterns`` matches nothing.
    """
    from peft import LoraConfig

    frozen = VISION if patterns is None else patterns
    modules = dict(policy.named_modules())
    for each in patterns or []:
        if not any(fnmatchcase(name, each) for name in modules):
            raise ConfigError(f"model.freeze has {each!r}, which matches no module: with LoRA, modules are named")
    found = [
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
        and name.rsplit(".", 1)[-1] in lora.target_modules
        and not any(fnmatchcase(name, each) for each in frozen)
    ]
    if not found:
        raise ConfigError(
            f"lora.target_modules {lora.target_modules} names no linear layer outside model.freeze {list(frozen)}"
        )
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=found, bias="none")


@contextmanager
def decoding_from_nothing(policy: Any, settings: GenerationConfig) -> Iterator[None]:
    """Inside the ``with``, ``settings`` are all there is: ``generate`` fills what is None from the model's own."""
    before = policy.generation_config
    policy.generation_config = settings
    try:
        yield
    finally:
        policy.generation_config = before


def export(vlm: Vlm, policy: Any, folder: Path) -> None:
    """Write a plain Transformers model with its processor: at once or not at all, adapters already merged."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with decoding_from_nothing(policy, vlm.generation_config):
        policy.save_pretrained(partial)
    vlm.processor.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
