"""Keys and values of images, prompts and captions, between the passes over tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.packed import Packing


class PromptLayer(DynamicLayer):
    """Keys and values [B, H, P, D/H] of the prompts in one layer.

    They are kept with their gradient, and once: with recomputed activations the layer runs again in
    the backward pass.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states
            self.values = value_states
        return key_states, value_states


class CaptionLayer(DynamicLayer):
    """Lets M captions read the keys and values of their prompts, ``prompt`` [M]; stores nothing."""

    def __init__(self, prompts: DynamicLayer, prompt: Tensor) -> None:
        super().__init__()
        self.prompt = prompt
        self.is_initialized = True
        self.keys = prompts.keys
        self.values = prompts.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        prompts: Any = (self.keys, self.values)
        keys, values = (
            torch.cat([kept.index_select(0, self.prompt), added], dim=-2)
            for kept, added in zip(prompts, (key_states, value_states), strict=True)
        )
        return keys, values


@dataclass
class State:
    """What N rows have read so far: first the prompts of B images, then also tokens of captions.

    Attributes:
        cache: keys and values.
        states: [B, S, D] of the images, where they are no visual tokens.
        images: [B] indices of the images that are left, ascending, where captions read them by
            cross-attention.
        mask: [N, S], False where a prompt is padded, where the image is a prefix of the text.
        position: [N] of the next token, likewise.
        channels: number of positions of a token, with M-RoPE (time, height, width, ...); empty
            without it.
    """

    cache: Any
    states: Any = None
    images: Any = None
    mask: Any = None
    position: Any = None
    channels: tuple[int, ...] = ()

    def select(self, prefixes: Prefixes) -> None:
        """Reorder the rows to the parents of the next prefixes; let go of images without a row."""
        if prefixes.parent is None:
            return
        if self.images is None:
            self.cache.batch_select_indices(prefixes.parent)
            self.mask = self.mask[prefixes.parent]
            self.position = self.position[prefixes.parent]
            return
        self.cache.self_attention_cache.batch_select_indices(prefixes.parent)
        image = torch.searchsorted(self.images, prefixes.image)
        left = image.unique()
        # Seldom, as the keys and values of images are large.
        if 2 * len(left) <= len(self.images):
            self.cache.cross_attention_cache.batch_select_indices(left)
            self.states = self.states[left]
            self.images = self.images[left]
            image = torch.searchsorted(left, image)
        packing = Packing.of_captions(image, len(self.images))
        self.cache.packing = None if packing.index is None else packing

    def of_captions(self, prompt: Tensor) -> State:
        """The state of M captions, which read the prompts ``prompt`` [M]; several passes may share
        this one.
        """
        layers: list[Any] = [CaptionLayer(layer, prompt) for layer in self.cache.layers]
        return replace(
            self,
            cache=Cache(layers=layers),
            mask=self.mask[prompt],
            position=self.position[prompt],
        )
