"""One decode for the K samples and the greedy caption of every image, with a KV cache and the image encoded once.

Captions that have ended leave the batch: the longest one alone is not as dear as all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from rl_caption.captioners.base import Decoding, forbid, sample_tokens
from rl_caption.captioners.caches import roomy_cache
from rl_caption.captioners.modeling import CaptionTransformer


@dataclass(frozen=True)
class Tokens:
    """Special tokens of a decode: what ends a caption, what stands after it, and what it may not contain."""

    eos: int
    pad: int
    forbidden: Sequence[int]


LEAVING = 1 / 8
"""Captions that have ended leave the batch once they are this share of it: each leave-taking copies the cache once."""


@torch.no_grad()
def decode_tokens(
    next_logits: Callable[[Tensor | None, Tensor], Tensor],
    batch: int,
    decoding: Decoding,
    noise: Tensor | None,
    special: Tokens,
    device: torch.device,
) -> Tensor:
    """Sample K captions and decode the greedy one of each of B images, side by side.

    Args:
        next_logits: from the newest tokens [M] (None: no token yet) of the rows [M] that go on to logits of the next
            [M, V]. Rows are ascending places among the B·(K + 1) captions; from call to call some may have left.
        batch: B.
        decoding: K, temperature, length limit L.
        noise: [B, K, L] uniform numbers in [0, 1), one for each token that is sampled.
        special: end, padding, and what is never chosen.
        device: of the tokens.

    Returns:
        Token ids [B, K (+ 1), T], T <= L: samples, then the greedy caption; padded after EOS.
    """
    samples, per_image, limit = decoding.num_samples, decoding.captions_per_image, decoding.max_new_tokens
    if samples and noise is None:
        raise ValueError("sampling needs noise [B, K, L]: one uniform number for each token")
    rows = torch.arange(batch * per_image, device=device)
    tokens = torch.full((len(rows), limit), special.pad, device=device)
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    newest: Tensor | None = None
    for position in range(limit):
        logits = forbid(next_logits(newest, rows), special.forbidden)
        newest = logits.argmax(-1)
        if noise is not None and samples:
            image, caption = rows // per_image, rows % per_image
            # The greedy caption, which stands last, draws with its neighbour's numbers, in vain.
            drawn = sample_tokens(logits, noise[image, caption.clamp(max=samples - 1), position], decoding.temperature)
            newest = torch.where(caption < samples, drawn, newest)
        newest = newest.masked_fill(ended, special.pad)
        tokens[rows, position] = newest
        ended |= newest == special.eos
        left = int(ended.sum())
        if left == len(rows):
            return tokens[:, : position + 1].unflatten(0, (batch, per_image))
        if left >= LEAVING * len(rows):
            rows, newest, ended = rows[~ended], newest[~ended], ended[~ended]
    return tokens.unflatten(0, (batch, per_image))


@torch.no_grad()
def decode_captions(
    policy: CaptionTransformer, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None
) -> Tensor:
    """``decode_tokens`` with the from-scratch captioner; ``policy`` is in eval mode if dropout is to be off."""
    config = policy.config
    encoded = policy.encoder(**inputs)
    device, batch = encoded[0].device, encoded[0].shape[0]
    count = batch * decoding.captions_per_image
    cache = EncoderDecoderCache(roomy_cache(decoding.max_new_tokens), DynamicCache())
    before = torch.arange(count, device=device)

    def next_logits(newest: Tensor | None, rows: Tensor) -> Tensor:
        """Logits [M, V] after ``newest`` [M], or after BOS; extends the cache of ``rows`` and forgets the others."""
        nonlocal before
        if len(rows) < len(before):
            cache.self_attention_cache.batch_select_indices(torch.searchsorted(before, rows))
            before = rows
        ids = torch.full((count,), config.bos_token_id, device=device)
        if newest is not None:
            ids[rows] = newest
        mask = torch.zeros(count, dtype=torch.bool, device=device).index_fill_(0, rows, True)
        output = policy(
            region_mask=inputs.get("region_mask"),
            encoder_outputs=encoded,
            decoder_input_ids=ids.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
            token_mask=mask.unsqueeze(1) if len(rows) < count else None,
        )
        return output.logits.flatten(0, -2)

    special = Tokens(config.eos_token_id, config.pad_token_id, config.forbidden_token_ids)
    return decode_tokens(next_logits, batch, decoding, noise, special, device)
