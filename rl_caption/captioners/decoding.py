"""One decode for the K samples and the greedy caption of every image, with a KV cache and the image encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_caption.captioners.base import Decoding, forbid, sample_tokens
from rl_caption.captioners.modeling import CaptionTransformer


@dataclass(frozen=True)
class Tokens:
    """Special tokens of a decode: what ends a caption, what stands after it, and what it may not contain."""

    eos: int
    pad: int
    forbidden: Sequence[int]


@torch.no_grad()
def decode_tokens(
    next_logits: Callable[[Tensor | None], Tensor],
    batch: int,
    decoding: Decoding,
    noise: Tensor | None,
    special: Tokens,
) -> Tensor:
    """Sample K captions and decode the greedy one of each of B images, side by side.

    Args:
        next_logits: from the newest token of every row [B·(K + 1)] (None: no token yet) to logits of the next [.., V].
        batch: B.
        decoding: K, temperature, length limit L.
        noise: [B, K, L] uniform numbers in [0, 1), one for each token that is sampled.
        special: end, padding, and what is never chosen.

    Returns:
        Token ids [B, K (+ 1), T], T <= L: samples, then the greedy caption; padded after EOS.
    """
    samples, rows = decoding.num_samples, decoding.captions_per_image
    if samples and noise is None:
        raise ValueError("sampling needs noise [B, K, L]: one uniform number for each token")
    finished: Tensor | None = None
    generated: list[Tensor] = []
    for position in range(decoding.max_new_tokens):
        logits = next_logits(generated[-1] if generated else None)
        logits = forbid(logits, special.forbidden).unflatten(0, (batch, rows))
        chosen = logits.argmax(-1)
        if noise is not None and samples:
            drawn = sample_tokens(
                logits[:, :samples].flatten(0, 1), noise[:, :, position].flatten(), decoding.temperature
            )
            chosen[:, :samples] = drawn.unflatten(0, (batch, samples))
        flat = chosen.flatten()
        if finished is None:
            finished = torch.zeros_like(flat, dtype=torch.bool)
        flat = flat.masked_fill(finished, special.pad)
        generated.append(flat)
        finished = finished | (flat == special.eos)
        if finished.all():
            break
    return torch.stack(generated, -1).unflatten(0, (batch, rows))


@torch.no_grad()
def decode_captions(
    policy: CaptionTransformer, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None
) -> Tensor:
    """``decode_tokens`` with the from-scratch captioner; ``policy`` is in eval mode if dropout is to be off."""
    config = policy.config
    encoded = policy.encoder(**inputs)
    batch = encoded[0].shape[0]
    rows = batch * decoding.captions_per_image
    cache: Any = None

    def next_logits(newest: Tensor | None) -> Tensor:
        """Logits [rows, V] after ``newest`` [rows], or after BOS; extends the cache."""
        nonlocal cache
        if newest is None:
            newest = torch.full((rows,), config.bos_token_id, device=encoded[0].device)
        output = policy(
            region_mask=inputs.get("region_mask"),
            encoder_outputs=encoded,
            decoder_input_ids=newest.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        return output.logits[:, -1]

    special = Tokens(config.eos_token_id, config.pad_token_id, config.forbidden_token_ids)
    return decode_tokens(next_logits, batch, decoding, noise, special)
