"""Decoder-only models of Transformers, whose image is a prefix of the text: their
prompts, positions, and what is assumed of each.

``VisionLanguageFamily`` is for every model whose processor has a chat template. A model
that needs more is one class in ``FAMILIES``. ``self_check`` finds out which models can
be trained, and how.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from PIL import Image
from torch import Tensor
from transformers.cache_utils import Cache

from rl_caption.captioners.base import CaptionerError, Inputs
from rl_caption.captioners.hf_families import (
    Conventions,
    first_token,
    plain_tokens,
)
from rl_caption.captioners.packed import CACHE, State

if TYPE_CHECKING:
    from rl_caption.captioners.policy import Policy

Messages = list[dict[str, Any]]
"""A conversation as chat templates read it: ``role`` and ``content``, a text or a list
of parts (``type`` ``text`` or ``image``).
"""
Prompt: TypeAlias = str | Messages
ENCODED = "mm_encoder_outputs"
"""Argument by which Transformers' models take visual tokens in place of pixels; older
versions and some models have none, and encode their images in every pass.
"""


class VisionLanguageFamily:
    """How a model reads its prompt, and which parts of it are trained by default. B
    images, P tokens of a prompt.

    Attributes:
        name: the model's ``model_type``.
        default_prompt: prompt that is used if none is given.
        chat_prompts: whether prompts are made by the processor's chat template.
        first_position: position of the first token, without M-RoPE.
        text_model: name of the submodule that reads tokens after the prompt.
        wanted: arguments that the model requires in every call, with their defaults.
        lora_targets, frozen and others: as in ``hf_families.Family``.
    """

    default_prompt = "Describe this image in one sentence."
    chat_prompts = True
    first_position = 0
    lora_targets = r"(?!.*(vision|visual)).*\.(q_proj|v_proj)"
    frozen: tuple[str, ...] = ("*visual*", "*vision*")
    processor_options: ClassVar = {"padding_side": "left", "truncation_side": "left"}
    row_prompts = has_processor = True
    cross_attention = False
    text_model = ""  # the whole model
    wanted: ClassVar[dict[str, Any]] = {}

    def __init__(self, model_type: str) -> None:
        self.name = model_type

    def image_inputs(self, model: Any) -> frozenset[str]:
        """Names of the inputs that visual tokens are made of; empty if the model takes
        no visual tokens.
        """
        reads = getattr(model.base_model, "get_image_features", None)
        for module in (model, model.base_model):
            if ENCODED not in inspect.signature(module.forward).parameters:
                return frozenset()
        return frozenset(inspect.signature(reads).parameters if reads else ())

    def conventions(
        self, model: Any, processor: Any, tokenizer: Any, prompt: Prompt
    ) -> Conventions:
        """Special tokens: captions end as an answer does, and contain no other special
        token.
        """
        ends, unwritten = special_tokens(processor, model)
        eos = self.end(model, processor, prompt, ends)
        pad = first_token(tokenizer.pad_token_id, ends[0])
        vocabulary = model.get_output_embeddings().weight.shape[0]
        others = ends if self.chat_prompts else []
        return Conventions((), eos, pad, vocabulary, (*others, *unwritten))

    def end(self, model: Any, processor: Any, prompt: Prompt, ends: list[int]) -> int:
        """The token of ``ends`` that the chat template puts after an answer, or else
        the first, the tokenizer's EOS (the token ids of InstructBLIP's configurations
        do not fit its tokenizers).
        """
        closing: Sequence[int] = ()
        if self.chat_prompts:
            after = self._reply(processor, prompt)[1]
            closing = plain_tokens(processor.tokenizer, after)
        return next((token for token in closing if token in ends), ends[0])

    def before(self, processor: Any, prompt: Prompt) -> tuple[str, str]:
        """Text that is tokenised in one piece with the caption after it, and the
        separator of the two.
        """
        return "", self._reply(processor, prompt)[0]

    def inputs(
        self, processor: Any, messages: Messages, images: Sequence[Image.Image]
    ) -> Inputs:
        """The model's inputs for one prompt and its images, with the beginning of the answer."""
        encoding = processor.apply_chat_template(
            with_images(messages, images),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return dict(encoding)

    def _reply(self, processor: Any, prompt: Prompt) -> tuple[str, str]:
        """Separator of the prompt and the text of an answer, such as a space; and the
        characters after the text.
        """
        asked = with_images(as_messages(prompt, None), [Image.new("RGB", (1, 1))])
        start = processor.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=False
        )
        answer = {"role": "assistant", "content": [{"type": "text", "text": REPLY}]}
        whole = processor.apply_chat_template([*asked, answer], tokenize=False)
        before, reply, end = whole.rpartition(REPLY)
        if not reply:
            raise CaptionerError(
                f"the chat template of this {self.name!r} leaves the answer out"
            )
        return before.removeprefix(start) if before.startswith(start) else "", end

    def positions(self, model: Any, inputs: Inputs) -> Tensor:
        """Positions of the prompt's tokens: [B, P], or [C, B, P] of a model with M-RoPE
        (time, height, width, ...).
        """
        mask = inputs["attention_mask"]
        read = getattr(model.base_model, "get_rope_index", None)
        if read is None:
            return (mask.long().cumsum(-1) - 1).clamp(min=0) + self.first_position
        names = inspect.signature(read).parameters.keys() & inputs.keys()
        positions: Tensor = read(**{name: inputs[name] for name in names})[0]
        return positions

    def begin(
        self, policy: Policy, arguments: Inputs, new_layer: Any
    ) -> tuple[Tensor, State]:
        """Logits [B, V] after the prompts, whose keys and values go into layers ``new_layer``."""
        positions = self.positions(policy.model, arguments)
        cache = Cache(layer_class_to_replicate=new_layer)
        arguments = {**self.wanted, **arguments, "position_ids": positions}
        output = policy.model(**arguments, use_cache=True, **{CACHE: cache})
        mask = arguments["attention_mask"].bool()
        last = positions.amax(-1).view(-1, len(mask)).amax(0)
        channels = positions.shape[:-2]
        state = State(cache, mask=mask, position=last + 1, channels=channels)
        return output.logits[:, -1], state

    def read(self, policy: Policy, state: State, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after each of the next tokens [N, T]."""
        length = token_ids.shape[1]
        state.mask = torch.nn.functional.pad(state.mask, (0, length), value=True)
        following = torch.arange(length, device=token_ids.device)
        positions = state.position.unsqueeze(1) + following
        state.position = state.position + length
        output = policy.text_model(
            input_ids=token_ids,
            attention_mask=state.mask,
            position_ids=positions.expand(*state.channels, -1, -1),
            use_cache=True,
            **{CACHE: state.cache},
        )
        return output.logits


REPLY = "CAPTION"
"""Placeholder for a caption, to find what a chat template puts around an answer."""


class PlainPrompt(VisionLanguageFamily):
    """A model without a chat template, whose captions go on from a plain prompt."""

    chat_prompts = False
    default_prompt = ""
    processor_options: ClassVar = {"backend": "pil"}

    def inputs(
        self, processor: Any, messages: Messages, images: Sequence[Image.Image]
    ) -> Inputs:
        (image,) = images
        text = text_of(messages)
        return dict(processor(text=[text], images=image, return_tensors="pt"))

    def before(self, processor: Any, prompt: Prompt) -> tuple[str, str]:
        text = text_of(as_messages(prompt, None))
        return text, " " if text else ""


class PaliGemma(PlainPrompt):
    """PaliGemma 1 and 2: a plain prompt, such as ``caption en``; image and prompt see
    each other in both directions.
    """

    default_prompt = "caption en"
    processor_options = VisionLanguageFamily.processor_options
    first_position = 1

    def inputs(
        self, processor: Any, messages: Messages, images: Sequence[Image.Image]
    ) -> Inputs:
        """Inputs of the prompt alone, so that ``token_type_ids`` mark a prefix."""
        text = "<image>" * len(images) + text_of(messages)
        encoding = processor(text=[text], images=[list(images)], return_tensors="pt")
        return {name: value for name, value in encoding.items() if name != "labels"}

    def before(self, processor: Any, prompt: Prompt) -> tuple[str, str]:
        return "", ""


class InstructBlip(PlainPrompt):
    """InstructBLIP (Dai et al. 2023) with a decoder-only language model: the Q-Former's
    queries, which have read the prompt, stand before BOS.
    """

    text_model = "language_model"
    wanted: ClassVar = {"pixel_values": None}


class Blip2(InstructBlip):
    """BLIP-2 (Li et al. 2023) with a decoder-only language model, such as OPT."""

    def end(self, model: Any, processor: Any, prompt: Prompt, ends: list[int]) -> int:
        """The configuration's EOS, a line break where BLIP-2 was trained on OPT, or
        else the tokenizer's.
        """
        return first_token(model.config.text_config.eos_token_id, ends[0])


class Git(PlainPrompt):
    """GIT (Wang et al. 2022): one Transformer over image patches and text, from [CLS] to [SEP]."""

    lora_targets = r"git\.encoder\..*\.(query|value)"
    frozen = ()

    def end(self, model: Any, processor: Any, prompt: Prompt, ends: list[int]) -> int:
        """The tokenizer's [SEP], which the configuration names as EOS."""
        sep = processor.tokenizer.sep_token_id
        if sep not in ends:
            raise CaptionerError(
                f"EOS is {ends} in config.json, {sep} in its tokenizer's files"
            )
        return sep

    def inputs(
        self, processor: Any, messages: Messages, images: Sequence[Image.Image]
    ) -> Inputs:
        """Inputs without the [SEP] after the prompt."""
        inputs = super().inputs(processor, messages, images)
        texts = {name: inputs[name][:, :-1] for name in ("input_ids", "attention_mask")}
        return {"pixel_values": inputs["pixel_values"], **texts}


FAMILIES: dict[str, type[VisionLanguageFamily]] = {
    "paligemma": PaliGemma,
    "blip-2": Blip2,
    "instructblip": InstructBlip,
    "git": Git,
}
"""``model_type`` of a ``config.json`` -> its family, if it is more than ``VisionLanguageFamily``.
"""


def special_tokens(processor: Any, model: Any) -> tuple[list[int], list[int]]:
    """Tokens that may end an answer, the tokenizer's EOS first; and the special tokens
    that no answer may contain.

    An image token without its image could not be scored. The model's other ends come
    from its generation settings.
    """
    tokenizer = processor.tokenizer
    declared = model.generation_config.eos_token_id
    declared = declared if isinstance(declared, list) else [declared]
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *declared]))
    # The list of named special tokens lacks some that no text shows either, such as SmolVLM's
    # <row_1_col_1>.
    added = tokenizer.added_tokens_decoder
    unseen = {number for number, token in added.items() if token.special}
    unseen.update(tokenizer.all_special_ids)
    for key in ("image_token_id", "video_token_id"):
        unseen.add(getattr(model.config, key, None))
    return [end for end in ends if end is not None], sorted(unseen - {None, *ends})


