"""Encoder-decoders of Transformers: how each encodes images, reads tokens, starts and ends captions.

To add a family, write one more class and name it in ``FAMILIES``. Their attention is
replaced in place: names of modules and weights stay as they are. What is assumed of
Transformers' internals is tested with 5.23 and 5.24.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rl_caption.captioners.base import CaptionerError, Inputs
from rl_caption.captioners.packed import CACHE, Packing, State

if TYPE_CHECKING:
    from rl_caption.captioners.policy import Policy


CROSS_ATTENTION = ("crossattention", "encoder_attn")
"""Names that Transformers' decoders give to cross-attention modules."""
STATES = ("encoder_hidden_states", "key_value_states")
"""Names of these modules' argument for the states of the image."""
MASKS = ("attention_mask", "encoder_attention_mask")


@dataclass(frozen=True)
class Conventions:
    """How a model's captions begin and end.

    Attributes:
        start: token ids that the decoder reads before the caption: BOS (one token) and
            the prompt. They are neither scored nor trained. Empty where the processor
            makes them.
        eos: token id that ends a caption.
        pad: token id after EOS; EOS itself if the tokenizer has none.
        vocab_size: width of the output layer.
        forbidden: token ids that a caption may not contain, besides the tokenizer's
            special ones; EOS stays allowed.
        max_tokens: length of the longest caption in tokens, EOS included; None if
            positions are unlimited.
        encoder_prompt: token ids of the prompt that the encoder reads.
    """

    start: tuple[int, ...]
    eos: int
    pad: int
    vocab_size: int
    forbidden: tuple[int, ...] = ()
    max_tokens: int | None = None
    encoder_prompt: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: Any, start: tuple[int, ...], eos: Any, pad: Any) -> Conventions:
        """Conventions of a decoder with the configuration ``text``."""
        positions = getattr(text, "max_position_embeddings", None)
        longest = None if positions is None else positions - len(start) + 1
        return cls(start, eos, pad, text.vocab_size, start[:1], longest)


class SharedImageCache(EncoderDecoderCache):
    """Keys and values of the tokens of every caption, and of the states of every image once.

    Attributes:
        packing: packing of the captions by image, if images have different numbers of
            captions.
    """

    packing: Packing | None = None


