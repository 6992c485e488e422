"""A Hugging Face captioning model as one module: every pass through it is a call of its
``forward``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.hf_attention import SharedImageCache, packing_cache
from rl_caption.captioners.hf_families import Conventions, Family
from rl_caption.captioners.packed import Packing, preallocated_cache

NO_TOKEN = -1
"""Padding of prompts among longer ones."""


@dataclass
class DecodeState:
    """State of a decode between tokens.

    Attributes:
        states: [B, S, D] of the images that are left.
        cache: KV cache of the model, with a row for each prefix.
        shared: whether the captions of an image share its cross-attention keys and values.
        images: [B] indices of the images that are left, ascending.
    """

    states: Tensor
    cache: Any
    shared: bool
    images: Tensor

    @property
    def tokens(self) -> Any:
        """The part of the cache with a row for each prefix."""
        return self.cache.self_attention_cache if self.shared else self.cache

    def select(self, parent: Tensor | None, image: Tensor) -> None:
        """Reorder the rows of the cache to the parents of the next prefixes; arguments as in
        ``Prefixes``.
        """
        if parent is None:
            return
        self.tokens.batch_select_indices(parent)
        if not self.shared:
            return
        image = torch.searchsorted(self.images, image)
        left = image.unique()
        if 2 * len(left) <= len(self.images):  # seldom, as the keys and values of images are large
            self.cache.cross_attention_cache.batch_select_indices(left)
            self.states, self.images = self.states[left], self.images[left]
            image = torch.searchsorted(left, image)
        packing = Packing.of_captions(image, len(self.images))
        self.cache.packing = None if packing.index is None else packing


class HuggingFacePolicy(nn.Module):
    """A model of Transformers with its family and its special tokens.

    Every image is encoded once. With cross-attention, its K captions share its keys and values;
    where the image is a prefix of the text, the keys and values of image and prompt are computed
    once and repeated for each caption. All passes go through ``forward``, so that wrappers of the
    module (DDP, FSDP, ZeRO) see them.
    """

    start: Tensor

    def __init__(self, model: Any, family: Family, conventions: Conventions) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family
        self.conventions = conventions
        family.prepare(model)
        self.share_prefix = True
        """Whether image and prompt are computed once. Off with gradient checkpointing: running a
        layer a second time would fill the cache twice.
        """
        self.register_buffer("start", torch.tensor([conventions.start]), persistent=False)
        for name, ids in conventions.prompt_inputs.items():
            self.register_buffer(name, torch.tensor([ids]), persistent=False)

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    def forward(
        self,
        pixel_values: Tensor | None = None,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        states: Tensor | None = None,
        prompt_ids: Tensor | None = None,
        encode: bool = False,
        max_tokens: int = 0,
        decode_state: DecodeState | None = None,
        prefixes: Prefixes | None = None,
    ) -> Any:
        """Encode images, score captions, start a decode, or continue it.

        Args:
            pixel_values: [B, 3, H, W].
            states: encoded states [B, S, D] of the images, in place of ``pixel_values``.
            encode: only encode the images.
            token_ids: captions [B, K, L] to score.
            mask: [B, K, L], True for the positions to score; all by default.
            prompt_ids: [B, P], the images' own prompts, padded with ``NO_TOKEN``; of equal lengths
                to start a decode.
            max_tokens: length limit of a decode that is started; the cache gets memory for it.
            decode_state, prefixes: the decode to continue, and its M prefixes.

        Returns:
            Encode: states [B, S, D]. Score: logits [B, K, L, V], or [P, V] of the P positions where
                ``mask`` is True.
            Start: logits [B, V] of the first token, and a ``DecodeState``. Continue: logits [M, V]
                of the next tokens.
        """
        if decode_state is not None:
            assert prefixes is not None
            decode_state.select(prefixes.parent, prefixes.image)
            tokens = prefixes.tokens.unsqueeze(1)
            return self.family.decode(self.model, decode_state.states, tokens, decode_state.cache)[
                :, -1
            ]
        if states is None:
            assert pixel_values is not None
            inputs = self.conventions.prompt_inputs
            prompt = {name: getattr(self, name).expand(len(pixel_values), -1) for name in inputs}
            states = self.family.encode(self.model, pixel_values, **prompt)
        if encode:
            return states
        if token_ids is None:
            with output_of(self.text_model, last_hidden):
                start = self._start(prompt_ids, len(states))
                return self._begin(states, start, start.shape[1] + max_tokens)
        # With cross-attention the image is shared in one pass too, and the backward pass frees it
        # layer by layer.
        if prompt_ids is not None or self.family.cross_attention or not self.share_prefix:
            return self._score_full(states, token_ids, mask, prompt_ids)
        return self._score_after_prefix(states, token_ids, mask)

    def _start(self, prompt_ids: Tensor | None, batch: int) -> Tensor:
        """BOS and prompt [B, 1 + P] of each image."""
        if prompt_ids is None:
            return self.start.expand(batch, -1)
        return torch.cat([self.start[:, :1].expand(batch, -1), prompt_ids], dim=1)

    def _begin(
        self, states: Tensor, start: Tensor, capacity: int | None
    ) -> tuple[Tensor, DecodeState]:
        """Logits [B, V] after BOS and prompt. The cache has memory for ``capacity`` tokens; None is
        for training.
        """
        shared = self.family.cross_attention
        cache: Cache = DynamicCache()
        if capacity is not None:  # if the image is a prefix of the text, the cache holds it, too
            cache = preallocated_cache(capacity if shared else capacity + states.shape[1])
        if shared:
            cache = SharedImageCache(cache, DynamicCache())
        logits = self.family.decode(self.model, states, start, cache)[:, -1]
        return logits, DecodeState(
            states, cache, shared, torch.arange(len(states), device=states.device)
        )

    def _score_after_prefix(self, states: Tensor, token_ids: Tensor, mask: Tensor | None) -> Tensor:
        """Score captions after one pass over image and prompt, whose keys and values they share."""

        def read(state: DecodeState, image: Tensor, ids: Tensor) -> Tensor:
            state.select(image, image)
            return self.family.decode(self.model, state.states, ids, state.cache)

        begin = partial(self._begin, states, self._start(None, len(states)), None)
        return score_after_prompt(token_ids, mask, self.text_model, begin, read)

    def _score_full(
        self, states: Tensor, token_ids: Tensor, mask: Tensor | None, prompt_ids: Tensor | None
    ) -> Tensor:
        """Score prompt and caption of every row in one pass, without a cache of tokens.

        Prompts may differ in length: each caption follows its prompt directly, and padding is on
        the right.
        """
        captions, length = token_ids.shape[1:]
        flat, scored, rows = scored_rows(token_ids, mask)
        start = self._start(None if prompt_ids is None else prompt_ids[rows // captions], len(rows))
        columns = (start != NO_TOKEN).sum(-1, keepdim=True) + torch.arange(
            length, device=start.device
        )  # [M, L]
        ids = torch.cat([start, start.new_full((len(rows), length), NO_TOKEN)], dim=1).scatter(
            1, columns, flat[rows]
        )
        limit = start.shape[1] + length - 1
        if self.conventions.max_tokens is not None:  # the longest prompt may have a short caption
            limit = min(limit, self.conventions.max_tokens + self.start.shape[1] - 1)
        ids = ids[:, :limit]
        ids = ids.masked_fill(ids == NO_TOKEN, self.conventions.pad)
        before = (columns - 1).clamp(max=ids.shape[1] - 1)
        cache = None
        if self.family.cross_attention:
            cache = packing_cache(rows // captions, len(states))
        else:
            states = states[rows // captions]

        def of_captions(hidden: Tensor) -> Tensor:
            hidden = (
                hidden[:, -length:]
                if prompt_ids is None
                else hidden.take_along_dim(before.unsqueeze(-1), 1)
            )
            return hidden if scored is None else hidden[scored]

        with output_of(self.text_model, of_captions):
            logits = self.family.decode(self.model, states, ids, cache)
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])

    @property
    def text_model(self) -> Any:
        """The submodule that reads tokens."""
        return self.model.get_submodule(self.family.text_model)


@contextmanager
def output_of(text_model: Any, chosen: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, the output layer computes logits of ``chosen(hidden)`` and not of all hidden states
    [N, T, D].
    """
    layer = text_model.get_output_embeddings()
    hook = layer.register_forward_pre_hook(
        lambda _, arguments: (chosen(arguments[0]), *arguments[1:])
    )
    try:
        yield
    finally:
        hook.remove()


