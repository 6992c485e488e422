"""A key-value cache that does not copy itself for every token."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class RoomyLayer(DynamicLayer):
    """Keys and values [N, H, T, D/H] of one layer, with room for ``room`` tokens. Not for training: it is written over.

    Transformers' own layer makes a new tensor of all tokens for each one that is added.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.store: Any = None
        """Keys and values [2, N, H, room, D/H]."""
        self.shown: Any = None
        """Keys and values as they were given out last, which are a part of the store."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values [N, H, T, D/H] of T tokens; return all that there are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        # Whoever selects, repeats or reorders rows makes new keys, which are no longer a part of the store.
        if self.shown is None or self.keys is not self.shown[0] or self.values is not self.shown[1] or end > self.room:
            self.room = max(self.room, end)
            shape = (2, *key_states.shape[:-2], self.room, key_states.shape[-1])
            store = key_states.new_empty(shape)
            if start:  # rows have left or were repeated, or the room was too small
                store[0, :, :, :start], store[1, :, :, :start] = self.keys, self.values
            self.store = store
        self.store[0, :, :, start:end], self.store[1, :, :, start:end] = key_states, value_states
        self.shown = self.keys, self.values = self.store[0, :, :, :end], self.store[1, :, :, :end]
        return self.keys, self.values


def roomy_cache(room: int) -> Cache:
    """A cache for captions of up to ``room`` tokens; a longer one makes room for itself."""
    kind: Any = partial(RoomyLayer, room)
    return Cache(layer_class_to_replicate=kind)