class _PassThroughCache(DynamicCache):
    """Stores nothing: returns keys and values as they are given."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _NeverUpdated(dict[int, bool]):
    """``EncoderDecoderCache.is_updated`` of a cache that stores nothing."""

    def __setitem__(self, layer: int, updated: bool) -> None:
        pass


def packing_cache(image: Tensor, images: int) -> SharedImageCache | None:
    """A cache that stores nothing and tells cross-attention how the captions of
    ``images`` images are packed.

    ``image`` [M], ascending, is the image of each caption. Transformers' decoders hand
    their cache to every layer; as this one stores nothing, a layer may run again in the
    backward pass. None if all images have equally many captions.
    """
    packing = Packing.of_captions(image, images)
    if packing.index is None:
        return None
    cache = SharedImageCache(_PassThroughCache(), _PassThroughCache())
    cache.is_updated = _NeverUpdated()
    cache.packing = packing
    return cache


class Family(ABC):
    """A family of encoder-decoders. B images, N = B·K rows (K captions each), T tokens,
    S image states, width D.

    Attributes:
        name: name of the family, for messages.
        has_processor: whether Transformers has a class that combines image processor and tokenizer.
        processor_options: options for loading the processor.
        row_prompts: whether rows may have prompts of their own.
        chat_prompts: whether a chat template makes prompts.
        default_prompt: prompt that is used if none is given.
        prompt_before: whether a caption goes on from the prompt; else the encoder reads it.
        cross_attention: whether the text reads the image by cross-attention; else the
            image is a prefix of the text.
        text_model: name of the submodule that reads tokens; its
            ``get_output_embeddings()`` makes the logits.
        shared: name of the submodule in which captions share an image, if it is not
            ``text_model``.
        frozen: patterns of parameters that are frozen unless ``model.freeze`` is set.
        lora_targets: regular expression of the modules that get adapters unless
            ``model.lora.target_modules`` is set.
    """

    name: str
    has_processor = True
    processor_options: ClassVar = {"backend": "pil"}
    row_prompts = chat_prompts = False
    default_prompt = ""
    prompt_before = True
    cross_attention = True
    text_model: str
    shared = ""
    frozen: tuple[str, ...] = ()
    lora_targets: str

    def prepare(self, model: Any) -> None:
        """Make a loaded model faster without changing its results: captions of an image
        share its keys and values.
        """
        share_images(model.get_submodule(self.shared or self.text_model))
        fuse_blip_attention(model)

    @abstractmethod
    def conventions(
        self, model: Any, processor: Any, tokenizer: Any, prompt: str
    ) -> Conventions:
        """Special tokens of this model."""

    def before(self, processor: Any, prompt: str) -> tuple[str, str]:
        """Text that is tokenised in one piece with the caption after it, and the
        separator of the two.
        """
        text = prompt if self.prompt_before else ""
        return text, " " if text else ""

    def image_inputs(self, model: Any) -> frozenset[str]:
        """Names of the inputs that images are encoded from."""
        return frozenset({"pixel_values"})

    @abstractmethod
    def encode(self, model: Any, pixel_values: Tensor, prompt: Tensor) -> Tensor:
        """Image states [B, S, D] of ``pixel_values`` [B, 3, H, W], and of the encoder's
        prompt [B, P].
        """

    def begin(
        self, policy: Policy, arguments: Inputs, new_layer: Any
    ) -> tuple[Tensor, State]:
        """Logits [B, V] after BOS and prompt, whose keys and values go into layers ``new_layer``."""
        states = arguments["states"]
        tokens: Any = Cache(layer_class_to_replicate=new_layer)  # type: ignore[arg-type]
        images = torch.arange(len(states), device=states.device)
        state = State(SharedImageCache(tokens, DynamicCache()), states, images)
        start = policy.start.expand(len(states), -1)
        return self.read(policy, state, start)[:, -1], state

    def read(self, policy: Policy, state: State, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after each of the next tokens [N, T], captions of B images.

        The cache holds the tokens before; without one, these are the whole sequence.
        """
        output = policy.text_model(
            input_ids=token_ids,
            encoder_hidden_states=state.states,
            use_cache=state.cache is not None,
            **{CACHE: state.cache},
        )
        return output.logits

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> Inputs:
        """Arguments of Transformers' ``generate`` for one image [1, 3, H, W] and the
        prompt.
        """
        start = policy.start
        return {
            "pixel_values": pixel_values,
            "decoder_input_ids": start,
            "decoder_start_token_id": int(start[0, 0]),
        }


class Blip(Family):
    """BLIP (Li et al. 2022): a ViT and a BERT-like decoder. Captions start with [DEC],
    not [CLS]; EOS is [SEP].
    """

    name = "BLIP"
    text_model = "text_decoder"
    lora_targets = r"text_decoder\..*\.(query|value)"

    def conventions(
        self, model: Any, processor: Any, tokenizer: Any, prompt: str
    ) -> Conventions:
        """BOS is ``bos_token_id``, beyond BERT's vocabulary; EOS is ``sep_token_id``.

        ``eos_token_id`` (2) of BLIP's configurations is an unused token, as in
        Transformers' own ``generate``.
        """
        text = model.config.text_config
        if text.sep_token_id != tokenizer.sep_token_id:
            raise CaptionerError(
                f"EOS (text_config.sep_token_id) is {text.sep_token_id} in config.json, "
                f"{tokenizer.sep_token_id} in its tokenizer's files"
            )
        pad = first_token(text.pad_token_id, tokenizer.pad_token_id)
        start = (text.bos_token_id, *plain_tokens(tokenizer, prompt))
        return Conventions.of(text, start, text.sep_token_id, pad)

    def encode(self, model: Any, pixel_values: Tensor, prompt: Tensor) -> Tensor:
        return model.vision_model(pixel_values=pixel_values).last_hidden_state

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> Inputs:
        """As in ``Family``, with one more token: BLIP's ``generate`` drops the last,
        which it takes for [SEP].
        """
        ids = torch.cat([policy.start, policy.start[:, -1:]], dim=1)
        return {"pixel_values": pixel_values, "input_ids": ids}


