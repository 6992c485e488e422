"""Log-probabilities of sampled tokens, and the entropy of what they were drawn from. V words in the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 2**22
"""Logits that are looked at together: whole ones of a batch would go through memory several times, and stay in it."""


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0, row: Tensor | None = None) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature): [..., V], [...] -> [...]."""
    return token_logprobs_and_entropy(logits, token_ids, temperature, row)[0]


def token_logprobs_and_entropy(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0, row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and the entropy of what it was drawn from, in nats; both [...].

    Neither keeps a tensor of the logits' size besides the logits, and the backward pass makes one, the gradient.

    Args:
        logits: [..., V], float32; with ``row`` [U, V].
        token_ids: [...]; with ``row`` [P].
        temperature: the distribution is softmax(logits / temperature).
        row: [P], for each token the row of its logits, which others may share; None: each has its own.

    Returns:
        Log-probabilities with gradient, entropies without.
    """
    ids = token_ids.flatten()
    rows = torch.arange(len(ids), device=ids.device) if row is None else row
    result: tuple[Tensor, Tensor] = _TokenStatistics.apply(logits.flatten(0, -2), ids, rows, temperature)
    return result[0].view(token_ids.shape), result[1][rows].view(token_ids.shape)


class _TokenStatistics(torch.autograd.Function):
    """``token_logprobs_and_entropy`` of U rows of V logits and P tokens, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, row: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities [P] and entropies [U]; of each row its largest logit and the logarithm of its sum are kept.

        The largest one is subtracted before anything else: where all logits are far from 0, as GPT-2's are, their last
        digits would be lost.
        """
        highest, totals, entropies = rows.new_empty(3, len(rows), 1)
        for part in _parts(rows):
            highest[part] = rows[part].amax(-1, keepdim=True)
            below = (rows[part] - highest[part]).div_(temperature)
            weights = below.exp()
            sums = weights.sum(-1, keepdim=True)
            totals[part] = sums.log()
            entropies[part] = totals[part] - below.mul_(weights).sum(-1, keepdim=True) / sums
        ctx.save_for_backward(rows, ids, row, highest, totals)
        ctx.temperature = temperature
        entropies = entropies.squeeze(-1)
        ctx.mark_non_differentiable(entropies)
        return (rows[row, ids] - highest[row, 0]) / temperature - totals[row, 0], entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """(1[token] - softmax) / temperature, times the gradient of the log-probability, summed over a row's tokens."""
        rows, ids, row, highest, totals = ctx.saved_tensors
        gradient = gradients[0] / ctx.temperature
        together = torch.zeros_like(totals).index_add_(0, row, gradient.unsqueeze(-1))
        result = torch.empty_like(rows)
        for part in _parts(rows):
            probabilities = (rows[part] - highest[part]).div_(ctx.temperature).sub_(totals[part]).exp_()
            torch.mul(probabilities, -together[part], out=result[part])
        result.view(-1).scatter_add_(0, row * rows.shape[-1] + ids, gradient)
        return result, None, None, None


def _parts(rows: Tensor) -> list[slice]:
    size = max(CHUNK // rows.shape[-1], 1)
    return [slice(start, start + size) for start in range(0, len(rows), size)]
