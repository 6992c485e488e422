"""Packed batches of captions, and keys and values of images, prompts and captions
between the passes over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import Seq2SeqLMOutput

if TYPE_CHECKING:
    from rl_caption.captioners.decoding import Prefixes

CACHE = (
    "cache"
    if any(field.name == "cache" for field in fields(Seq2SeqLMOutput))
    else "past_key_values"
)
"""Name of the KV cache in the arguments and outputs of Transformers' models:
``past_key_values`` before 5.24.
"""


@dataclass(frozen=True)
class Packing:
    """Positions of P packed items (tokens or captions) in a padded grid of rows and
    columns.

    Attributes:
        rows, columns: size of the grid.
        index: [P] ascending indices of the items' cells in the flattened grid; None if
            the items fill all cells.
        source: [rows·columns] index of the item whose key and value each cell uses, if
            several cells share one item; None if each uses its own.
    """

    rows: int
    columns: int
    index: Tensor | None = None
    source: Tensor | None = None

    @classmethod
    def of_captions(cls, image: Tensor, images: int) -> Packing:
        """Packing with one row for each image, filled from the left; ``image`` [M],
        ascending, is the image of each caption.
        """
        order = torch.arange(len(image), device=image.device)
        column = order - torch.searchsorted(image, image)
        columns = int(column.max()) + 1
        fills_all = len(image) == images * columns
        index = None if fills_all else image * columns + column
        return cls(images, columns, index)

    def pad(self, states: Tensor) -> Tensor:
        """Packed [P, ...] to padded [rows, columns, ...], with zeros in cells without an item."""
        if self.index is not None:
            grid = states.new_zeros(self.rows * self.columns, *states.shape[1:])
            # index_copy_ would keep ``states`` for its backward pass.
            grid[self.index] = states
            states = grid
        return states.unflatten(0, (self.rows, self.columns))

    def pad_keys(self, states: Tensor) -> Tensor:
        """Packed keys or values [P, D] to padded [rows, columns, D], by ``source`` if there is one."""
        if self.source is None:
            return self.pad(states)
        states = states.index_select(0, self.source)
        return states.unflatten(0, (self.rows, self.columns))

    def pack(self, grid: Tensor) -> Tensor:
        """Padded [rows, columns, ...] to packed [P, ...]."""
        flat = grid.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)


class PreallocatedLayer(DynamicLayer):
    """Keys and values [N, H, T, D/H] of one layer, in memory with room for ``room``
    tokens after the first ones. Not for training.

    Transformers' ``DynamicLayer`` copies all of them for each token that is added.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.capacity = 0
        self.memory: Any = None
        """Keys and values, each [N, H, capacity, D/H]; the two may differ in width."""
        self.view: Any = None
        """Keys as ``update`` returned them last: a view of ``memory``."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values [N, H, T, D/H] of T tokens; returns the keys and
        values of all tokens so far.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        moved = self.keys is not self.view  # rows were selected or repeated
        if end > self.capacity:
            self.capacity = end + self.room
            moved = True
        pieces: list[Any] = [(start, end, key_states, value_states)]
        if moved:
            self.memory = [
                new.new_empty(*new.shape[:-2], self.capacity, new.shape[-1])
                for new in (key_states, value_states)
            ]
            if start:
                pieces.append((0, start, self.keys, self.values))
        for first, last, *states in pieces:
            for memory, new in zip(self.memory, states, strict=True):
                memory[:, :, first:last] = new
        self.keys, self.values = (memory[:, :, :end] for memory in self.memory)
        self.view = self.keys
        return self.keys, self.values


class PromptLayer(DynamicLayer):
    """Keys and values [B, H, P, D/H] of the prompts in one layer.

    They are kept with their gradient, from the first call alone: with recomputed
    activations the layer runs again in the backward pass.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the first keys and values; return those of this call."""
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
        self.keys: Any = prompts.keys
        self.values: Any = prompts.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = self.keys.index_select(0, self.prompt)
        values = self.values.index_select(0, self.prompt)
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)


@dataclass
class State:
    """State of a decode: what N rows have read so far, first the prompts of B images,
    then also tokens of captions.

    Attributes:
        cache: keys and values.
        states: image states [B, S, D], where captions read them by cross-attention.
        images: indices [B] of the images that are left, ascending, with
            cross-attention; else None.
        mask: [N, S], False for padding of prompts; None with cross-attention.
        position: [N] position of the next token; None with cross-attention.
        channels: number of positions of a token, with M-RoPE (time, height, width,
            ...); empty without it.
    """

    cache: Any
    states: Any = None
    images: Any = None
    mask: Any = None
    position: Any = None
    channels: tuple[int, ...] = ()

    def select(self, prefixes: Prefixes) -> None:
        """Reorder the rows to the parents of the next prefixes; let go of images without a row."""
        parent = prefixes.parent
        if parent is None:
            return
        if self.images is None:
            self.cache.batch_select_indices(parent)
            self.mask = self.mask[parent]
            self.position = self.position[parent]
            return
        self.cache.self_attention_cache.batch_select_indices(parent)
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
        """The state of M captions, which read the prompts ``prompt`` [M]; several
        passes may share this state.
        """
        layers: list[Any] = [CaptionLayer(layer, prompt) for layer in self.cache.layers]
        return replace(
            self,
            cache=Cache(layers=layers),
            mask=self.mask[prompt],
            position=self.position[prompt],
        )