class VisionEncoderDecoder(Family):
    """``VisionEncoderDecoderModel``: an image encoder (ViT, ...) and a decoder with
    cross-attention (GPT-2, BERT, ...).

    GPT-2 starts, ends and pads with one and the same token.
    """

    name = "VisionEncoderDecoder"
    has_processor = False
    text_model = "decoder"
    lora_targets = r"decoder\..*\.(c_attn|q_attn|query|value|q_proj|v_proj)"

    def conventions(
        self, model: Any, processor: Any, tokenizer: Any, prompt: str
    ) -> Conventions:
        """Token ids from the pair's configuration, else its generation settings, its
        decoder or its tokenizer.
        """
        decoder = model.config.decoder
        sources = (model.config, model.generation_config, decoder)

        def token(*keys: str) -> Any:
            """The first id under ``keys`` in the sources, or else the tokenizer's."""
            ids = [getattr(source, key, None) for key in keys for source in sources]
            return first_token(*ids, getattr(tokenizer, keys[-1]))

        bos = token("decoder_start_token_id", "bos_token_id")
        eos = token("eos_token_id")
        pad = first_token(token("pad_token_id"), eos)
        start = (bos, *plain_tokens(tokenizer, prompt))
        return Conventions.of(decoder, start, eos, pad)

    def encode(self, model: Any, pixel_values: Tensor, prompt: Tensor) -> Tensor:
        """Image states, projected to the decoder's width if it differs."""
        states = model.encoder(pixel_values=pixel_values).last_hidden_state
        project = getattr(model, "enc_to_dec_proj", None)
        return states if project is None else project(states)


class Florence2(Family):
    """Florence-2: an encoder reads image and prompt, a BART decoder writes.

    Its task prompts for captions are known; any other text is read as it stands.
    """

    name = "Florence-2"
    default_prompt = "<CAPTION>"
    prompt_before = False
    text_model = ""  # the whole model
    shared = "model.language_model.decoder"
    lora_targets = r".*language_model\.decoder\..*\.(q_proj|v_proj)"
    tasks: ClassVar = {
        "<CAPTION>": "What does the image describe?",
        "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
        "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    }

    def conventions(
        self, model: Any, processor: Any, tokenizer: Any, prompt: str
    ) -> Conventions:
        """Captions go on from ``decoder_start_token_id`` and the BOS that ``generate``
        forces after it.
        """
        if prompt.startswith("<") and prompt not in self.tasks:
            raise CaptionerError(
                f"the prompt is {prompt!r:.80}: expected one of {', '.join(self.tasks)}, or a text"
            )
        text = model.config.text_config
        settings = model.generation_config
        start, bos = (
            first_token(getattr(settings, key), getattr(text, key, None))
            for key in ("decoder_start_token_id", "forced_bos_token_id")
        )
        words = plain_tokens(tokenizer, self.tasks.get(prompt, prompt))
        return replace(
            Conventions.of(text, (start, bos), text.eos_token_id, text.pad_token_id),
            forbidden=(bos, model.config.image_token_id),
            encoder_prompt=(tokenizer.bos_token_id, *words, tokenizer.eos_token_id),
        )

    def encode(self, model: Any, pixel_values: Tensor, prompt: Tensor) -> Tensor:
        """The encoder's states of image and prompt."""
        image = model.get_image_features(pixel_values, return_dict=True).pooler_output
        words = model.get_input_embeddings()(prompt)
        states: Tensor = model.model.language_model.encoder(
            inputs_embeds=torch.cat([image.to(words.dtype), words], dim=1)
        ).last_hidden_state
        return states

    def read(self, policy: Policy, state: State, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after ``token_ids`` [N, T], with the encoder's output."""
        output = policy.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=state.states),
            decoder_input_ids=token_ids,
            use_cache=state.cache is not None,
            **{CACHE: state.cache},
        )
        return output.logits

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> Inputs:
        """Image tokens stand for the image before the prompt."""
        prompt = policy.encoder_prompt
        read = self.encode(policy.model, pixel_values, prompt).shape[1]
        image = prompt.new_full(
            (1, read - prompt.shape[1]), policy.config.image_token_id
        )
        ids = torch.cat([image, prompt], dim=1)
        return super().own_inputs(policy, pixel_values) | {"input_ids": ids}


