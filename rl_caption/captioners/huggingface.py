"""Captioning models of Transformers behind the ``Captioner`` seam: BLIP, GIT, ViT + GPT-2, BLIP-2,
InstructBLIP.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import cached_file

from rewards.base import naming
from rewards.model_files import (
    check_folder,
    read_object,
    transformers_options,
)
from rl_caption.captioners.adaptation import (
    add_lora,
    checkpoint_layers,
    freeze,
    plain_weights,
    save_adapters,
    trained_share,
    untie,
    unties,
)
from rl_caption.captioners.base import LOADING_ERRORS, Captioner, CaptionerError, reading
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import NextLogits, Prefixes, select_rows
from rl_caption.captioners.hf_families import (
    FAMILIES,
    Conventions,
    check_architectures,
    plain_tokens,
)
from rl_caption.captioners.hf_policy import NO_TOKEN, DecodeState, HuggingFacePolicy
from rl_caption.captioners.packed import unique_prefixes
from rl_caption.captioners.tokens import Generated, forbid
from rl_caption.data.base import DataError, Row, load_image

if TYPE_CHECKING:
    from rl_caption.captioners.vlm_policy import VisionLanguagePolicy

logger = logging.getLogger(__name__)

SETTINGS = "rl_caption.json"
"""File with family and prompt in the folder of an exported model."""
Q_FORMER = "qformer_tokenizer"
"""Subfolder of InstructBLIP's second tokenizer."""
ADAPTERS_FOLDER = "adapters"
"""Subfolder of an exported model that holds the low-rank adapters alone."""


