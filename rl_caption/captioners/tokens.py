"""Token ids of captions: the mask of tokens that count, shared prefixes, forbidden
tokens, and sampling.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

FORBIDDEN_LOGIT = -1e9
"""Logit of tokens that a caption may not contain: probability 0 in float32 at any
``Temperature``, yet finite, so that entropy is defined.
"""


class Generated(NamedTuple):
    """R captions for each of B images.

    Attributes:
        token_ids: [B, R, T], padded after EOS.
        scores: [B, R] float32, by which beam search orders the captions: the sum of
            their log-probabilities, less the penalties of ``diversity_penalty`` and
            ``block_trigrams``, / length**length_penalty. Where it found fewer than R
            captions, the rest are all padding with the score -inf. None without beam
            search.
    """

    token_ids: Tensor
    scores: Tensor | None


def caption_mask(token_ids: Tensor, eos_token_id: int) -> Tensor:
    """True up to and including the first EOS: [..., L] -> [..., L]."""
    is_eos = token_ids == eos_token_id
    return (is_eos.cumsum(-1) - is_eos.long()) == 0


def unique_prefixes(token_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The prefix tree of each image's captions: a token's prefix is all tokens before
    it, which decide its logits.

    Args:
        token_ids: [B, K, L].
        mask: [B, K, L], True for the tokens of each caption that count, which come
            first.

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


def forbid(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Float32 logits [..., V] with ``FORBIDDEN_LOGIT`` at ``token_ids``."""
    filled = logits.to(torch.float32, copy=True)  # never into the model's own tensor
    index = _index(tuple(token_ids), logits.device)
    return filled.index_fill_(-1, index, FORBIDDEN_LOGIT)


@cache  # to send it to the device at every token would take time
@torch.inference_mode(False)  # a tensor of inference mode could not be trained with
def _index(token_ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.long, device=device)


def sample_tokens(
    logits: Tensor, noise: Tensor, temperature: float, best: Tensor | None = None
) -> Tensor:
    """Draw K tokens [N, K] from each softmax(logits [N, V] / temperature) by inverting
    its cumulative distribution.

    ``noise`` [N, K] is uniform in [0, 1). A token of probability 0 is never drawn; from
    logits of NaN any token may be. ``best`` [N, 1] is the arg max of the logits, if the
    caller has it.
    """
    best = logits.argmax(-1, keepdim=True) if best is None else best
    scaled = logits if temperature == 1 else logits / temperature
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    # Float32 sums end a little off 1, and noise * total may round up to the total: stay strictly
    # inside.
    drawn = torch.searchsorted(
        cumulative, noise * (1 - 1e-6) * cumulative[:, -1:], right=True
    )
    # A GPU adds up in parallel: the sum up to a token of probability 0 may round to another number
    # than the one before.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(probabilities.gather(-1, drawn) > 0, drawn, best)
