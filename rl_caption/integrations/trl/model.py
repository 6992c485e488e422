"""A decoder-only vision-language model: loaded, frozen in part, adapted, decoded, exported."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rewards.base import naming
from rewards.model_files import export_hint, load_complete, transformers_options
from rl_caption.captioners.adaptation import freeze
from rl_caption.captioners.base import LOADING_ERRORS
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import load_model, read_config
from rl_caption.captioners.vlm import load_processor as read_processor
from rl_caption.captioners.vlm import model_class, special_tokens
from rl_caption.captioners.vlm_families import VISION, VisionLanguageFamily, family_of
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.integrations.trl.config import VlmConfig, VlmLoraConfig
from rl_caption.integrations.trl.rows import messages
from rl_caption.runtime.errors import ConfigError, config_errors


@dataclass(frozen=True)
class VlmReader:
    """Makes a model's inputs of rows, as TRL makes them in training: padded on the left."""

    processor: Any
    """Tokenizer, image processor and chat template; pads on the left."""
    prompt: str
    """The prompt of rows that have none of their own."""
    input_kind = "pixels"

    def try_row(self, row: Row) -> None:
        """See ``Captioner.try_row``."""
        with naming(f"image {row['image_id']!r} cannot be prepared", LOADING_ERRORS, DataError):
            self.preprocess([row])

    def preprocess(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The model's inputs for B rows."""
        from trl.data_utils import prepare_multimodal_messages

        asked = [
            prepare_multimodal_messages(
                messages(row, self.prompt), images=[load_image(row["image"])]
            )
            for row in rows
        ]
        template = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        return dict(
            self.processor.apply_chat_template(
                asked, **template, processor_kwargs={"padding": True}
            )
        )


@dataclass(frozen=True)
class Vlm(VlmReader):
    """A model with its processor. It has what ``training.validation.decode_candidates`` asks of a captioner."""

    policy: Any
    eos_token_ids: list[int]
    """The tokenizer's EOS, then the model's others."""
    suppressed: list[int]
    """Special tokens other than EOS, which are never sampled: an image token without its image cannot be scored."""
    generation_config: GenerationConfig
    """The model's own settings, which the export writes. Those of ``policy`` are empty but for EOS."""

    @property
    def eos_token_id(self) -> int:
        """The tokenizer's."""
        return self.eos_token_ids[0]

    def generate(
        self, policy: Any, inputs: dict[str, Tensor], decoding: Decoding, noise: None = None
    ) -> Tensor:
        """Decode by greedy or beam search; returns the new token ids [B, 1, L]."""
        inputs = {
            key: value.to(policy.dtype) if value.is_floating_point() else value
            for key, value in inputs.items()
        }
        written = policy.generate(
            **inputs,
            do_sample=False,
            num_beams=decoding.num_beams,
            max_new_tokens=decoding.max_new_tokens,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.processor.tokenizer.pad_token_id,
            suppress_tokens=self.suppressed or None,
        )
        return written[:, None, inputs["input_ids"].shape[1] :]

    def decode(self, token_ids: Tensor) -> list[str]:
        """N texts of token ids [N, L]."""
        return [
            text.strip()
            for text in self.processor.batch_decode(token_ids, skip_special_tokens=True)
        ]


def load_processor(config: VlmConfig) -> tuple[Any, Any]:
    """Load the configuration and the processor of ``model.name``, not its weights.

    Raises:
        ConfigError: the model cannot be found, is no decoder-only vision-language model, or has no chat template.
    """
    name = f"model.name {config.name!r}"
    with config_errors(f"{name} cannot be loaded"):
        if hint := export_hint(config.name):
            raise ConfigError(f"it is the folder of a run{hint}")
        options = _source(config)
        shape = read_config(config.name, options)
    if getattr(shape, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name} is an encoder-decoder ({shape.model_type}), which TRL cannot train: use scst.py"
        )
    with config_errors(f"{name} cannot be loaded"):
        processor = read_processor(config.name, **options, **config.processor_kwargs)
        VisionLanguageFamily(shape.model_type).check_processor(processor)
    if family_of(shape.model_type).caption_type != 0:
        raise ConfigError(
            f"{name} is a {shape.model_type!r}: TRL gives captions the token_type_ids of a prompt, whose tokens see "
            "those after them; use scst.py"
        )
    if not hasattr(shape, "image_token_id"):
        raise ConfigError(
            f"{name}: its configuration has no image_token_id, which TRL keeps from being sampled"
        )
    return shape, processor


