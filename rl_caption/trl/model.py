"""A decoder-only vision-language model: loaded, frozen in part, adapted, decoded, exported."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from rl_caption.captioners.adaptation import freeze
from rl_caption.data.base import Row, load_image
from rl_caption.engines import dropout_off
from rl_caption.errors import ConfigError
from rl_caption.trl.config import VlmConfig, VlmLoraConfig
from rl_caption.trl.rows import messages

VISION = ("*visual*", "*vision*")
"""Patterns of the names of vision towers."""


@dataclass(frozen=True)
class Vlm:
    """A model with its processor."""

    policy: Any
    processor: Any
    """Tokenizer, image processor and chat template; pads on the left."""
    eos_token_ids: list[int]
    suppressed: list[int]
    """Special tokens but EOS, never sampled: an image token without its image could not be scored."""
    generation_config: GenerationConfig
    """The model's own, which TRL changes."""


def load_processor(config: VlmConfig) -> tuple[Any, Any]:
    """Load configuration and processor of ``model.name``, not its weights.

    Raises:
        ConfigError: it is not there, is no decoder-only vision-language model, or its processor has no chat template.
    """
    name, options = f"model.name {config.name!r}", {"revision": config.revision}
    with _loading(config):
        shape = AutoConfig.from_pretrained(config.name, **options)
    if getattr(shape, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder ({shape.model_type}), which TRL cannot train: use scst.py")
    options |= {"padding_side": "left", "truncation_side": "left", **config.processor_kwargs}
    with _loading(config):
        processor = AutoProcessor.from_pretrained(config.name, **options)
    if not hasattr(processor, "image_processor"):
        raise ConfigError(f"{name} has no image processor: expected a vision-language model")
    if not getattr(processor, "chat_template", None):
        raise ConfigError(
            f"{name}: its processor has no chat template, which TRL needs for images; expected a model such as "
            "Qwen2-VL or SmolVLM"
        )
    if not hasattr(shape, "image_token_id"):
        raise ConfigError(f"{name}: its configuration has no image_token_id, which TRL keeps from being sampled")
    return shape, processor


@contextmanager
def _loading(config: VlmConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.name {config.name!r} cannot be loaded: {error}") from error


def load_vlm(config: VlmConfig, dtype: torch.dtype) -> Vlm:
    """Load ``model.name``.

    Raises:
        ConfigError: as for ``load_processor``, and for its weights.
    """
    shape, processor = load_processor(config)
    with _loading(config):
        policy = AutoModelForImageTextToText.from_pretrained(config.name, revision=config.revision, dtype=dtype)
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


def freeze_parameters(policy: Any, patterns: list[str] | None) -> None:
    """Freeze the parameters whose names match one of ``patterns``; None freezes the vision tower.

    Raises:
        CaptionerError: a pattern matches no parameter.
        ConfigError: nothing is left to train.
    """
    if patterns is None:
        freeze(policy, VISION, required=False)
    else:
        freeze(policy, patterns)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ConfigError(f"model.freeze {patterns} leaves nothing to train")


def lora_config(lora: VlmLoraConfig, policy: Any, patterns: list[str] | None) -> Any:
    """``peft.LoraConfig`` for the linear layers that ``lora.target_modules`` names and ``patterns`` do not match.

    Raises:
        ConfigError: there is none, or one of ``patterns`` (None: those of the vision tower) matches nothing.
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
    """Inside the ``with``, the model's own settings, from which ``generate`` fills what is None, are ``settings``."""
    before = policy.generation_config
    policy.generation_config = settings
    try:
        yield
    finally:
        policy.generation_config = before


def caption_images(
    vlm: Vlm,
    policy: Any,
    rows: Sequence[Row],
    prompt: str,
    max_new_tokens: int,
    num_beams: int = 1,
    batch_size: int = 8,
) -> dict[str, str]:
    """Image id -> caption, in the order of ``rows``; every process decodes a part of them and gets all.

    Args:
        vlm: its processor and special tokens are used.
        policy: the model, on its device; the same weights in every process.
        rows: what to caption.
        prompt: for rows without their own.
        max_new_tokens: length limit in tokens, EOS included.
        num_beams: 1 is greedy.
        batch_size: images at a time, in each process.
    """
    from trl.data_utils import prepare_multimodal_messages

    state = PartialState()
    settings = GenerationConfig(
        do_sample=False,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        eos_token_id=vlm.eos_token_ids,
        pad_token_id=vlm.processor.tokenizer.pad_token_id,
        suppress_tokens=vlm.suppressed or None,
    )
    # A batch exactly as TRL makes it in training, padded on the left.
    template = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    mine = range(state.process_index, len(rows), state.num_processes)
    captions: list[tuple[str, str]] = []
    hidden = None if state.is_main_process else True  # None: off a terminal
    bar = tqdm(range(0, len(mine), batch_size), desc="captioning", unit="batch", disable=hidden)
    with torch.no_grad(), dropout_off(policy), decoding_from_nothing(policy, settings):
        for start in bar:
            batch = [rows[index] for index in mine[start : start + batch_size]]
            asked = [
                prepare_multimodal_messages(messages(row, prompt), images=[load_image(row["image"])]) for row in batch
            ]
            inputs = vlm.processor.apply_chat_template(asked, **template, processor_kwargs={"padding": True})
            inputs = inputs.to(policy.device, policy.dtype)
            written = policy.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
            texts = vlm.processor.batch_decode(written, skip_special_tokens=True)
            captions += [(row["image_id"], text.strip()) for row, text in zip(batch, texts, strict=True)]
    known = dict(gather_object(captions) if state.num_processes > 1 else captions)
    return {row["image_id"]: known[row["image_id"]] for row in rows}


def export(vlm: Vlm, policy: Any, folder: Path) -> None:
    """Write a plain Transformers model, adapters already merged, with its processor; completely or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with decoding_from_nothing(policy, vlm.generation_config):
        policy.save_pretrained(partial)
    vlm.processor.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
