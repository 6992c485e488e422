"""Families of captioning models in Transformers: how each encodes images, reads tokens, starts and
ends captions.

To add a family, write one more class and name it in ``FAMILIES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.hf_attention import (
    fuse_blip_attention,
    image_cache,
    share_images,
)
from rl_caption.captioners.packed import CACHE
from rl_caption.captioners.state import State

if TYPE_CHECKING:
    from rl_caption.captioners.policy import Policy


@dataclass(frozen=True)
class Conventions:
    """How a model's captions begin and end.

    Attributes:
        start: token ids before the caption: BOS (one token) and the prompt. They are neither scored
            nor trained.
        eos: token id that ends a caption.
        pad: token id after EOS; EOS itself if the tokenizer has none.
        vocab_size: width of the output layer.
        forbidden: token ids that a caption may not contain, besides the tokenizer's special ones;
            EOS stays allowed.
        max_tokens: length of the longest caption in tokens, EOS included; None if positions are
            unlimited.
        prompt_inputs: token ids of the prompt for other parts of the model, by the name of
            ``encode``'s argument.
    """

    start: tuple[int, ...]
    eos: int
    pad: int
    vocab_size: int
    forbidden: tuple[int, ...] = ()
    max_tokens: int | None = None
    prompt_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        prompt: str,
        text: Any,
        bos: int,
        eos: int,
        pad: int,
        before: int = 0,
    ) -> Conventions:
        """Conventions of a text model with the configuration ``text``; ``before`` of its positions
        precede BOS.
        """
        start, positions = (
            (bos, *plain_tokens(tokenizer, prompt)),
            getattr(text, "max_position_embeddings", None),
        )
        longest = None if positions is None else positions - before - len(start) + 1
        return cls(start, eos, pad, text.vocab_size, (bos,), longest)


class Family(ABC):
    """A family of models. B images, N = B·K rows (K captions each), T tokens, S image states, width
    D.

    Attributes:
        name: for messages.
        processor_class: name of the class in Transformers that combines image processor and
            tokenizers, if any.
        row_prompts: whether rows may have prompts of their own.
        encoder_prompt: whether captions do not go on from the prompt: the encoder reads it with the
            image.
        default_prompt: the prompt of a model for which none is named.
        cross_attention: whether the text reads the image by cross-attention; else the image is a
            prefix of the text.
        text_model: name of the submodule that reads tokens; its ``get_output_embeddings()`` makes
            the logits.
        frozen: patterns of parameters that are frozen unless ``model.freeze`` is set.
        lora_targets: regular expression of the modules that get adapters unless
            ``model.lora.target_modules`` is set.
    """

    name: str
    processor_class: str | None = None
    row_prompts = False
    encoder_prompt = False
    default_prompt = ""
    cross_attention = False
    text_model: str
    frozen: tuple[str, ...] = ()
    lora_targets: str

    def prepare(self, model: Any) -> None:
        """Make a loaded model faster without changing its results: captions of an image share its
        keys and values.
        """
        if self.cross_attention:
            share_images(model.get_submodule(self.text_model))

    @abstractmethod
    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """Special tokens of this model. Raises ``CaptionerError`` if configuration and tokenizer
        lack one.
        """

    def image_inputs(self, model: Any) -> frozenset[str]:
        """Names of what images are encoded from."""
        return frozenset({"pixel_values"})

    @abstractmethod
    def encode(
        self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor
    ) -> Tensor:
        """Image states [B, S, D] of ``pixel_values`` [B, 3, H, W]."""

    def decode(
        self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None
    ) -> Tensor:
        """Next-token logits [N, T, V] of ``token_ids`` [N, T], with image states [B, S, D].

        With cross-attention the N rows are captions of B images. Otherwise N is B in the call that
        reads the image, the first one of a cache. From the second call on, ``cache`` holds the
        image and the tokens before, and of ``states`` only the shape matters. Without a cache,
        ``token_ids`` is the whole sequence.
        """
        text_model = model.get_submodule(self.text_model)
        output = text_model(
            input_ids=token_ids,
            encoder_hidden_states=states,
            use_cache=cache is not None,
            **{CACHE: cache},
        )
        return output.logits

    def begin(
        self, policy: Policy, arguments: dict[str, Any], new_layer: Callable[[], Any]
    ) -> tuple[Tensor, State]:
        """Logits [B, V] after BOS and prompt, whose keys and values go into layers ``new_layer``."""
        states = arguments["states"]
        state = State(Cache(layer_class_to_replicate=new_layer), states)  # type: ignore[arg-type]
        if self.cross_attention:
            state.cache = image_cache(state.cache)
            state.images = torch.arange(len(states), device=states.device)
        return self.read(policy, state, policy.start.expand(len(states), -1))[
            :, -1
        ], state

    def read(self, policy: Policy, state: State, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after each of the next tokens [N, T]."""
        return self.decode(policy.model, state.states, token_ids, state.cache)

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> dict[str, Any]:
        """What Transformers' ``generate`` takes for one image [1, 3, H, W] and the prompt."""
        return {"pixel_values": pixel_values, "input_ids": policy.start}


