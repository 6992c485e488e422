"""Decoder-only vision-language models of Transformers behind the ``Captioner`` seam: Qwen-VL,
SmolVLM, LLaVA, Gemma.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rewards.base import naming
from rewards.images import frames_of
from rl_caption.captioners.base import LOADING_ERRORS, CaptionerError, reading
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import NextLogits, logits_without_cache
from rl_caption.captioners.generate import sample
from rl_caption.captioners.hf_families import Conventions, first_token
from rl_caption.captioners.huggingface import (
    HuggingFaceCaptioner,
    check_tokens,
    load_model,
    saved_prompt,
)
from rl_caption.captioners.self_check import Verdict, check
from rl_caption.captioners.tokens import Generated
from rl_caption.captioners.vlm_families import (
    Messages,
    as_messages,
    check_messages,
    family_of,
)
from rl_caption.captioners.vlm_policy import IMAGE_KEY, Mode, VisionLanguagePolicy, collate, update
from rl_caption.data.base import DataError, Row, load_image, pixel_key


class VisionLanguageCaptioner(HuggingFaceCaptioner):
    """A decoder-only vision-language model with its processor, and the prompt of rows that have
    none of their own.

    ``prompt`` is a text, or messages (a conversation whose last one is the user's).
    """

    augmentable = False
    verdict: Verdict | None = None
    """What the check of the model found; None without weights."""

    def __init__(
        self, policy: VisionLanguagePolicy, processor: Any, prompt: str | Messages, name: str = ""
    ) -> None:
        super().__init__(policy, processor.image_processor, processor.tokenizer, name=name)
        self.processor, self.messages = processor, as_messages(prompt, None)
        self.prompt: Any = prompt
        self.reply_start: str = policy.family.reply_start(processor, self.messages)
        self.longest_prompt = getattr(
            policy.config.get_text_config(), "max_position_embeddings", None
        )

    @classmethod
    def load(
        cls,
        name: str,
        config: Any,
        prompt: str | Messages | None,
        dtype: torch.dtype,
        source: dict[str, Any],
        processor_kwargs: Mapping[str, Any],
        weights: bool = True,
    ) -> VisionLanguageCaptioner:
        """Load a model whose ``config.json`` is read; see ``HuggingFaceCaptioner.load``.

        Raises ``CaptionerError`` for a model whose captions are not scored as Transformers' own
        ``generate`` draws them (``self_check``).
        """
        family = family_of(config.model_type)
        loaded_class = model_class(config)
        if config.architectures and loaded_class.__name__ not in config.architectures:
            raise CaptionerError(
                f"{name!r} is no captioner: its architectures are {config.architectures}"
            )
        with reading(f"processor (processor_config.json, tokenizer_config.json) of {name!r}"):
            processor = load_processor(name, **source, **processor_kwargs)
        family.check_processor(processor)
        prompt = saved_prompt(name) if prompt is None else prompt
        prompt = family.default_prompt if prompt is None else prompt
        if isinstance(prompt, list):
            check_messages(prompt, "model.prompt")
        else:
            prompt = " ".join(prompt.split())
        model = load_model(loaded_class, name, config, (), dtype, source, weights)
        family.prepare(model)
        ends, unwritten = special_tokens(processor, model)
        reply_end = family.reply_end(processor, as_messages(prompt, None))
        closing = processor.tokenizer(reply_end, add_special_tokens=False)["input_ids"]
        conventions = Conventions(
            start=(),
            eos=next((token for token in closing if token in ends), ends[0]),
            pad=first_token("padding", processor.tokenizer.pad_token_id, ends[0]),
            vocab_size=model.get_output_embeddings().weight.shape[0],
            forbidden=(*ends, *unwritten),
        )
        check_tokens(processor.tokenizer, conventions)
        captioner = cls(VisionLanguagePolicy(model, family, conventions), processor, prompt, name)
        if weights:
            check(captioner)
        return captioner

    def adapt(
        self, frozen: Sequence[str] | None, lora: dict[str, Any] | None, checkpointed: bool
    ) -> None:
        super().adapt(frozen, lora, checkpointed)
        if (lora is not None or checkpointed) and self.policy.model.device.type != "meta":
            check(self)

    def _processors(self) -> list[Any]:
        return [self.processor]

    @property
    def cache_memory(self) -> int:
        """Bytes left for visual tokens of a frozen vision tower, and for prepared rows."""
        return self.policy.cache.room

    @cache_memory.setter
    def cache_memory(self, size: int) -> None:
        self.policy.cache.room = size

    @property
    def mode(self) -> dict[str, Any]:
        """How captions are scored and sampled (``Mode``), as a checkpoint keeps it."""
        return asdict(self.policy.mode)

    @mode.setter
    def mode(self, values: dict[str, Any]) -> None:
        self.policy.mode = Mode(**values)

    def keep_on_disk(self, folder: Path, max_bytes: int) -> None:
        """Keep visual tokens in a folder, too: ``model.cache_dir``.

        Raises:
            CaptionerError: they change in training.
        """
        trained = self.policy.trained_visual_parameter()
        if trained is not None or not self.policy.takes_features:
            why = (
                f"{trained!r} is trained"
                if trained
                else f"a {self.family.name!r} takes no visual tokens"
            )
            raise CaptionerError(
                f"model.cache_dir is for visual tokens that stay the same, but {why}: leave it out"
            )
        self.policy.cache.keep_on_disk(folder, max_bytes)

    def preprocess(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """What the model's processor makes of each row; prompts are padded on the left.

        The frames of a video are several images. Where vision tower and projector are frozen,
        pixels are left out where their visual tokens are kept.
        """
        apart = self.policy.encodes_rows()
        kept = apart and self.policy.cache.enabled
        fingerprint = self.policy.fingerprint() if kept else ""
        prompts = [self._inputs(row, fingerprint) for row in rows]
        return collate(prompts, self.pad_token_id, apart)

    def _inputs(self, row: Row, fingerprint: str) -> dict[str, Tensor]:
        """The model's inputs of one row, kept where there is room; with a fingerprint without
        pixels, which visual tokens stand for once they are kept.
        """
        policy, place = self.policy, pixel_key(row["image_id"], row["image"])
        key = repr((*place, row.get("prompt"), bool(fingerprint)))
        inputs = policy.cache.read(key)
        known = inputs is not None and (
            not fingerprint or policy.knows_images(inputs[IMAGE_KEY], fingerprint)
        )
        if known:
            return inputs
        inputs = self.prepare(row)
        if not policy.cache.enabled:
            return inputs
        kept = inputs
        if fingerprint:
            digest = hashlib.blake2b(digest_size=16)
            for name in sorted(policy.image_inputs & inputs.keys()):
                update(digest, name, inputs[name])
            bits = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
            inputs[IMAGE_KEY] = bits[None]
            kept = {name: t for name, t in inputs.items() if not t.is_floating_point()}
        policy.cache.write(key, kept)
        return inputs

    def prepare(self, row: Row) -> dict[str, Tensor]:
        """The model's inputs of one row."""
        images = [load_image(frame) for frame in frames_of(row["image"])]
        with naming(f"image {row['image_id']!r} cannot be prepared", LOADING_ERRORS, DataError):
            inputs = self.family.inputs(
                self.processor, as_messages(self.messages, row.get("prompt")), images
            )
        length = inputs["input_ids"].shape[1]
        if self.longest_prompt is not None and length >= self.longest_prompt:
            raise DataError(
                f"image {row['image_id']!r} and its prompt have {length} tokens: "
                f"{self.family.name} has positions "
                f"for {self.longest_prompt}; let its processor make images smaller "
                f"(model.processor_kwargs)"
            )
        return inputs

    def max_tokens_of(self, row: Row) -> int | None:
        return self.max_tokens

    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        plain = [self.reply_start + " ".join(text.split()) for text in texts]
        # An image token in a caption would be read without its image, an EOS would end it.
        encoded = self.tokenizer(plain, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return [[*ids, self.eos_token_id][:max_tokens] for ids in encoded]

    def image_states(self, policy: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Captioner.image_states``: visual tokens in place of pixels, where the model takes
        them.
        """
        if not policy.takes_features:
            return inputs
        if not torch.is_grad_enabled() and policy.trained_visual_parameter() is not None:
            return inputs
        return policy(**inputs, encode=True)

    def next_logits(
        self, policy: Any, inputs: dict[str, Tensor], max_new_tokens: int
    ) -> NextLogits:
        if policy.mode.decode != "cache":
            return logits_without_cache(self, policy, inputs)
        return super().next_logits(policy, inputs, max_new_tokens)

    def generate_with_scores(
        self,
        policy: Any,
        inputs: dict[str, Tensor],
        decoding: Decoding,
        noise: Tensor | None = None,
    ) -> Generated:
        """See ``Captioner``. Nothing is taken from the model's generation settings."""
        if policy.takes_features:
            inputs = policy(**inputs, encode=True)
        rows = torch.arange(len(inputs["input_ids"]))
        together = policy.mode.decode == "cache" and policy.joins(inputs)
        groups = [rows] if together else list(rows.split(1))
        return self._generate_groups(policy, inputs, decoding, noise, groups)

    def _generate_tokens(
        self,
        policy: Any,
        inputs: dict[str, Tensor],
        decoding: Decoding,
        noise: Tensor | None,
        longest: int | None,
    ) -> Generated:
        how = policy.mode.decode
        if how == "cache" or decoding.num_beams > 1:
            return super()._generate_tokens(policy, inputs, decoding, noise, longest)
        device = inputs["input_ids"].device
        nothing = torch.empty(0, decoding.max_new_tokens, device=device)
        numbers = nothing if noise is None else noise[0]
        (row,) = policy.rows(inputs)
        row = policy.given(row)
        captions = sample(self, row, decoding, numbers, together=how == "generate")
        return Generated(captions[None], None)


def model_class(config: Any) -> Any:
    """The class of Transformers that loads a vision-language model with this configuration."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type])


def load_processor(name: str, **options: Any) -> Any:
    """The processor of a vision-language model: tokenizer, image processor and chat template; pads
    on the left.
    """
    return AutoProcessor.from_pretrained(
        name, padding_side="left", truncation_side="left", **options
    )


def special_tokens(processor: Any, model: Any) -> tuple[list[int], list[int]]:
    """Tokens that may end an answer, the tokenizer's EOS first; and the special ones that no answer
    may contain.

    An image token without its image could not be scored. The model's other ends come from its
    generation settings.
    """
    tokenizer, declared = processor.tokenizer, model.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    ends = [end for end in dict.fromkeys(ends) if end is not None]
    # The list of named special tokens lacks some that no text shows either, such as SmolVLM's
    # <row_1_col_1>.
    unseen = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    config = model.config
    images = {getattr(config, key, None) for key in ("image_token_id", "video_token_id")} - {None}
    return ends, sorted({*unseen, *tokenizer.all_special_ids, *images} - set(ends))
