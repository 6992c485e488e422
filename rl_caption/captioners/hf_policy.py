"""A Hugging Face captioning model as one module: every pass through it is a call of its ``forward``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_caption.captioners.families.base import Conventions, Family


@dataclass
class Memory:
    """What one decode remembers: the image, and the tokens so far, in the model's own cache."""

    states: Tensor
    cache: Any


class HuggingFacePolicy(nn.Module):
    """The model with its family's adapter and prompt.

    Sampling and scoring run the image and the prompt once, and repeat their keys and values for the K captions.
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
        rows: int = 1,
        memory: Memory | None = None,
    ) -> Any:
        """One of three passes.

        Args:
            pixel_values: [B, 3, H, W].
            token_ids: with ``pixel_values``, captions [B, K, L] to be scored; with ``memory``, the newest tokens [N].
            rows: captions of an image that are to be decoded side by side.
            memory: of the decode that goes on.

        Returns:
            Logits [B, K, L, V] of ``token_ids``; or, to start a decode, logits [B·rows, V] of the first token and the
            memory; or, to go on, logits [N, V] of the next token.
        """
        if memory is not None:
            assert token_ids is not None
            return self.family.decode(self.model, memory.states, token_ids.unsqueeze(1), memory.cache)[:, -1]
        assert pixel_values is not None
        states = self._encode(pixel_values)
        if token_ids is None:
            return self._begin(states, rows)
        return self._score(states, token_ids) if self.share_prefix else self._score_in_full(states, token_ids)

    def _encode(self, pixel_values: Tensor) -> Tensor:
        batch = pixel_values.shape[0]
        prompt = {name: getattr(self, name).expand(batch, -1) for name in self.conventions.prompt_inputs}
        return self.family.encode(self.model, pixel_values, **prompt)

    def _begin(self, states: Tensor, rows: int) -> tuple[Tensor, Memory]:
        cache: Cache | Any = self.family.cache()
        logits = self.family.decode(self.model, states, self.start.expand(states.shape[0], -1), cache)[:, -1]
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        # The image is in the cache by now; of the states only the shape is read, so none are copied.
        view = states[:1].detach().expand(states.shape[0] * rows, -1, -1)
        return logits.repeat_interleave(rows, 0), Memory(view, cache)

    def _score(self, states: Tensor, token_ids: Tensor) -> Tensor:
        captions = token_ids.shape[1]
        first, memory = self._begin(states, captions)
        before = token_ids.flatten(0, 1)[:, :-1]
        logits = first.unsqueeze(1)
        if before.shape[1]:
            rest = self.family.decode(self.model, memory.states, before, memory.cache)
            logits = torch.cat([logits, rest], dim=1)
        return logits.unflatten(0, token_ids.shape[:2])

    def _score_in_full(self, states: Tensor, token_ids: Tensor) -> Tensor:
        flat, length = token_ids.flatten(0, 1), token_ids.shape[-1]
        whole = torch.cat([self.start.expand(flat.shape[0], -1), flat[:, :-1]], dim=1)
        logits = self.family.decode(self.model, states.repeat_interleave(token_ids.shape[1], 0), whole, None)
        return logits[:, -length:].unflatten(0, token_ids.shape[:2])