class Blip(Family):
    """BLIP (Li et al. 2022): a ViT and a BERT-like decoder. Captions start with [DEC], not [CLS];
    EOS is [SEP].
    """

    name = "BLIP"
    processor_class = "BlipProcessor"
    cross_attention = True
    text_model = "text_decoder"
    lora_targets = r"text_decoder\..*\.(query|value)"

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        fuse_blip_attention(model)

    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """BOS is ``bos_token_id``, beyond BERT's vocabulary; EOS is ``sep_token_id``.

        ``eos_token_id`` (2) of BLIP's configurations is an unused token, as in Transformers' own
        ``generate``.
        """
        text = model.config.text_config
        return Conventions.of(
            tokenizer,
            prompt,
            text,
            bos=first_token("BOS (text_config.bos_token_id)", text.bos_token_id),
            eos=same_token(
                "EOS (text_config.sep_token_id)",
                text.sep_token_id,
                tokenizer.sep_token_id,
            ),
            pad=first_token(
                "padding (text_config.pad_token_id)",
                text.pad_token_id,
                tokenizer.pad_token_id,
            ),
        )

    def encode(
        self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor
    ) -> Tensor:
        return model.vision_model(pixel_values=pixel_values).last_hidden_state

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> dict[str, Any]:
        """``generate`` leaves the last token out, as BERT's tokenizer ends with [SEP]."""
        ids = torch.cat([policy.start, policy.start[:, -1:]], dim=1)
        return {"pixel_values": pixel_values, "input_ids": ids}


class VisionEncoderDecoder(Family):
    """``VisionEncoderDecoderModel``: an image encoder (ViT, ...) and a decoder with cross-attention
    (GPT-2, BERT, ...).

    GPT-2 starts, ends and pads with one and the same token.
    """

    name = "VisionEncoderDecoder"
    cross_attention = True
    text_model = "decoder"
    lora_targets = r"decoder\..*\.(c_attn|q_attn|query|value|q_proj|v_proj)"

    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """Token ids from the pair's configuration, else its generation settings, its decoder or its
        tokenizer.
        """
        sources = (model.config, model.generation_config, model.config.decoder)

        def values_of(key: str) -> list[int | list[int] | None]:
            return [getattr(source, key, None) for source in sources]

        bos = first_token(
            "decoder_start_token_id",
            *values_of("decoder_start_token_id"),
            *values_of("bos_token_id"),
            tokenizer.bos_token_id,
        )
        eos = first_token(
            "eos_token_id", *values_of("eos_token_id"), tokenizer.eos_token_id
        )
        pad = first_token(
            "pad_token_id", *values_of("pad_token_id"), tokenizer.pad_token_id, eos
        )
        return Conventions.of(tokenizer, prompt, model.config.decoder, bos, eos, pad)

    def encode(
        self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor
    ) -> Tensor:
        """Projected to the decoder's width where the two differ."""
        states = model.encoder(pixel_values=pixel_values).last_hidden_state
        return (
            model.enc_to_dec_proj(states)
            if hasattr(model, "enc_to_dec_proj")
            else states
        )

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> dict[str, Any]:
        return {"pixel_values": pixel_values, **decoder_inputs(policy.start)}


class Git(Family):
    """GIT (Wang et al. 2022): one Transformer over image patches and text, from [CLS] to [SEP].

    Transformers' forward pass encodes the image anew for every row and has no way to hand it image
    states, so its parts
    are called one by one: projected patches, then text; patches see each other, text sees patches
    and earlier text.
    """

    name = "GIT"
    processor_class = "GitProcessor"
    text_model = ""  # the whole model
    lora_targets = r"git\.encoder\..*\.(query|value)"

    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """BOS and EOS are BERT's [CLS] and [SEP] where the configuration names none."""
        config = model.config
        return Conventions.of(
            tokenizer,
            prompt,
            config,
            bos=first_token(
                "BOS (bos_token_id)", config.bos_token_id, tokenizer.cls_token_id
            ),
            eos=same_token(
                "EOS (eos_token_id)", config.eos_token_id, tokenizer.sep_token_id
            ),
            pad=first_token(
                "padding (pad_token_id)", config.pad_token_id, tokenizer.pad_token_id
            ),
        )

    def encode(
        self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor
    ) -> Tensor:
        """Patches projected to the width of the text."""
        return model.git.visual_projection(
            model.git.image_encoder(pixel_values).last_hidden_state
        )

    def decode(
        self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None
    ) -> Tensor:
        """Text follows the patches in one sequence; positions count the text alone."""
        length, patches = token_ids.shape[1], states.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        first = max(past - patches, 0)  # position 0 is the first token of text
        positions = torch.arange(
            first, first + length, device=token_ids.device
        ).unsqueeze(0)
        hidden = model.git.embeddings(input_ids=token_ids, position_ids=positions)
        if past == 0:
            hidden = torch.cat([states.to(hidden.dtype), hidden], dim=1)
        new, total = hidden.shape[1], past + hidden.shape[1]
        seen = torch.ones(new, total, dtype=torch.bool, device=hidden.device).tril(
            total - new
        )
        seen[:, :patches] = True
        mask = torch.zeros_like(seen, dtype=hidden.dtype).masked_fill(
            ~seen, torch.finfo(hidden.dtype).min
        )[None, None]
        output = model.git.encoder(
            hidden, attention_mask=mask, use_cache=cache is not None, **{CACHE: cache}
        )
        return model.output(output.last_hidden_state[:, -length:])


