"""A Hugging Face captioning model as one module: every pass through it is a call of its ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.families.base import Conventions, Family
from rl_caption.captioners.side_by_side import Places, cache_of_places

NO_TOKEN = -1
"""Stands after the end of a prompt among longer ones."""


@dataclass
class Memory:
    """What one decode remembers: the images, and the tokens so far, in the model's own cache.

    Attributes:
        states: of the images [B, S, D].
        cache: of the model.
        shared: whether the captions of an image share what the cache has of it.
        images: [B] those whose states are kept, ascending.
    """

    states: Tensor
    cache: Any
    shared: bool
    images: Tensor

    @property
    def tokens(self) -> Any:
        """The part of the cache that has a row for every prefix."""
        return self.cache.self_attention_cache if self.shared else self.cache

    def go_on(self, origin: Tensor | None, image: Tensor, per_image: int | None = None) -> None:
        """Keep what prefixes of the images [M] go on from, in their order; see ``Prefixes``."""
        if origin is None:
            return
        self.tokens.batch_select_indices(origin)
        if not self.shared or per_image is not None:
            return
        image = torch.searchsorted(self.images, image)
        left = image.unique()
        if 2 * len(left) <= len(self.images):  # not every time: the keys and values of images are large
            self.cache.cross_attention_cache.batch_select_indices(left)
            self.states, self.images = self.states[left], self.images[left]
            image = torch.searchsorted(left, image)
        places = Places.of(image)
        self.cache.places = places if len(image) < len(self.images) * places.width else None


class HuggingFacePolicy(nn.Module):
    """The model with its family's adapter and prompt.

    An image is encoded once. Where it is read by cross-attention, its K captions share its keys and values; where it is
    a prefix of the text, these (and those of the prompt) are computed once and repeated for each of them.
    All passes go through ``forward``, so that wrappers of the module (DDP, FSDP, ZeRO) see them.

    Args:
        model: of Transformers.
        family: its adapter.
        conventions: its tokens.
    """

    start: Tensor

    def __init__(self, model: Any, family: Family, conventions: Conventions) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self.conventions = conventions
        family.prepare(model)
        self.share_prefix = True
        """Off where layers are checkpointed: running them again would fill the cache twice."""
        self.register_buffer("start", torch.tensor([conventions.start]), persistent=False)
        for name, ids in conventions.prompt_inputs.items():
            self.register_buffer(name, torch.tensor([ids]), persistent=False)

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def _no_split_modules(self) -> list[str]:
        """What FSDP shards one by one: the layers that are there. Some models' own lists name classes that are not."""
        return sorted({type(m).__name__ for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)})

    def forward(
        self,
        pixel_values: Tensor | None = None,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        prompt_ids: Tensor | None = None,
        encode: bool = False,
        max_tokens: int = 0,
        memory: Memory | None = None,
        prefixes: Prefixes | None = None,
    ) -> Any:
        """One of four passes.

        Args:
            pixel_values: [B, 3, H, W].
            states: [B, S, D], of these images, in place of ``pixel_values``.
            prompt_ids: [B, P], prompts of the images' own, ``NO_TOKEN`` after the end of each; to start a decode they
                have the same length.
            encode: only make these states.
            token_ids: captions [B, K, L] to be scored.
            mask: [B, K, L], the positions to be scored; all by default.
            max_tokens: that are to be decoded, so that the cache has room for them.
            memory: of the decode that goes on.
            prefixes: M of them, with which it goes on.

        Returns:
            Logits [B, K, L, V] of ``token_ids``, or [P, V] of the P positions where ``mask`` is True; or states; or, to
            start a decode, logits [B, V] of the first token and the memory; or, to go on, logits [M, V] of the next.
        """
        if memory is not None:
            assert prefixes is not None
            memory.go_on(prefixes.origin, prefixes.image, prefixes.per_image)
            return self.family.decode(self.model, memory.states, prefixes.newest.unsqueeze(1), memory.cache)[:, -1]
        if states is None:
            assert pixel_values is not None
            states = self._encode(pixel_values)
        if encode:
            return states
        if token_ids is None:
            with self._output_of(_last):
                start = self._start(prompt_ids, len(states))
                return self._begin(states, start, start.shape[1] + max_tokens)
        if prompt_ids is not None:
            return self._score_whole(states, token_ids, mask, prompt_ids)
        # With cross-attention the image is shared anyway, and in one pass the backward pass frees it layer by layer.
        whole = self.family.cross_attention or not self.share_prefix
        return self._score_whole(states, token_ids, mask) if whole else self._score(states, token_ids, mask)

    def _encode(self, pixel_values: Tensor) -> Tensor:
        batch = pixel_values.shape[0]
        prompt = {name: getattr(self, name).expand(batch, -1) for name in self.conventions.prompt_inputs}
        return self.family.encode(self.model, pixel_values, **prompt)

    def _start(self, prompt_ids: Tensor | None, batch: int) -> Tensor:
        """BOS and prompt of each image, or of all."""
        if prompt_ids is None:
            return self.start.expand(batch, -1)
        return torch.cat([self.start[:, :1].expand(batch, -1), prompt_ids], dim=1)

    def _begin(self, states: Tensor, start: Tensor, room: int | None) -> tuple[Tensor, Memory]:
        batch, shared = len(states), self.family.cross_attention
        cache = self.family.cache(room if room is None or shared else room + states.shape[1])
        logits = self.family.decode(self.model, states, start, cache)[:, -1]
        return logits, Memory(states, cache, shared, torch.arange(batch, device=states.device))

    def _score(self, states: Tensor, token_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Image and prompt once, then the captions."""
        captions, length = token_ids.shape[1:]
        flat, asked, rows = _asked(token_ids, mask)
        image = rows // captions
        first: list[Tensor] = []

        def keep_last(hidden: Tensor) -> Tensor:
            first.append(_last(hidden))
            return first[0]

        def of_all(hidden: Tensor) -> Tensor:
            hidden = torch.cat([first[0][image], hidden], dim=1)
            return hidden if asked is None else hidden[asked]

        with self._output_of(keep_last):
            logits, memory = self._begin(states, self._start(None, len(states)), None)
        if length == 1:
            logits = logits.unsqueeze(1).expand(-1, captions, -1).unsqueeze(2)
            return logits if mask is None else logits[mask]
        memory.go_on(image, image)
        with self._output_of(of_all):
            logits = self.family.decode(self.model, memory.states, flat[rows, :-1], memory.cache)
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])

    def _score_whole(
        self, states: Tensor, token_ids: Tensor, mask: Tensor | None, prompt_ids: Tensor | None = None
    ) -> Tensor:
        """Prompt and caption of every row in one pass, without a cache.

        Captions follow their prompts at once, whose lengths differ: what is padded is the end, and text is causal.
        """
        captions, length = token_ids.shape[1:]
        flat, asked, rows = _asked(token_ids, mask)
        start = self._start(None if prompt_ids is None else prompt_ids[rows // captions], len(rows))
        ends = (start != NO_TOKEN).sum(-1, keepdim=True)
        columns = ends + torch.arange(length, device=start.device)  # of the caption's tokens [M, L]
        whole = torch.cat([start, start.new_full((len(rows), length), NO_TOKEN)], dim=1)
        whole = whole.scatter(1, columns, flat[rows])[:, : self._longest(start.shape[1] + length - 1)]
        whole = whole.masked_fill(whole == NO_TOKEN, self.conventions.pad)
        before = (columns - 1).clamp(max=whole.shape[1] - 1)
        cache = None
        if self.family.cross_attention:
            cache = cache_of_places(rows // captions, len(states))
        else:
            states = states[rows // captions]

        def of_captions(hidden: Tensor) -> Tensor:
            hidden = hidden[:, -length:] if prompt_ids is None else hidden.take_along_dim(before.unsqueeze(-1), 1)
            return hidden if asked is None else hidden[asked]

        with self._output_of(of_captions):
            logits = self.family.decode(self.model, states, whole, cache)
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])

    def _longest(self, columns: int) -> int:
        """So many columns, or those that there are positions for: the longest prompt may have a short caption."""
        room = self.conventions.max_tokens
        return columns if room is None else min(columns, room + self.start.shape[1] - 1)

    @contextmanager
    def _output_of(self, chosen: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """The output layer computes logits of ``chosen(hidden)`` instead of all hidden states [N, T, D]."""
        layer = self.family.text_model(self.model).get_output_embeddings()
        hook = layer.register_forward_pre_hook(lambda _, arguments: (chosen(arguments[0]), *arguments[1:]))
        try:
            yield
        finally:
            hook.remove()


def _asked(token_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Captions [B·K, L]; of the M that have something to be scored, what [M, L], and which they are [M]."""
    flat = token_ids.flatten(0, 1)
    if mask is None:
        return flat, None, torch.arange(len(flat), device=flat.device)
    asked = mask.flatten(0, 1)
    rows = asked.any(-1).nonzero().squeeze(-1)
    return flat, asked[rows], rows


def _last(hidden: Tensor) -> Tensor:
    return hidden[:, -1:]
