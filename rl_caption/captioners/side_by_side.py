"""Cross-attention of the K captions of an image to one copy of its states, in decoders of Transformers.

Nothing in cross-attention depends on other queries, so the T tokens of K captions are laid side by side as one sequence
of K·T queries. Transformers' decoders want a copy of the image's states, keys and values for every caption instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from rl_caption.captioners.base import CaptionerError

CROSS_ATTENTION = ("crossattention", "encoder_attn")
"""What Transformers' decoders call it."""
STATES = ("encoder_hidden_states", "key_value_states")
"""What it calls the states of the image."""
MASKS = ("attention_mask", "encoder_attention_mask")


@dataclass(frozen=True)
class Places:
    """Where M captions stand that are not as many for every image: image [M], ascending, and place in it [M].

    Attributes:
        image, slot: of each caption.
        width: captions of the image that has most.
    """

    image: Tensor
    slot: Tensor
    width: int

    @classmethod
    def of(cls, image: Tensor) -> Places:
        """Places of captions of the images [M], ascending; those of an image stand close together."""
        slot = torch.arange(len(image), device=image.device) - torch.searchsorted(image, image)
        return cls(image, slot, int(slot.max()) + 1)

    def together(self, states: Tensor, images: int) -> Tensor:
        """[M, T, D] -> [images, width·T, D], zeros where no caption stands."""
        grid = states.new_zeros(images, self.width, *states.shape[1:])
        return grid.index_put((self.image, self.slot), states).flatten(1, 2)

    def apart(self, grid: Tensor) -> Tensor:
        """[images, width·T, D] -> [M, T, D]."""
        return grid.unflatten(1, (self.width, -1))[self.image, self.slot]


class SharedImageCache(EncoderDecoderCache):
    """Keys and values of the tokens of each caption, and of the states of each image once.

    Attributes:
        places: of the captions, where they are not the same number for every image.
    """

    places: Places | None = None


class _Passing(DynamicCache):
    """Gives back what it is told, and keeps none of it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _Forgetful(dict[int, bool]):
    """Layers whose keys and values are kept: none, ever."""

    def __setitem__(self, layer: int, kept: bool) -> None:
        pass


def cache_of_places(image: Tensor, images: int) -> SharedImageCache | None:
    """A cache that says where whole sequences of the images [M], ascending, stand; None where every image has as many.

    Transformers' decoders hand it on to cross-attention. It keeps nothing, so that a layer may be run again in the
    backward pass.
    """
    places = Places.of(image)
    if len(image) == images * places.width:
        return None
    cache = SharedImageCache(_Passing(), _Passing())
    cache.is_updated, cache.places = _Forgetful(), places
    return cache


def share_images(decoder: nn.Module) -> None:
    """Let cross-attention in ``decoder`` take N = B·K rows of tokens with B rows of image states.

    As many rows as states are what they were before. Names of modules and weights stay as they are.

    Raises:
        CaptionerError: there is no cross-attention of a known kind.
    """
    found: list[tuple[Any, tuple[str, ...]]] = []
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in CROSS_ATTENTION:
            names = tuple(inspect.signature(module.forward).parameters)
            if "hidden_states" in names and set(STATES) & set(names):
                found.append((module, names))
    if not found:
        raise CaptionerError(
            f"the decoder {type(decoder).__name__} has no cross-attention of a known kind: expected modules called "
            f"{' or '.join(CROSS_ATTENTION)}, as GPT-2, BERT and BART have"
        )
    for attention, names in found:
        attention.forward = partial(_attend, attention.forward, names)


def _attend(forward: Callable[..., Any], names: tuple[str, ...], *positional: Any, **named: Any) -> Any:
    """``forward`` of cross-attention, whose parameters are ``names``, for any number of captions of an image."""
    named.update(zip(names, positional, strict=False))
    hidden = named["hidden_states"]
    states = next((named[key] for key in STATES if named.get(key) is not None), None)
    if states is None:
        return forward(**named)
    rows, images = len(hidden), len(states)
    places = getattr(named.get("past_key_values"), "places", None)
    if places is None and (rows == images or rows % images):
        return forward(**named)
    # No image is padded, so masks allow everything; GPT-2 also hands over that of self-attention, which is not read.
    named.update({key: None for key in MASKS if key in named})
    named["hidden_states"] = (
        hidden.reshape(images, -1, hidden.shape[-1]) if places is None else places.together(hidden, images)
    )
    attended, *rest = forward(**named)
    return attended.reshape(hidden.shape) if places is None else places.apart(attended), *rest