def _source(config: VlmConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained``: which revision, and how a model of others is read."""
    return {"revision": config.revision, **transformers_options(config.name)}


def load_vlm(config: VlmConfig, dtype: str) -> Vlm:
    """Load ``model.name`` with its weights in ``dtype``, such as ``float32``.

    Raises:
        ConfigError: as for ``load_processor``, and where the weights cannot be loaded.
    """
    shape, processor = load_processor(config)
    with config_errors(f"model.name {config.name!r} cannot be loaded"):
        policy = load_model(
            model_class(shape), config.name, shape, (), getattr(torch, dtype), _source(config)
        )
    tokenizer = processor.tokenizer
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ends, special = special_tokens(processor, policy)
    settings = policy.generation_config
    # ``generate`` takes what it is not told from the model's own settings: a ban on repeated words, say.
    policy.generation_config = GenerationConfig(eos_token_id=ends)
    return Vlm(processor, config.prompt, policy, ends, special, settings)


def adapt(policy: Any, lora: VlmLoraConfig | None, patterns: list[str] | None) -> Any:
    """Decide what is trained: not what ``patterns`` match, and of the rest all weights or, with ``lora``, adapters.

    None stands for the patterns of the vision tower. Without ``lora``, freezes parameters and returns None; with it,
    returns the ``peft.LoraConfig`` from which TRL makes adapters of the linear layers named by ``lora.target_modules``.

    Raises:
        CaptionerError: a pattern matches no parameter.
        ConfigError: with ``lora`` a pattern matches no module, or nothing is left to train.
    """
    frozen = VISION if patterns is None else patterns
    if lora is None:
        freeze(policy, frozen, required=patterns is not None)
        if not any(parameter.requires_grad for parameter in policy.parameters()):
            raise ConfigError(f"model.freeze {patterns} leaves nothing to train")
        return None
    from peft import LoraConfig

    modules = dict(policy.named_modules())
    for pattern in patterns or []:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(
                f"model.freeze has {pattern!r}, which matches no module: with LoRA, modules are named"
            )
    linear_layers = [
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
        and name.rsplit(".", 1)[-1] in lora.target_modules
        and not any(fnmatchcase(name, pattern) for pattern in frozen)
    ]
    if not linear_layers:
        raise ConfigError(
            f"lora.target_modules {lora.target_modules} names no linear layer outside model.freeze {list(frozen)}"
        )
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=linear_layers, bias="none")


def load_weights(policy: Any, checkpoint: str | Path) -> None:
    """Load all weights of a checkpoint.

    Many models, Qwen2-VL among them, have other parameter names in files than in memory. Transformers' trainer does
    not translate them and leaves out those weights without an error.
    """
    policy.load_state_dict(
        load_complete(type(policy), str(checkpoint), dtype=policy.dtype).state_dict()
    )


def load_deepspeed_weights(policy: Any, checkpoint: str | Path) -> None:
    """Load the weights of a checkpoint of DeepSpeed, of all its processes, into a model that is not sharded."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), lazy_mode=False)
    policy.load_state_dict(weights, strict=False)  # with LoRA, adapters alone


def export(vlm: Vlm, policy: Any, folder: Path) -> None:
    """Write a plain Transformers model (adapters are merged already) with its processor, completely or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    policy.save_pretrained(partial)
    vlm.generation_config.save_pretrained(partial)  # over that of the training
    vlm.processor.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