def as_messages(prompt: Prompt, row_prompt: Prompt | None) -> Messages:
    """The conversation of a row: its own prompt, or else ``prompt``.

    A row's text stands in place of the last text of the user in ``prompt``.
    """
    if isinstance(row_prompt, list):
        return row_prompt
    if isinstance(prompt, str):
        return [
            {"role": "user", "content": prompt if row_prompt is None else row_prompt}
        ]
    if row_prompt is None:
        return prompt
    messages = copy.deepcopy(prompt)
    last = [message for message in messages if message["role"] == "user"][-1]
    if isinstance(last["content"], str):
        last["content"] = row_prompt
    else:
        texts = [item for item in last["content"] if item["type"] == "text"]
        texts[-1]["text"] = row_prompt
    return messages


def with_images(messages: Messages, images: Sequence[Image.Image | str]) -> Messages:
    """The conversation with its images or their paths: where it names them, or else
    before the user's first text.

    Raises ``CaptionerError`` if it names another number of images.
    """
    conversation: Messages = []
    for message in messages:
        items = message["content"]
        if isinstance(items, str):
            items = [{"type": "text", "text": items}] * bool(items)
        conversation.append({**message, "content": [dict(item) for item in items]})
    items = [item for message in conversation for item in message["content"]]
    places = [item for item in items if item["type"] == "image"]
    if not places:
        places = [{"type": "image"} for _ in images]
        first = next(message for message in conversation if message["role"] == "user")
        first["content"] = [*places, *first["content"]]
    if len(places) != len(images):
        raise CaptionerError(
            f"the prompt has {len(places)} images, the row {len(images)}"
        )
    for place, image in zip(places, images, strict=True):
        place["image"] = image
    return conversation


def text_of(messages: Messages) -> str:
    """The text of a conversation of one message, for a model without a chat template."""
    if len(messages) > 1:
        raise CaptionerError(
            f"model.prompt has {len(messages)} messages: this model takes one plain text"
        )
    items = with_images(messages, [])[0]["content"]
    return " ".join(item["text"] for item in items)