def score_after_prompt(
    token_ids: Tensor,
    mask: Tensor | None,
    text_model: Any,
    begin: Callable[[], tuple[Tensor, Any]],
    read: Callable[[Any, Tensor, Tensor], Tensor],
) -> Tensor:
    """Logits of captions, which share what is computed of their image and prompt.

    Args:
        token_ids, mask: [B, K, L], as in ``HuggingFacePolicy.forward``.
        text_model: its output layer makes the logits.
        begin: logits [B, V] after image and prompt, and a state.
        read: state, image [M] of each of M captions and their tokens [M, L - 1] -> logits of these
            tokens.

    Returns:
        Logits [B, K, L, V], or [P, V] of the positions where ``mask`` is True.
    """
    captions, length = token_ids.shape[1:]
    flat, scored, rows = scored_rows(token_ids, mask)
    image = rows // captions
    first: list[Tensor] = []

    def keep_last(hidden: Tensor) -> Tensor:
        first.append(last_hidden(hidden))
        return first[0]

    def of_captions(hidden: Tensor) -> Tensor:
        hidden = torch.cat([first[0][image], hidden], dim=1)
        return hidden if scored is None else hidden[scored]

    with output_of(text_model, keep_last):
        logits, state = begin()
    if length == 1:
        logits = logits.unsqueeze(1).expand(-1, captions, -1).unsqueeze(2)
        return logits if mask is None else logits[mask]
    with output_of(text_model, of_captions):
        logits = read(state, image, flat[rows, :-1])
    return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])


def scored_rows(token_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """All captions [B·K, L]; the mask [M, L] of the M that have positions to score (or None); their
    rows [M].
    """
    flat = token_ids.flatten(0, 1)
    if mask is None:
        return flat, None, torch.arange(len(flat), device=flat.device)
    scored = mask.flatten(0, 1)
    rows = scored.any(-1).nonzero().squeeze(-1)
    return flat, scored[rows], rows


def last_hidden(hidden: Tensor) -> Tensor:
    """Hidden states [N, 1, D] of the last of T tokens, from [N, T, D]."""
    return hidden[:, -1:]