class HuggingFaceCaptioner(Captioner):
    """A pretrained model with its image processor and tokenizer, and the prompt of rows that have
    none of their own.
    """

    policy: Any
    family: Any

    def __init__(
        self,
        policy: HuggingFacePolicy | VisionLanguagePolicy,
        images: Any,
        tokenizer: Any,
        q_former_tokenizer: Any = None,
        prompt: str = "",
        name: str = "",
    ) -> None:
        self.policy, self.images, self.tokenizer = policy, images, tokenizer
        self.q_former_tokenizer, self.prompt, self.name = q_former_tokenizer, prompt, name
        self.encoder_trained: bool | None = None
        """Whether the states of an image need a gradient; None until ``image_states`` finds out."""
        self.cache_memory = 0
        """Bytes for prepared images; used by vision-language models."""
        self.adapters: Any = None
        """Configuration of the adapters, if they are to be exported alone, too."""
        self.family = policy.family
        conventions = policy.conventions
        self.eos_token_id: int = conventions.eos
        self.pad_token_id: int = conventions.pad
        self.max_tokens: int | None = conventions.max_tokens
        vocabulary = conventions.vocab_size
        # Rows of the output layer beyond the tokenizer have no text; special tokens are not for
        # captions.
        kept_out = {
            *tokenizer.all_special_ids,
            *conventions.forbidden,
            *range(len(tokenizer), vocabulary),
        }
        self.forbidden: tuple[int, ...] = tuple(
            sorted(i for i in kept_out - {conventions.eos} if i < vocabulary)
        )
        self.prompt_length = len(self._prompt_of(None)[1])
        # WordPiece decodes "man's" to "man ' s", other words for the rewards than those of the
        # references. Transformers joined them when these models were published. BPE knows its
        # spaces.
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        self.rejoin = type(model).__name__ == "WordPiece"

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        prompt: str | list[dict[str, Any]] | None = None,
        dtype: str = "float32",
        processor_kwargs: Mapping[str, Any] | None = None,
    ) -> HuggingFaceCaptioner:
        """Load a model of this class by its name on the hub, or from a folder;
        ``loading.load_captioner`` knows which.

        Captions continue ``prompt`` after a space, or answer it (``vlm.VisionLanguageCaptioner``,
        which alone takes messages and ``processor_kwargs``); None takes the prompt saved in the
        folder, if any.

        Raises:
            CaptionerError: there is no such model, its family is unknown, or weights, tokenizer or
                image processor are missing or do not fit.
        """
        name = str(name)
        source = hub_options(name)
        with reading(repr(name)):
            config = read_config(name, source)
            return cls.load(
                name, config, prompt, getattr(torch, dtype), source, processor_kwargs or {}
            )

    @classmethod
    def load(
        cls,
        name: str,
        config: Any,
        prompt: str | list[dict[str, Any]] | None,
        dtype: torch.dtype,
        source: dict[str, Any],
        processor_kwargs: Mapping[str, Any],
        weights: bool = True,
    ) -> HuggingFaceCaptioner:
        """Load a model whose ``config.json`` is read; see ``from_pretrained`` and
        ``loading.load_captioner``.
        """
        if processor_kwargs:
            raise CaptionerError(
                f"model.processor_kwargs is for vision-language models: {config.model_type!r}"
            )
        if config.model_type not in FAMILIES:
            raise CaptionerError(
                f"{name!r} is a {config.model_type!r}: expected one of {', '.join(FAMILIES)}"
            )
        family = FAMILIES[config.model_type]
        family.check(config)
        model_class = getattr(transformers, family.model_class)
        model = load_model(model_class, name, config, family.never_trained, dtype, source, weights)
        with reading(
            f"image processor (processor_config.json or preprocessor_config.json) of {name!r}"
        ):
            images = AutoImageProcessor.from_pretrained(
                name, backend="pil", **source
            )  # whatever else is installed
        second = _read_tokenizer(name, Q_FORMER, source) if family.q_former_tokenizer else None
        tokenizer = _read_tokenizer(name, "", source)
        prompt = saved_prompt(name) if prompt is None else prompt
        prompt = family.default_prompt if prompt is None else prompt
        if not isinstance(prompt, str):
            raise CaptionerError(
                f"prompt {prompt!r:.80}: {family.name} has no chat template, expected a text"
            )
        prompt = " ".join(prompt.split())
        conventions = family.conventions(model, tokenizer, second, prompt)
        check_tokens(tokenizer, conventions)
        policy = HuggingFacePolicy(model, family, conventions)
        freeze(model, family.never_trained, required=False)
        return cls(policy, images, tokenizer, second, prompt, name)

    def adapt(
        self, frozen: Sequence[str] | None, lora: dict[str, Any] | None, checkpointed: bool
    ) -> None:
        """Choose what is trained and how: ``model.freeze``, ``model.lora``,
        ``model.gradient_checkpointing``.

        Raises:
            CaptionerError: a pattern or a module's name matches nothing, nothing is left to train,
                or ``peft`` is missing.
        """
        model = self.policy.model
        patterns = self.family.frozen if frozen is None else tuple(frozen)
        freeze(model, patterns)
        if lora is not None:  # after freezing: adapters of a frozen part are trained
            targets = lora["target_modules"] or self.family.lora_targets
            config = add_lora(model, lora["r"], lora["alpha"], lora["dropout"], targets)
            self.adapters = config if lora.get("export_adapters") else None
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise CaptionerError(
                f"model.freeze is {list(patterns)}: every parameter is frozen, name fewer"
            )
        if checkpointed:
            checkpoint_layers(model)
            self.policy.share_prefix = False
        how = (
            " (adapters)"
            if lora is not None
            else f" (frozen: {', '.join(patterns)})"
            if patterns
            else ""
        )
        counts = f"{trained_share(model)} parameters are trained{how}"
        limits = (
            "" if self.max_tokens is None else f", captions of at most {self.max_tokens} tokens"
        )
        if os.environ.get("RANK", "0") == "0":
            logger.info("%s: %s; prompt %r%s", self.family.name, counts, self.prompt, limits)

    def save_pretrained(self, policy: Any, path: Path) -> None:
        """Write a plain model of Transformers (adapters merged into its weights), its processors
        and the prompt.

        With ``model.lora.export_adapters``, the adapters alone go to ``path/adapters``, as ``peft``
        writes them.
        """
        policy.model.save_pretrained(path, state_dict=plain_weights(policy.model))
        config = copy.deepcopy(policy.config)
        config.dtype = (
            "float32"  # Transformers would cast merged weights to the type that is named here
        )
        if unties(policy.model):
            untie(config)
        config.save_pretrained(path)
        if self.adapters is not None:
            save_adapters(policy.model, self.adapters, self.name, Path(path) / ADAPTERS_FOLDER)
        for processor in self._processors():
            processor.save_pretrained(path)
        settings = {"family": self.family.name, "prompt": self.prompt}
        (Path(path) / SETTINGS).write_text(json.dumps(settings, indent=1, ensure_ascii=False))

    def _processors(self) -> list[Any]:
        """What is saved beside the weights: one processor of Transformers' own class, where the
        family has one.
        """
        processors = [
            processor
            for processor in (self.images, self.tokenizer, self.q_former_tokenizer)
            if processor is not None
        ]
        if self.family.processor_class is None:
            return processors
        queries = getattr(self.policy.config, "num_query_tokens", None)
        options = {} if queries is None else {"num_query_tokens": queries}
        return [getattr(transformers, self.family.processor_class)(*processors, **options)]

    def preprocess(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """``pixel_values`` [B, 3, H, W]; if a row has its own prompt, also ``prompt_ids`` [B, P],
        padded with -1.
        """
        images = [load_image(row["image"]) for row in rows]
        with naming(
            f"images {[row['image_id'] for row in rows][:4]} cannot be prepared",
            LOADING_ERRORS,
            DataError,
        ):
            inputs = {
                "pixel_values": self.images(images=images, return_tensors="pt")["pixel_values"]
            }
        if any(row.get("prompt") is not None for row in rows) and not self.family.encoder_prompt:
            prompts = [torch.tensor(self._prompt_of(row)[1], dtype=torch.long) for row in rows]
            inputs["prompt_ids"] = nn.utils.rnn.pad_sequence(
                prompts, batch_first=True, padding_value=NO_TOKEN
            )
        return inputs

    def max_tokens_of(self, row: Row) -> int | None:
        return self._max_tokens_after(len(self._prompt_of(row)[1]))

    def _max_tokens_after(self, prompt_length: int) -> int | None:
        return (
            None
            if self.max_tokens is None
            else self.max_tokens + self.prompt_length - prompt_length
        )

    def _prompt_of(self, row: Row | None) -> tuple[str, tuple[int, ...]]:
        """What a row's caption goes on from, as text and token ids: its own prompt, or else the
        captioner's.
        """
        row_prompt = None if row is None else row.get("prompt")
        if (
            row is not None
            and row_prompt is not None
            and self.family.fixed_prompt
            and " ".join(row_prompt.split()) != self.prompt
        ):
            raise DataError(
                f"image {row['image_id']!r} has the prompt {row_prompt!r:.80}: {self.family.name} "
                f"reads one prompt for "
                "all images (model.prompt)"
            )
        if self.family.encoder_prompt:
            return "", ()
        if row is None or row_prompt is None:
            return self.prompt, plain_tokens(self.tokenizer, self.prompt)
        prompt = " ".join(row_prompt.split())
        ids = plain_tokens(self.tokenizer, prompt)
        if self.max_tokens is not None and len(ids) >= self.max_tokens + self.prompt_length:
            raise DataError(
                f"image {row['image_id']!r} has a prompt of {len(ids)} tokens: {self.family.name} "
                f"has positions for "
                f"{self.max_tokens + self.prompt_length}, the caption included"
            )
        return prompt, ids

    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        prompt, start = self._prompt_of(row)
        plain = [
            " ".join(text.split()) for text in texts
        ]  # a line break is EOS where OPT is the language model
        prompted = [f"{prompt} {text}" if prompt else text for text in plain]
        encoded = self.tokenizer(prompted, add_special_tokens=False)["input_ids"]
        return [[*ids[len(start) :], self.eos_token_id][:max_tokens] for ids in encoded]

    def image_states(self, policy: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Captioner.image_states``; ``inputs`` if the encoder is trained and gradients are
        disabled.
        """
        if self.encoder_trained is None:
            training = policy.training
            # a resumed run finds out again, and must not draw more for dropout than one not
            # interrupted
            policy.eval()
            with torch.enable_grad():
                some = policy(pixel_values=inputs["pixel_values"][:1], encode=True)
            policy.train(training)
            self.encoder_trained = bool(some.requires_grad)
        if self.encoder_trained and not torch.is_grad_enabled():
            return inputs
        prompts = {name: inputs[name] for name in ("prompt_ids",) if name in inputs}
        return {"states": policy(pixel_values=inputs["pixel_values"], encode=True), **prompts}

    def generate_with_scores(
        self,
        policy: Any,
        inputs: dict[str, Tensor],
        decoding: Decoding,
        noise: Tensor | None = None,
    ) -> Generated:
        """See ``Captioner``. Nothing is taken from the model's generation settings.

        Images whose prompts have equally many tokens are decoded as one batch.
        """
        if "prompt_ids" not in inputs:
            return self._generate_tokens(policy, inputs, decoding, noise, self.max_tokens)
        lengths = (inputs["prompt_ids"] != NO_TOKEN).sum(-1)
        groups = [(lengths == length).nonzero().squeeze(1) for length in lengths.unique()]
        return self._generate_groups(policy, inputs, decoding, noise, groups)

    def _generate_groups(
        self,
        policy: Any,
        inputs: dict[str, Tensor],
        decoding: Decoding,
        noise: Tensor | None,
        groups: Sequence[Tensor],
    ) -> Generated:
        """Captions of a batch whose groups of rows are decoded apart."""
        batches: list[Generated] = []
        for rows in groups:
            some, longest = (
                select_rows(inputs, rows) if len(groups) > 1 else inputs,
                self.max_tokens,
            )
            if "prompt_ids" in some:
                length = int((some["prompt_ids"][0] != NO_TOKEN).sum())
                some["prompt_ids"] = some["prompt_ids"][:, :length]
                longest = self._max_tokens_after(length)
            numbers = None if noise is None else noise[rows]
            batches.append(self._generate_tokens(policy, some, decoding, numbers, longest))
        order = torch.cat(list(groups)).argsort()
        longest = max(generated.token_ids.shape[-1] for generated in batches)
        padded = [
            nn.functional.pad(ids, (0, longest - ids.shape[-1]), value=self.pad_token_id)
            for ids, _ in batches
        ]
        scores = [generated.scores for generated in batches if generated.scores is not None]
        return Generated(torch.cat(padded)[order], torch.cat(scores)[order] if scores else None)

    def next_logits(
        self, policy: Any, inputs: dict[str, Tensor], max_new_tokens: int
    ) -> NextLogits:
        """See ``Captioner``; prompts of rows must have equally many tokens."""
        state: DecodeState | None = None

        def next_logits(prefixes: Prefixes | None) -> Tensor:
            nonlocal state
            if prefixes is None:
                logits, state = policy(**inputs, max_tokens=max_new_tokens)
                return logits
            return policy(prefixes=prefixes, decode_state=state)

        return next_logits

    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def token_logits(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        token_ids: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        return forbid(model(**inputs, token_ids=token_ids, mask=mask), self.forbidden)

    def prefix_logits(
        self, model: nn.Module, inputs: dict[str, Tensor], token_ids: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Captioner``. Captions that are the beginning of others are not computed at all."""
        first, node = unique_prefixes(token_ids, mask)
        return self.token_logits(model, inputs, token_ids, first), node[mask]

    def decode(self, token_ids: Tensor) -> list[str]:
        """See ``Captioner``; white space becomes single spaces."""
        captions = []
        for ids in token_ids.tolist():
            end = ids.index(self.eos_token_id) if self.eos_token_id in ids else len(ids)
            text = self.tokenizer.decode(
                ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=self.rejoin
            )
            captions.append(" ".join(text.split()))
        return captions


def hub_options(name: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained``: the model's own code is not run, and whether to use the
    local cache alone.
    """
    what = (
        "cannot be used"
        if Path(name).is_dir()
        else "is neither a folder with a config.json nor a model on the hub"
    )
    with naming(f"{name!r} {what}", error=CaptionerError):
        return transformers_options(name)


def read_config(name: str, source: dict[str, Any]) -> Any:
    """The configuration, if its family is known and its sizes are plausible."""
    if Path(name).is_dir():
        check_folder(Path(name))
    with reading(f"config.json of {name!r}"):
        config = AutoConfig.from_pretrained(name, **source)
    if config.model_type in FAMILIES:
        check_architectures(name, config.model_type, config.architectures)
    elif config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise CaptionerError(
            f"{name!r} is a {config.model_type!r}: expected one of {', '.join(FAMILIES)}, or a "
            f"vision-language model"
        )
    return config


def load_model(
    model_class: Any,
    name: str,
    config: Any,
    optional: Sequence[str],
    dtype: torch.dtype,
    source: dict[str, Any],
    weights: bool = True,
) -> Any:
    """Load a model of ``model_class``; its weights may lack only parameters that match
    ``optional``.

    Without ``weights`` none are read: the model is on the meta device.

    Raises:
        CaptionerError: files are damaged, or weights are missing or do not fit.
    """
    if not weights:
        with reading(f"config.json of {name!r}"), torch.device("meta"):
            return model_class(config).to(dtype)
    with reading(f"weights of {name!r}"):
        model, report = model_class.from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True, **source
        )
    missing = [
        key for key in report["missing_keys"] if not any(fnmatchcase(key, p) for p in optional)
    ]
    problems = {
        "missing": missing,
        "of another shape": [key for key, *_ in report["mismatched_keys"]],
    }
    for problem, keys in problems.items():
        if keys:
            raise CaptionerError(f"{len(keys)} weights are {problem}, such as {sorted(keys)[0]}")
    return model


def _read_tokenizer(name: str, subfolder: str, source: dict[str, Any]) -> Any:
    """A tokenizer with all its files: without one, Transformers silently makes up a default."""
    with reading(
        f"tokenizer of {name!r} ({subfolder or '.'}/tokenizer.json, tokenizer_config.json)"
    ):
        folder = Path(name) if Path(name).is_dir() else _cache_folder(name, source)
        tokenizer = AutoTokenizer.from_pretrained(name, subfolder=subfolder, **source)
        if not (folder / subfolder / "tokenizer_config.json").is_file():
            raise CaptionerError(f"its tokenizer_config.json is missing from {folder / subfolder}")
        if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
            raise CaptionerError("the files of its tokenizer, such as tokenizer.json, are missing")
        return tokenizer


def _cache_folder(name: str, source: dict[str, Any]) -> Path:
    """The folder in the cache that a model on the hub was downloaded to."""
    return Path(
        str(cached_file(name, "config.json", local_files_only="local_files_only" in source))
    ).parent


def saved_prompt(name: str) -> str | list[dict[str, Any]] | None:
    """The prompt saved in an exported folder, a text or messages, if there is one."""
    settings = Path(name) / SETTINGS
    if not settings.is_file():
        return None
    prompt = read_object(settings).get("prompt", "")
    if not isinstance(prompt, str | list):
        raise CaptionerError(f"{settings}: prompt is {prompt!r:.80}: expected a text or messages")
    return prompt


def check_tokens(tokenizer: Any, conventions: Conventions) -> None:
    """Raise ``CaptionerError`` for a tokenizer with ids beyond the model's output layer."""
    vocabulary = conventions.vocab_size
    largest = max(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    named = {"tokens up to": largest, "EOS": conventions.eos, "padding": conventions.pad}
    if conventions.start:
        named["BOS"] = conventions.start[0]
    for what, token in named.items():
        if not 0 <= token < vocabulary:
            raise CaptionerError(
                f"its tokenizer and config.json have {what} {token}, its output layer {vocabulary} "
                f"tokens: they do not "
                "belong together"
            )