FAMILIES: dict[str, Family] = {
    "blip": Blip(),
    "vision-encoder-decoder": VisionEncoderDecoder(),
    "florence2": Florence2(),
}
"""``model_type`` of a ``config.json`` -> its family."""


def check_architectures(
    name: Any, model_type: str, architectures: Sequence[str] | None
) -> None:
    """Raise ``CaptionerError`` for a checkpoint whose ``config.json`` says that it is
    for another task, such as answering questions.

    Its weights may fit although they were not trained for captions, and Transformers
    makes up missing weights.
    """
    expected = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    if architectures and expected not in architectures:
        raise CaptionerError(
            f"{str(name)!r} is not a captioner: its architectures are {architectures}, not "
            f"{expected}"
        )


def first_token(*candidates: int | list[int] | None) -> Any:
    """The first candidate that is a token id, or the first id of a list; None if none is."""
    for candidate in candidates:
        if isinstance(candidate, list) and candidate:
            return candidate[0]
        if isinstance(candidate, int):
            return candidate
    return None


def plain_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of ``text`` without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def share_images(decoder: nn.Module) -> None:
    """Let cross-attention in ``decoder`` take N = B·K rows of tokens with B rows of image states.

    A query's result does not depend on other queries, so the tokens of an image's K
    captions can be one row of K·T queries. Transformers' decoders need a copy of the
    image's states, keys and values for every caption instead.
    """
    module: Any
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in CROSS_ATTENTION:
            names = tuple(inspect.signature(module.forward).parameters)
            if "hidden_states" in names and set(STATES) & set(names):
                module.forward = partial(_cross_attend, module.forward, names)


def _cross_attend(
    forward: Callable[..., Any], names: tuple[str, ...], *positional: Any, **named: Any
) -> Any:
    """Call ``forward`` of cross-attention, which has the parameters ``names``, with an
    image's captions as one row.
    """
    named.update(zip(names, positional, strict=False))
    hidden = named["hidden_states"]
    images = len(next(named[key] for key in STATES if named.get(key) is not None))
    packing = getattr(named.get(CACHE), "packing", None)
    if packing is None:
        if len(hidden) == images:
            return forward(**named)
        packing = Packing(images, len(hidden) // images)
    # No image is padded, so masks allow everything. GPT-2 also passes the mask of self-attention,
    # which is not used.
    named.update({key: None for key in MASKS if key in named})
    named["hidden_states"] = packing.pad(hidden).flatten(1, 2)
    attended, *rest = forward(**named)
    return packing.pack(attended.unflatten(1, (packing.columns, -1))), *rest


def fuse_blip_attention(model: nn.Module) -> None:
    """Let BLIP's vision tower compute attention with ``scaled_dot_product_attention``;
    it no longer returns the probabilities.

    Transformers' own BLIP keeps the 577 x 577 probabilities of every head and layer for
    the backward pass (190 MB for an image of 384 pixels in float32).
    """
    module: Any
    for module in model.modules():
        if type(module).__name__ == "BlipAttention":
            module.forward = partial(_image_attention, module)


def _image_attention(attention: Any, hidden_states: Tensor, **options: Any) -> Any:
    """``BlipAttention.forward``: states [B, S, D] -> [B, S, D], and None for the probabilities."""
    qkv = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, -1))
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    dropout = attention.dropout.p if attention.dropout.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, None, dropout)
    return attention.projection(attended.transpose(1, 2).flatten(2)), None
