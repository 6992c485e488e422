"""Decoder-only vision-language models of Transformers: their prompts, positions, and what is
assumed of each.

``VisionLanguageFamily`` is for every model whose processor has a chat template. A model that needs
more is one class in ``FAMILIES``. ``self_check`` finds out which models can be trained, and how.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from PIL import Image
from torch import Tensor

from rl_caption.captioners.base import CaptionerError

Messages = list[dict[str, Any]]
"""A conversation as chat templates read it: ``role`` and ``content``, a text or a list of parts
(``type`` ``text`` or ``image``).
"""
VISION = ("*visual*", "*vision*")
"""Patterns of the names of vision towers."""


class VisionLanguageFamily:
    """How a model reads its prompt, and what of it is trained by default. B images, P tokens of a
    prompt.

    Attributes:
        name: the model's ``model_type``.
        default_prompt: the prompt of a model for which none is named.
        chat_prompts: whether prompts are made by the processor's chat template.
        first_position: position of the first token, without M-RoPE.
        lora_targets, frozen: as in ``hf_families.Family``.
    """

    default_prompt = "Describe this image in one sentence."
    chat_prompts = True
    first_position = 0
    lora_targets = r"(?!.*(vision|visual)).*\.(q_proj|v_proj)"
    # What ``HuggingFaceCaptioner`` asks of a family. The tokens of a caption do not depend on the
    # prompt.
    fixed_prompt, encoder_prompt = False, True

    def __init__(self, model_type: str) -> None:
        self.name = model_type
        self.frozen: tuple[str, ...] = ()

    def check_processor(self, processor: Any) -> None:
        """Raise ``CaptionerError`` for a processor that takes no images, or cannot make prompts."""
        if not hasattr(processor, "image_processor"):
            raise CaptionerError(
                f"a {self.name!r} without an image processor: expected a vision-language model"
            )
        if self.chat_prompts and not getattr(processor, "chat_template", None):
            raise CaptionerError(
                f"the processor of this {self.name!r} has no chat template: expected an "
                f"instruction-tuned model, such "
                "as Qwen2-VL or SmolVLM"
            )

    def prepare(self, model: Any) -> None:
        """Find out which of ``VISION`` the model has, which are frozen unless ``model.freeze`` is
        set.
        """
        names = [name for name, _ in model.named_parameters()]
        self.frozen = tuple(
            pattern for pattern in VISION if any(fnmatchcase(name, pattern) for name in names)
        )

    def inputs(
        self, processor: Any, messages: Messages, images: Sequence[Image.Image]
    ) -> dict[str, Tensor]:
        """The model's inputs for one prompt and its images, with the beginning of the answer."""
        template = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        return dict(processor.apply_chat_template(with_images(messages, images), **template))

    def reply_start(self, processor: Any, messages: Messages) -> str:
        """What stands between the prompt and the text of an answer, such as a space."""
        return self._reply(processor, messages)[0]

    def reply_end(self, processor: Any, messages: Messages) -> str:
        """What stands after the text of an answer; its first end-of-sequence token ends captions."""
        return self._reply(processor, messages)[1]

    def _reply(self, processor: Any, messages: Messages) -> tuple[str, str]:
        asked = with_images(messages, [Image.new("RGB", (1, 1))])
        prompt = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        answer = {"role": "assistant", "content": [{"type": "text", "text": REPLY}]}
        start, reply, end = processor.apply_chat_template(
            [*asked, answer], tokenize=False
        ).rpartition(REPLY)
        if not reply:
            raise CaptionerError(f"the chat template of this {self.name!r} leaves the answer out")
        return start.removeprefix(prompt) if start.startswith(prompt) else "", end

    def positions(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Positions of the prompt's tokens: [B, P], or [C, B, P] of a model with M-RoPE (time,
        height, width, ...).
        """
        mask = inputs["attention_mask"]
        read = getattr(model.base_model, "get_rope_index", None)
        if read is None:
            return (mask.long().cumsum(-1) - 1).clamp(min=0) + self.first_position
        if (
            "mm_token_type_ids" in inspect.signature(read).parameters
            and "mm_token_type_ids" not in inputs
        ):
            raise CaptionerError(
                f"the processor of this {self.name!r} makes no mm_token_type_ids, which M-RoPE "
                f"needs"
            )
        names = inspect.signature(read).parameters.keys() & inputs.keys()
        positions: Tensor = read(**{name: inputs[name] for name in names})[0]
        return positions


REPLY = "CAPTION"
"""Stands for a caption when a chat template is asked what surrounds one."""


class PaliGemma(VisionLanguageFamily):
    """PaliGemma 1 and 2: a plain prompt, such as ``caption en``; image and prompt see each other in
    both directions.
    """

    default_prompt = "caption en"
    chat_prompts = False
    first_position = 1

    def inputs(
        self, processor: Any, messages: Messages, images: Sequence[Image.Image]
    ) -> dict[str, Tensor]:
        """Of the prompt alone, so that ``token_type_ids`` are those of a prefix."""
        text = "<image>" * len(images) + text_of(messages, self.name)
        inputs = dict(processor(text=[text], images=[list(images)], return_tensors="pt"))
        return {name: value for name, value in inputs.items() if name != "labels"}

    def _reply(self, processor: Any, messages: Messages) -> tuple[str, str]:
        return "", processor.tokenizer.eos_token


FAMILIES: dict[str, type[VisionLanguageFamily]] = {"paligemma": PaliGemma}
"""``model_type`` of a ``config.json`` -> its family, if it is more than ``VisionLanguageFamily``.
"""


def family_of(model_type: str) -> VisionLanguageFamily:
    """The family of a ``model_type`` of Transformers' ``AutoModelForImageTextToText``."""
    return FAMILIES.get(model_type, VisionLanguageFamily)(model_type)


