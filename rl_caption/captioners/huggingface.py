"""Captioning models of Transformers behind the ``Captioner`` seam: BLIP, GIT, ViT +
GPT-2, BLIP-2, InstructBLIP, Florence-2; and vision-language models that answer a
prompt, such as Qwen-VL.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import cached_file

from rewards.base import naming
from rewards.images import frames_of
from rewards.model_files import check_folder, read_object, transformers_options
from rl_caption.captioners.adaptation import (
    add_lora,
    checkpoint_layers,
    freeze,
    plain_weights,
    save_adapters,
    untie,
    unties,
)
from rl_caption.captioners.base import Captioner, CaptionerError, Inputs, reading
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import (
    NextLogits,
    Prefixes,
)
from rl_caption.captioners.generate import sample
from rl_caption.captioners.hf_families import (
    FAMILIES,
    Conventions,
    check_architectures,
    plain_tokens,
)
from rl_caption.captioners.packed import State
from rl_caption.captioners.policy import Policy, collate
from rl_caption.captioners.self_check import check
from rl_caption.captioners.tokens import Generated, caption_mask, forbid
from rl_caption.captioners.vlm_families import FAMILIES as CHAT_FAMILIES
from rl_caption.captioners.vlm_families import (
    Prompt,
    VisionLanguageFamily,
    as_messages,
)
from rl_caption.data.base import DataError, Row, load_image, pixel_key
from rl_caption.data.files import write_json

SETTINGS = "rl_caption.json"
"""File with the prompt in the folder of an exported model."""
NEVER_READ = ("encoder.pooler.", "git.img_temporal_embedding.")
"""Weights that may be missing: no caption depends on them."""
ADAPTERS_FOLDER = "adapters"
"""Subfolder of an exported model that holds the low-rank adapters alone."""


class HuggingFaceCaptioner(Captioner):
    """A pretrained model with its image processor, its tokenizer and the prompt for
    rows that have none: a text or, for a model that answers, messages.
    """

    policy: Any

    def __init__(
        self,
        policy: Policy,
        processors: list[Any],
        tokenizer: Any,
        prompt: Prompt = "",
        name: str = "",
    ) -> None:
        self.policy = policy
        self.processors = processors
        self.processor = self.processors[0]
        """Processor of images and text; for some models of images alone."""
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.name = name
        self.adapters: Any = None
        """Configuration of the adapters, if they are to be exported alone, too."""
        self.family = policy.family
        conventions = policy.conventions
        self.eos_token_id = conventions.eos
        self.pad_token_id = conventions.pad
        self.max_tokens = conventions.max_tokens
        size = conventions.vocab_size
        special = {*tokenizer.all_special_ids, *conventions.forbidden}
        special.update(range(len(tokenizer), size))  # they have no text
        special &= set(range(size)) - {conventions.eos}
        self.forbidden = tuple(sorted(special))
        self.row_prompts = self.family.row_prompts
        self.augmentable = not self.row_prompts
        self.before = self.family.before(self.processor, prompt)
        text = policy.config.get_text_config()
        self.longest_prompt = getattr(text, "max_position_embeddings", sys.maxsize)
        # WordPiece decodes "man's" to "man ' s", other words than the references have.
        # Transformers joined them when these models were published. BPE knows its spaces.
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        self.rejoin = type(model).__name__ == "WordPiece"

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        prompt: Prompt | None = None,
        dtype: str = "float32",
        processor_kwargs: Mapping[str, Any] | None = None,
    ) -> HuggingFaceCaptioner:
        """Load a model by its name on the hub, or from a folder.

        Captions continue ``prompt`` after a space, or answer it; None takes the prompt
        saved in the folder, if any. ``processor_kwargs`` are options of the processor.

        Raises:
            CaptionerError: there is no such model, its family is unknown, weights,
                tokenizer or image processor are missing or do not fit, or captions are
                not scored as Transformers' own ``generate`` draws them
                (``self_check``).
        """
        name = str(name)
        with reading(repr(name)):
            check_folder(Path(name))
            source = transformers_options(name)
            config = AutoConfig.from_pretrained(name, **source)
            model_type = config.model_type
            if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
                raise CaptionerError(
                    f"{name!r} is a {model_type!r}: expected a model that writes texts of images "
                    "(Transformers' AutoModelForImageTextToText)"
                )
            check_architectures(name, model_type, config.architectures)
            family: Any = FAMILIES.get(model_type)
            if family is None:
                family = CHAT_FAMILIES.get(model_type, VisionLanguageFamily)(model_type)
            processors, tokenizer = load_processors(
                name, family, source, processor_kwargs or {}
            )
            settings = Path(name) / SETTINGS
            if prompt is None and settings.is_file():
                prompt = read_object(settings).get("prompt", "")
            prompt = family.default_prompt if prompt is None else prompt
            if isinstance(prompt, str):
                prompt = " ".join(prompt.split())
            elif not family.row_prompts:
                raise CaptionerError(
                    f"prompt {prompt!r:.80}: {family.name} has no chat template, expected a text"
                )
            model = load_model(name, config, getattr(torch, dtype), source)
            conventions = family.conventions(model, processors[0], tokenizer, prompt)
            check_tokens(tokenizer, conventions)
            policy = Policy(model, family, conventions)
            captioner = cls(policy, processors, tokenizer, prompt, name)
            check(captioner)
            return captioner

    def adapt(
        self,
        frozen: Sequence[str] | None,
        lora: Mapping[str, Any] | None,
        checkpointed: bool,
    ) -> None:
        """Choose what is trained and how: ``model.freeze``, ``model.lora``,
        ``model.gradient_checkpointing``.

        Raises:
            CaptionerError: a pattern or a module's name matches nothing, nothing is
                left to train, or ``peft`` is missing.
        """
        model = self.policy.model
        patterns = self.family.frozen if frozen is None else frozen
        freeze(model, patterns, required=frozen is not None)
        if lora is not None:  # after freezing: adapters of a frozen part are trained
            targets = lora["target_modules"] or self.family.lora_targets
            config = add_lora(model, lora, targets)
            self.adapters = config if lora.get("export_adapters") else None
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise CaptionerError(
                f"model.freeze is {list(patterns)}: every parameter is frozen, name fewer"
            )
        if checkpointed:
            checkpoint_layers(model)
        if lora is not None or checkpointed:
            check(self)

    def save_pretrained(self, policy: Any, path: Path) -> None:
        """Write a plain model of Transformers (adapters merged into its weights), its
        processors and the prompt.

        With ``model.lora.export_adapters``, the adapters alone go to ``path/adapters``,
        as ``peft`` writes them.
        """
        policy.model.save_pretrained(path, state_dict=plain_weights(policy.model))
        config = copy.deepcopy(policy.config)
        config.dtype = "float32"  # Transformers would cast merged weights to the type that is named here
        if unties(policy.model):
            untie(config)
        config.save_pretrained(path)
        if self.adapters is not None:
            save_adapters(
                policy.model, self.adapters, self.name, Path(path) / ADAPTERS_FOLDER
            )
        for processor in self.processors:
            processor.save_pretrained(path)
        write_json(Path(path) / SETTINGS, {"prompt": self.prompt})

    def preprocess(self, rows: Sequence[Row]) -> Inputs:
        """``pixel_values`` [B, 3, H, W]; for a model that answers, its processor's
        output for each row, with prompts padded on the left. The frames of a video are
        several images.
        """
        if self.row_prompts:
            keys = None
            if self.policy.keeps_tokens():
                keys = [
                    repr((pixel_key(row["image_id"], row["image"]), row.get("prompt")))
                    for row in rows
                ]
            return collate([self.prepare(row) for row in rows], self.pad_token_id, keys)
        for row in rows:
            self.max_tokens_of(row)
        images = [load_image(row["image"]) for row in rows]
        process = getattr(self.processor, "image_processor", self.processor)
        ids = [row["image_id"] for row in rows]
        with naming(f"images {ids[:4]} cannot be prepared", (Exception,), DataError):
            pixels = process(images=images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels}

    def prepare(self, row: Row) -> Inputs:
        """The inputs of one row of a model that answers a prompt."""
        images = [load_image(frame) for frame in frames_of(row["image"])]
        messages = as_messages(self.prompt, row.get("prompt"))
        what = f"image {row['image_id']!r}"
        with naming(f"{what} cannot be prepared", (Exception,), DataError):
            inputs: Inputs = self.family.inputs(self.processor, messages, images)
        length = inputs["input_ids"].shape[1]
        if length >= self.longest_prompt:
            raise DataError(
                f"{what} and its prompt have {length} tokens: {self.family.name} has "
                f"positions for {self.longest_prompt}; let its processor make images "
                "smaller (model.processor_kwargs)"
            )
        return inputs

    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        """Token ids of texts as they follow the prompt, the model's or the row's, at
        most ``max_tokens`` each, EOS included.
        """
        start, between = self.before
        row_prompt = (
            None if row is None or self.family.chat_prompts else row.get("prompt")
        )
        if row_prompt:
            messages = as_messages(self.prompt, row_prompt)
            start, between = self.family.before(self.processor, messages)
        # A line break is EOS where OPT is the language model.
        plain = [start + between + " ".join(text.split()) for text in texts]
        # An image token in a caption would be read without its image, an EOS would end it.
        options = {"add_special_tokens": False, "split_special_tokens": True}
        encoded = self.tokenizer(plain, **options)["input_ids"]
        read = len(plain_tokens(self.tokenizer, start))
        return [[*ids[read:], self.eos_token_id][:max_tokens] for ids in encoded]

    def image_states(self, policy: Any, inputs: Inputs) -> Inputs:
        """See ``Captioner.image_states``; visual tokens only where the model takes them."""
        trains = policy.trains_images() and not torch.is_grad_enabled()
        if trains or not policy.takes_features:
            return inputs
        return policy(**inputs, encode=True)

    def generate_with_scores(
        self,
        policy: Any,
        inputs: Inputs,
        decoding: Decoding,
        noise: Tensor | None = None,
    ) -> Generated:
        """See ``Captioner``. Nothing is taken from the model's generation settings."""
        with torch.no_grad():
            inputs = policy(**inputs, encode=True)
        parts = []
        for rows, part_inputs in policy.parts(inputs):
            numbers = None if noise is None else noise[rows]
            if policy.mode.prefix != "none" or decoding.num_beams > 1:
                captions = super().generate_with_scores(
                    policy, part_inputs, decoding, numbers
                )
            else:
                row = policy.arguments(part_inputs)
                captions = Generated(sample(self, row, decoding, numbers), None)
            parts.append(captions)
        longest = max(ids.shape[-1] for ids, _ in parts)
        padded = []
        for ids, _ in parts:
            margin = (0, longest - ids.shape[-1])
            padded.append(nn.functional.pad(ids, margin, value=self.pad_token_id))
        scores = [some for _, some in parts if some is not None]
        return Generated(torch.cat(padded), torch.cat(scores) if scores else None)

    def next_logits(
        self, policy: Any, inputs: Inputs, max_new_tokens: int
    ) -> NextLogits:
        """See ``Captioner``."""
        if policy.mode.prefix == "none":
            return super().next_logits(policy, inputs, max_new_tokens)
        state: State | None = None

        def next_logits(prefixes: Prefixes | None) -> Tensor:
            """Logits [N, V] after each prefix; the state of the call before is kept."""
            nonlocal state
            if prefixes is None:
                logits, state = policy(**inputs, max_tokens=max_new_tokens)
                return logits
            return policy(prefixes=prefixes, state=state)

        return next_logits

    def token_logits(
        self,
        model: nn.Module,
        inputs: Inputs,
        token_ids: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, K, L, V] of captions [B, K, L]; forbidden tokens have ``FORBIDDEN_LOGIT``."""
        return forbid(model(**inputs, token_ids=token_ids, mask=mask), self.forbidden)

    def decode(self, token_ids: Tensor) -> list[str]:
        """See ``Captioner``; white space becomes single spaces."""
        mask = caption_mask(token_ids, self.eos_token_id)
        texts = self.tokenizer.batch_decode(
            [ids[some] for ids, some in zip(token_ids, mask, strict=True)],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=self.rejoin,
        )
        return [" ".join(text.split()) for text in texts]


def load_processors(
    name: str, family: Any, source: dict[str, Any], options: Mapping[str, Any]
) -> tuple[list[Any], Any]:
    """Load the processors that are saved beside the weights; return them and the
    tokenizer. ``CaptionerError`` if one is missing or damaged.
    """
    what = f"image processor and tokenizer (tokenizer.json and others) of {name!r}"
    with reading(what):
        # Without one of its files, Transformers makes up a tokenizer.
        cached_file(name, "tokenizer_config.json", **source)
        options = {**source, **family.processor_options, **options}
        if family.has_processor:
            processors = [AutoProcessor.from_pretrained(name, **options)]
        else:
            images = AutoImageProcessor.from_pretrained(name, **options)
            processors = [images, AutoTokenizer.from_pretrained(name, **source)]
        tokenizer = getattr(processors[0], "tokenizer", processors[-1])
        if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
            raise CaptionerError(
                "the files of its tokenizer, such as tokenizer.json, are missing"
            )
    return processors, tokenizer


def load_model(
    name: str, config: Any, dtype: torch.dtype, source: dict[str, Any]
) -> Any:
    """Load a model.

    Raises:
        CaptionerError: files are damaged, or weights are missing or do not fit.
    """
    model_class = getattr(
        transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type]
    )
    with reading(f"weights of {name!r}"):
        model, report = model_class.from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True, **source
        )
    missing = sorted(report["missing_keys"])
    if missing := [name for name in missing if not name.startswith(NEVER_READ)]:
        raise CaptionerError(
            f"{len(missing)} weights are missing, such as {missing[0]}"
        )
    return model


def check_tokens(tokenizer: Any, conventions: Conventions) -> None:
    """Raise ``CaptionerError`` for a tokenizer with ids beyond the model's output layer."""
    last = max(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    size = conventions.vocab_size
    for token in (last, conventions.eos, conventions.pad, *conventions.start):
        if token not in range(size):
            raise CaptionerError(
                f"the tokenizer and config.json have a token {token}, the output layer has {size}: "
                "they do not belong together"
            )
