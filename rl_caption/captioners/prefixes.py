"""Captions of an image that begin alike, as a tree: what is computed once for all of them. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def different_prefixes(token_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where each different prefix of an image's captions stands first.

    The prefix of token t of a caption are the tokens before it: what its logits depend on, beside the image.

    Args:
        token_ids: [B, K, L].
        mask: [B, K, L], True for the tokens of captions, from the first one on.

    Returns:
        ``first`` [B, K, L], True for the U tokens of ``mask`` whose prefix no earlier caption of the image has; and
        ``slot`` [B, K, L], for each token of ``mask`` the place of its prefix among these U; 0 elsewhere.
    """
    same = token_ids.unsqueeze(2) == token_ids.unsqueeze(1)  # [B, K, K, L]
    before = torch.ones_like(same)
    before[..., 1:] = same[..., :-1].cumprod(-1).bool()
    owner = (before & mask.unsqueeze(1)).long().argmax(2)  # [B, K, L] the first caption with this prefix
    first = mask & (owner == torch.arange(owner.shape[1], device=owner.device).view(1, -1, 1))
    places = torch.zeros_like(token_ids).masked_scatter(first, torch.arange(first.numel(), device=owner.device))
    return first, places.gather(1, owner).masked_fill(~mask, 0)