class Blip2(Family):
    """BLIP-2 (Li et al. 2023) with a decoder-only language model, such as OPT.

    The states of the Q-Former's queries stand before BOS, in place of the image tokens.
    """

    name = "BLIP-2"
    processor_class = "Blip2Processor"
    text_model = "language_model"
    frozen = ("vision_model.*",)
    lora_targets = r"language_model\..*\.(q_proj|v_proj)"

    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """BOS is </s> for OPT; EOS is the configuration's, a line break where BLIP-2 was trained on
        OPT.
        """
        text = model.config.text_config
        eos = first_token(
            "EOS (text_config.eos_token_id)", text.eos_token_id, tokenizer.eos_token_id
        )
        return self._conventions(model, tokenizer, prompt, eos)

    def _conventions(
        self,
        model: Any,
        tokenizer: Any,
        prompt: str,
        eos: int,
        **prompt_inputs: tuple[int, ...],
    ) -> Conventions:
        config, text = model.config, model.config.text_config
        (bos,) = tuple(tokenizer("")["input_ids"])[:1] or (
            first_token(
                "BOS (text_config.bos_token_id)",
                text.bos_token_id,
                tokenizer.bos_token_id,
            ),
        )
        pad = first_token(
            "pad_token_id", text.pad_token_id, tokenizer.pad_token_id, eos
        )
        conventions = Conventions.of(
            tokenizer, prompt, text, bos, eos, pad, config.num_query_tokens
        )
        image_tokens = (
            () if config.image_token_index is None else (config.image_token_index,)
        )
        return replace(
            conventions, forbidden=(bos, *image_tokens), prompt_inputs=prompt_inputs
        )

    def encode(
        self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor
    ) -> Tensor:
        """The queries' states, projected to the width of the language model; InstructBLIP's have
        read the prompt.
        """
        return model.get_image_features(
            pixel_values, **prompt_inputs, return_dict=True
        ).pooler_output

    def decode(
        self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None
    ) -> Tensor:
        """The queries stand before the text, in the first call only: from then on the KV cache
        holds them.
        """
        hidden = model.language_model.get_input_embeddings()(token_ids)
        if cache is None or cache.get_seq_length() == 0:
            hidden = torch.cat([states.to(hidden.dtype), hidden], dim=1)
        output = model.language_model(
            inputs_embeds=hidden,
            use_cache=cache is not None,
            logits_to_keep=token_ids.shape[1],
            **{CACHE: cache},
        )
        return output.logits

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> dict[str, Any]:
        """Image tokens stand for the queries."""
        config = policy.config
        queries = policy.start.new_full(
            (1, config.num_query_tokens), config.image_token_index
        )
        prompt = {
            name: getattr(policy, name) for name in policy.conventions.prompt_inputs
        }
        ids = torch.cat([queries, policy.start], dim=1)
        return {"pixel_values": pixel_values, "input_ids": ids, **prompt}


class InstructBlip(Blip2):
    """InstructBLIP (Dai et al. 2023): as BLIP-2, and the Q-Former reads the prompt."""

    name = "InstructBLIP"
    processor_class = "InstructBlipProcessor"

    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """EOS is the tokenizer's: the token ids of InstructBLIP's configurations do not fit its
        tokenizers.
        """
        eos = first_token(
            "EOS (eos_token_id)",
            tokenizer.eos_token_id,
            model.config.text_config.eos_token_id,
        )
        ids = tuple(q_former_tokenizer(prompt)["input_ids"])
        return self._conventions(model, tokenizer, prompt, eos, qformer_input_ids=ids)