def as_messages(prompt: str | Messages, row_prompt: str | Messages | None) -> Messages:
    """The conversation of a row: its own prompt, or else ``prompt``.

    A row's text stands in place of the last text of the user in ``prompt``.
    """
    if isinstance(row_prompt, list):
        return row_prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt if row_prompt is None else row_prompt}]
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


def check_messages(prompt: Any, where: str) -> None:
    """Raise ``CaptionerError`` unless ``prompt``, the value of ``where``, is a conversation with a
    turn of the user.
    """
    for number, message in enumerate(prompt):
        content = message.get("content") if isinstance(message, dict) else None
        items = [{"type": "text", "text": content}] if isinstance(content, str) else content
        fits = isinstance(items, list) and all(
            isinstance(item, dict)
            and (
                item.get("type") == "image"
                or (item.get("type") == "text" and isinstance(item.get("text"), str))
            )
            for item in items
        )
        if not fits or message.get("role") not in ("system", "user", "assistant"):
            raise CaptionerError(
                f"{where}[{number}] is {message!r:.80}: expected role (system, user or assistant) "
                f"and content, a text "
                "or a list of parts: {type: text, text: ...} or {type: image}"
            )
    if not prompt or prompt[-1]["role"] != "user" or not _texts(prompt[-1]["content"]):
        raise CaptionerError(
            f"{where} is {prompt!r:.80}: expected messages, the last one a text of the user"
        )


def with_images(messages: Messages, images: Sequence[Image.Image | str]) -> Messages:
    """The conversation with its images or their paths: where it names them, or else before the
    user's first text.

    Raises ``CaptionerError`` if it names another number of images.
    """
    conversation: Messages = []
    for message in messages:
        content = message["content"]
        items = (
            [{"type": "text", "text": content}] * bool(content)
            if isinstance(content, str)
            else list(content)
        )
        conversation.append({**message, "content": [dict(item) for item in items]})
    places = [
        item for message in conversation for item in message["content"] if item["type"] == "image"
    ]
    if not places:
        places = [{"type": "image"} for _ in images]
        first = next(message for message in conversation if message["role"] == "user")
        first["content"] = [*places, *first["content"]]
    if len(places) != len(images):
        raise CaptionerError(f"the prompt has {len(places)} images, the row {len(images)}")
    for place, image in zip(places, images, strict=True):
        place["image"] = image
    return conversation


def text_of(messages: Messages, name: str) -> str:
    """The text of a conversation of one message, for a model without a chat template."""
    if len(messages) > 1:
        raise CaptionerError(
            f"model.prompt has {len(messages)} messages: a {name!r} takes one plain text"
        )
    return " ".join(_texts(messages[0]["content"]))


def _texts(content: str | list[dict[str, Any]]) -> list[str]:
    return (
        [content]
        if isinstance(content, str)
        else [item["text"] for item in content if item["type"] == "text"]
    )
