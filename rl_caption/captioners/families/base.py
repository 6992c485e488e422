"""The seam between the Hugging Face captioner and one family of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.caches import roomy_cache


@dataclass(frozen=True)
class Conventions:
    """How a family's captions begin and end.

    Attributes:
        start: tokens before the first new one: BOS (one token) and the prompt. They are neither scored nor trained.
        eos: ends a caption.
        pad: stands after EOS; where a tokenizer has none, EOS itself.
        vocab_size: width of the output layer.
        forbidden: tokens, beside the tokenizer's special ones, that a caption may not contain.
        max_tokens: longest caption in tokens, EOS included; None where positions do not end.
        prompt_inputs: token ids of the prompt for other parts of the model, by the name of ``encode``'s argument.
    """

    start: tuple[int, ...]
    eos: int
    pad: int
    vocab_size: int
    forbidden: tuple[int, ...] = ()
    max_tokens: int | None = None
    prompt_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Family(Protocol):
    """What the captioner asks of a family. B images, N = B·K rows (K captions each), T tokens, S image states.

    Attributes:
        name: for messages.
        model_class: class of Transformers with ``from_pretrained``.
        processor_class: class of Transformers made of an image processor and tokenizers; None where there is none.
        q_former_tokenizer: whether there is a second tokenizer, in the subfolder ``qformer_tokenizer``.
        cross_attention: whether the text reads the image by cross-attention; else the image is a prefix of the text.
        never_trained: patterns of parameters that no caption depends on; frozen, because processes that train together
            wait for their gradient.
        frozen: patterns frozen unless ``model.freeze`` says otherwise.
        lora_targets: regular expression of the modules that get adapters unless ``model.lora.target_modules`` is set.
    """

    name: str
    model_class: str
    processor_class: str | None
    q_former_tokenizer: bool
    cross_attention: bool
    never_trained: tuple[str, ...]
    frozen: tuple[str, ...]
    lora_targets: str

    def check(self, config: Any) -> None:
        """Refuse a variant that the adapter does not know, before its weights are loaded.

        Raises:
            CaptionerError: what it is, and what would be right.
        """
        ...

    def prepare(self, model: Any) -> None:
        """Change how, not what, a loaded model computes; names of modules and weights stay as they are.

        Raises:
            CaptionerError: the model is not what the adapter knows.
        """
        ...

    def conventions(self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str) -> Conventions:
        """Tokens of this model."""
        ...

    def text_model(self, model: Any) -> Any:
        """The part that reads tokens. Its ``get_output_embeddings()`` is the layer that makes logits."""
        ...

    def cache(self, room: int | None) -> Cache:
        """An empty key-value cache: to decode with, for up to ``room`` tokens (or image states), or None to train."""
        ...

    def encode(self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor) -> Tensor:
        """Image states [B, S, D] of ``pixel_values`` [B, 3, H, W]."""
        ...

    def decode(self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None) -> Tensor:
        """Next-token logits [N, T, V] of ``token_ids`` [N, T], with image states [B, S, D].

        With cross-attention the N rows are K captions of each of B images, side by side; without, N is B where the
        image is read. ``cache`` holds the tokens before, and the image once the first call has passed; only the shape
        of ``states`` matters from then on. Without a cache, ``token_ids`` is the whole sequence.
        """
        ...


def tokens_cache(room: int | None) -> Cache:
    """Keys and values of tokens: with room for ``room`` of them while decoding, or, with None, to train through."""
    return DynamicCache() if room is None else roomy_cache(room)


def first_token(what: str, *candidates: int | list[int] | None) -> int:
    """The first candidate that is a token id (of a list, its first).

    Raises:
        CaptionerError: there is none.
    """
    for candidate in candidates:
        if isinstance(candidate, list) and candidate:
            return int(candidate[0])
        if isinstance(candidate, int):
            return candidate
    raise CaptionerError(f"the model's config.json and tokenizer name no {what}")


def same_token(what: str, configured: int | None, tokenizer_has: int | None) -> int:
    """A token id on which the configuration and the tokenizer agree.

    Raises:
        CaptionerError: they do not, so one of them is of another model.
    """
    if configured is None or configured != tokenizer_has:
        raise CaptionerError(f"{what} is {configured} in config.json, {tokenizer_has} in its tokenizer's files")
    return configured


def plain_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of ``text`` without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()