class Florence2(Family):
    """Florence-2: an encoder reads image and prompt, a BART decoder writes.

    Of its task prompts those for captions; any other text is read as it stands.
    """

    name = "Florence-2"
    processor_class = "Florence2Processor"
    cross_attention = encoder_prompt = True
    default_prompt = "<CAPTION>"
    text_model = ""  # the whole model
    lora_targets = r".*language_model\.decoder\..*\.(q_proj|v_proj)"
    tasks: ClassVar = {
        "<CAPTION>": "What does the image describe?",
        "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
        "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    }

    def prepare(self, model: Any) -> None:
        share_images(model.model.language_model.decoder)

    def conventions(
        self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str
    ) -> Conventions:
        """Captions go on from ``decoder_start_token_id`` and the BOS that ``generate`` forces after
        it.
        """
        if prompt.startswith("<") and prompt not in self.tasks:
            raise CaptionerError(
                f"the prompt is {prompt!r:.80}: expected one of {', '.join(self.tasks)}, or a text"
            )
        text = model.config.text_config
        sources = (model.generation_config, text)
        start, bos = (
            first_token(key, *(getattr(source, key, None) for source in sources))
            for key in ("decoder_start_token_id", "forced_bos_token_id")
        )
        eos = first_token("eos_token_id", text.eos_token_id, tokenizer.eos_token_id)
        pad = first_token("pad_token_id", text.pad_token_id, tokenizer.pad_token_id)
        ids = (
            tokenizer.bos_token_id,
            *plain_tokens(tokenizer, self.tasks.get(prompt, prompt)),
            tokenizer.eos_token_id,
        )
        longest = text.max_position_embeddings - 1
        return Conventions((start, bos), eos, pad, text.vocab_size, (bos, model.config.image_token_id), longest,
                           {"input_ids": ids})  # fmt: skip

    def encode(
        self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor
    ) -> Tensor:
        """The encoder's states of image and prompt."""
        image = model.model.get_image_features(
            pixel_values, return_dict=True
        ).pooler_output
        prompt = model.get_input_embeddings()(prompt_inputs["input_ids"])
        encoder = model.model.language_model.encoder
        states: Tensor = encoder(
            inputs_embeds=torch.cat([image.to(prompt.dtype), prompt], dim=1)
        ).last_hidden_state
        return states

    def decode(
        self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None
    ) -> Tensor:
        output = model.model.language_model.decoder(
            input_ids=token_ids,
            encoder_hidden_states=states,
            use_cache=cache is not None,
            **{CACHE: cache},
        )
        logits: Tensor = model.lm_head(output.last_hidden_state)
        return logits

    def own_inputs(self, policy: Policy, pixel_values: Tensor) -> dict[str, Any]:
        """Image tokens stand for the image before the prompt."""
        read = policy.model.model.get_image_features(
            pixel_values, return_dict=True
        ).pooler_output
        prompt = policy.get_buffer("input_ids")
        image = prompt.new_full((1, read.shape[1]), policy.config.image_token_id)
        ids = torch.cat([image, prompt], dim=1)
        return {
            "pixel_values": pixel_values,
            "input_ids": ids,
            **decoder_inputs(policy.start),
        }


FAMILIES: dict[str, Family] = {
    "blip": Blip(),
    "git": Git(),
    "vision-encoder-decoder": VisionEncoderDecoder(),
    "blip-2": Blip2(),
    "instructblip": InstructBlip(),
    "florence2": Florence2(),
}
"""``model_type`` of a ``config.json`` -> its family."""


def check_architectures(
    name: str | Path, model_type: str, architectures: Sequence[str] | None
) -> None:
    """Refuse a checkpoint whose ``config.json`` says that it is for another task, such as answering
    questions.

    Its weights may fit and would caption as no one trained them to, and Transformers makes up what
    is missing.
    """
    expected = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]
    if architectures and expected not in architectures:
        raise CaptionerError(
            f"{str(name)!r} is not a captioner: its architectures are {architectures}, not "
            f"{expected}"
        )


def decoder_inputs(start: Tensor) -> dict[str, Any]:
    """Arguments by which ``generate`` goes on from ``start`` [1, P] in the decoder."""
    return {"decoder_input_ids": start, "decoder_start_token_id": int(start[0, 0])}


def first_token(what: str, *candidates: int | list[int] | None) -> int:
    """The first candidate that is a token id, or the first id of a list. Raises ``CaptionerError``
    if none is.
    """
    for candidate in candidates:
        if isinstance(candidate, list) and candidate:
            return int(candidate[0])
        if isinstance(candidate, int):
            return candidate
    raise CaptionerError(f"the model's config.json and tokenizer name no {what}")


def same_token(what: str, configured: int | None, tokenizer_has: int | None) -> int:
    """A token id that two files agree on. Raises ``CaptionerError`` if not: one of them is of
    another model.
    """
    if configured is None or configured != tokenizer_has:
        raise CaptionerError(
            f"{what} is {configured} in config.json, {tokenizer_has} in its tokenizer's files"
        )
    return configured


def plain_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of ``text`` without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()
