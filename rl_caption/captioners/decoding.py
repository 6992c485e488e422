"""One decode for the K samples and the greedy caption of every image, whatever the model.

Captions of an image that have begun with the same words are one row until they part, and captions that have ended
leave the batch. Every caption is drawn with its own random numbers, so what is drawn is what would be without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_caption.captioners.base import Decoding, forbid, sample_tokens


@dataclass(frozen=True)
class Tokens:
    """Special tokens of a decode: what ends a caption, what stands after it, and what it may not contain."""

    eos: int
    pad: int
    forbidden: Sequence[int]


LEAVING = 1 / 8
"""Where no captions part, those that have ended leave once they are this share of the rows: it copies the cache."""


@dataclass(frozen=True)
class Prefixes:
    """M different beginnings of captions, those of an image next to each other.

    Attributes:
        newest: [M] their newest tokens.
        origin: [M] which prefix of the call before each goes on from; None: each from the one in its place.
        image: [M] images, ascending.
        per_image: how many every image has, where that is known without looking.
    """

    newest: Tensor
    origin: Tensor | None
    image: Tensor
    per_image: int | None = None


NextLogits = Callable[[Prefixes | None], Tensor]
"""From M prefixes to logits of their next tokens [M, V]; None is the empty prefix of every image."""


@torch.no_grad()
def decode_tokens(
    next_logits: NextLogits,
    batch: int,
    decoding: Decoding,
    noise: Tensor | None,
    special: Tokens,
    together: bool = True,
) -> Tensor:
    """Sample K captions and decode the greedy one of each of B images, side by side.

    Args:
        next_logits: the model.
        batch: B.
        decoding: K, temperature, length limit L.
        noise: [B, K, L] uniform numbers in [0, 1), one for each token that is sampled.
        special: end, padding, and what is never chosen.
        together: captions with the same prefix are one row; off where dropout is to differ between them.

    Returns:
        Token ids [B, K (+ 1), T], T <= L (L with ``fixed_shapes``): samples, then the greedy caption; padded after EOS.
    """
    samples, per_image, limit = decoding.num_samples, decoding.captions_per_image, decoding.max_new_tokens
    if samples and noise is None:
        raise ValueError("sampling needs noise [B, K, L]: one uniform number for each token")
    if decoding.fixed_shapes:
        return _decode_fixed(next_logits, batch, decoding, noise, special)
    logits = forbid(next_logits(None), special.forbidden)
    images = torch.arange(batch, device=logits.device)
    captions = torch.arange(batch * per_image, device=logits.device)  # those that go on
    prefix, image = images.repeat_interleave(per_image), images  # prefix of each caption, image of each prefix
    tokens = torch.full((len(captions), limit), special.pad, device=logits.device)
    for position in range(limit):
        chosen = best = logits.argmax(-1, keepdim=True)
        if noise is not None and samples:
            drawn = sample_tokens(logits, noise[image, :, position], decoding.temperature, best)
            chosen = torch.cat([drawn, best], dim=1)
        newest = chosen[prefix, captions % per_image]
        tokens[captions, position] = newest
        (goes_on,) = (newest != special.eos).nonzero(as_tuple=True)
        if position + 1 == limit or not len(goes_on):
            break
        captions, newest, origin = captions[goes_on], newest[goes_on], prefix[goes_on]
        if together:
            vocabulary = logits.shape[-1]
            pairs, prefix = torch.unique(origin * vocabulary + newest, return_inverse=True)
            newest, origin = pairs % vocabulary, pairs // vocabulary
        else:
            prefix = torch.arange(len(captions), device=logits.device)
        prefixes = Prefixes(newest, origin, image[origin])
        if len(newest) > (1 - LEAVING) * len(image) and bool((origin.diff() > 0).all()):
            # None have parted and few have ended: all stay where they are, the ended ones with padding to come.
            in_place = torch.full_like(image, special.pad).index_copy_(0, origin, newest)
            prefix, prefixes = origin[prefix], Prefixes(in_place, None, image)
        image = prefixes.image
        logits = forbid(next_logits(prefixes), special.forbidden)
    return tokens[:, : position + 1].unflatten(0, (batch, per_image))


def _decode_fixed(
    next_logits: NextLogits, batch: int, decoding: Decoding, noise: Tensor | None, special: Tokens
) -> Tensor:
    """``decode_tokens`` of B·R rows to the length limit, padding included: no value is looked at on the way."""
    samples, rows = decoding.num_samples, decoding.captions_per_image
    logits = forbid(next_logits(None), special.forbidden).unsqueeze(1).expand(-1, rows, -1)  # [B, R, V]
    image = torch.arange(batch, device=logits.device).repeat_interleave(rows)
    ended = torch.zeros(batch, rows, dtype=torch.bool, device=logits.device)
    # The greedy caption is drawn like the others, for nothing: leaving it out would copy the logits.
    numbers = None if noise is None else torch.nn.functional.pad(noise, (0, 0, 0, rows - samples))  # [B, R, L]
    tokens: list[Tensor] = []
    for position in range(decoding.max_new_tokens):
        if position:
            origin = image if position == 1 else None
            newest = Prefixes(tokens[-1].flatten(), origin, image, rows)
            logits = forbid(next_logits(newest), special.forbidden).unflatten(0, (batch, rows))
        chosen = best = logits.argmax(-1)
        if numbers is not None and samples:
            each = numbers[:, :, position].reshape(-1, 1)
            drawn = sample_tokens(logits.flatten(0, 1), each, decoding.temperature, best.view(-1, 1))
            chosen = torch.cat([drawn.view(batch, rows)[:, :samples], best[:, samples:]], dim=1)
        tokens.append(chosen.masked_fill(ended, special.pad))
        ended = ended | (tokens[-1] == special.eos)
    return torch.stack(tokens, dim=-1)
