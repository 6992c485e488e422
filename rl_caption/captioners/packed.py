"""Packed batches of captions: prefix tree, preallocated KV cache, and the mapping between packed
and padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import Seq2SeqLMOutput

CACHE = (
    "cache"
    if any(field.name == "cache" for field in fields(Seq2SeqLMOutput))
    else "past_key_values"
)
"""Name of the KV cache in the arguments and outputs of Transformers' models: ``past_key_values``
before 5.24.
"""


@dataclass(frozen=True)
class Packing:
    """Where P packed items (tokens or captions) stand in a padded grid of rows and columns.

    Attributes:
        rows, columns: size of the grid.
        index: [P] ascending indices of the items' cells in the flattened grid; None if the items
            fill all cells.
        source: [rows·columns] index of the item whose key and value each cell uses, if several
            cells share one item; None if each uses its own.
    """

    rows: int
    columns: int
    index: Tensor | None = None
    source: Tensor | None = None

    @classmethod
    def of_captions(cls, image: Tensor, images: int) -> Packing:
        """One row for each image, filled from the left; ``image`` [M], ascending, is the image of
        each caption.
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


def unique_prefixes(token_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The prefix tree of each image's captions: a token's prefix is all tokens before it, which
    decide its logits.

    Args:
        token_ids: [B, K, L].
        mask: [B, K, L], True for the first tokens of each caption, those that count.

    Returns:
        ``first`` [B, K, L], True for the U tokens of ``mask`` whose prefix no earlier caption of
        the image has; and ``node`` [B, K, L], for each token of ``mask`` the index of its prefix
        among these U, and 0 elsewhere.
    """
    same = token_ids.unsqueeze(2) == token_ids.unsqueeze(1)  # [B, K, K, L]
    before = torch.ones_like(same)
    before[..., 1:] = same[..., :-1].cumprod(-1).bool()
    # [B, K, L]: the first caption with this prefix.
    owner = (before & mask.unsqueeze(1)).long().argmax(2)
    caption = torch.arange(owner.shape[1], device=owner.device)
    first = mask & (owner == caption.view(1, -1, 1))
    numbers = torch.arange(first.numel(), device=owner.device)
    nodes = torch.zeros_like(token_ids).masked_scatter(first, numbers)
    return first, nodes.gather(1, owner).masked_fill(~mask, 0)


class PreallocatedLayer(DynamicLayer):
    """Keys and values [N, H, T, D/H] of one layer, in memory with room for ``room`` tokens after
    the first ones. Not for training.

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
        """Append the keys and values [N, H, T, D/H] of T tokens; returns those of all tokens so
        far.
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
