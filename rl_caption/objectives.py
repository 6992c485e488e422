"""Losses as sums over tokens or captions. Pure functions of tensors.

Every loss is returned as a sum; the caller divides by a count taken over the whole global batch, so that
accumulation and data parallelism change nothing. B images, K captions each, L tokens, V words.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rl_caption.captioners.base import FORBIDDEN_LOGIT

LossReduction = Literal["token", "sequence"]


CHUNK = 2**22
"""Logits that are looked at together: whole ones of a batch would go through memory several times, and stay in it."""


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0, place: Tensor | None = None) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature): [..., V], [...] -> [...]."""
    return token_logprobs_and_entropy(logits, token_ids, temperature, place)[0]


def token_logprobs_and_entropy(
    logits: Tensor, token_ids: Tensor, temperature: float = 1.0, place: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and the entropy of what it was drawn from, in nats; both [...].

    Neither keeps a tensor of the logits' size besides the logits, and the backward pass makes one, the gradient.

    Args:
        logits: [..., V], float32; with ``place`` [U, V].
        token_ids: [...]; with ``place`` [P].
        temperature: the distribution is softmax(logits / temperature).
        place: [P], for each token the row of its logits, which others may share; None: each has its own.

    Returns:
        Log-probabilities with gradient, entropies without.
    """
    ids = token_ids.flatten()
    rows = torch.arange(len(ids), device=ids.device) if place is None else place
    result: tuple[Tensor, Tensor] = _TokenStatistics.apply(logits.flatten(0, -2), ids, rows, temperature)
    return result[0].view(token_ids.shape), result[1][rows].view(token_ids.shape)


class _TokenStatistics(torch.autograd.Function):
    """``token_logprobs_and_entropy`` of U rows of V logits and P tokens, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, place: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
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
        ctx.save_for_backward(rows, ids, place, highest, totals)
        ctx.temperature = temperature
        entropies = entropies.squeeze(-1)
        ctx.mark_non_differentiable(entropies)
        return (rows[place, ids] - highest[place, 0]) / temperature - totals[place, 0], entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """(1[token] - softmax) / temperature, times the gradient of the log-probability, summed over a row's tokens."""
        rows, ids, place, highest, totals = ctx.saved_tensors
        gradient = gradients[0] / ctx.temperature
        together = torch.zeros_like(totals).index_add_(0, place, gradient.unsqueeze(-1))
        result = torch.empty_like(rows)
        for part in _parts(rows):
            probabilities = (rows[part] - highest[part]).div_(ctx.temperature).sub_(totals[part]).exp_()
            torch.mul(probabilities, -together[part], out=result[part])
        result.view(-1).scatter_add_(0, place * rows.shape[-1] + ids, gradient)
        return result, None, None, None


def _parts(rows: Tensor) -> list[slice]:
    size = max(CHUNK // rows.shape[-1], 1)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def reduction_count(mask: Tensor, reduction: LossReduction) -> Tensor:
    """What the loss is averaged over: tokens up to and including EOS, or captions; a scalar, from mask [B, K, L]."""
    return mask.sum() if reduction == "token" else mask.any(-1).sum()


def policy_gradient_sum(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE with a baseline (Williams 1992; Rennie et al. 2017, eq. 7), summed over the batch.

    Divided by the number of tokens it is the token mean of self-critical.pytorch (a long caption counts more);
    divided by the number of captions it is the sequence mean of ExpansionNet v2 and SacreEOS. The two differ by about
    the caption length, and the learning rate goes with them.

    Args:
        logprobs: [P] with gradient, of the P tokens where ``mask`` is True, in order.
        advantages: [B, K], constant.
        mask: [B, K, L], True up to and including EOS.

    Returns:
        Scalar: -sum over the tokens t of all captions b, k of advantage[b, k] · logprob[b, k, t].
    """
    weights = advantages.detach().to(mask.device).unsqueeze(-1).expand(mask.shape)[mask]
    return -(weights * logprobs).sum()


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's own samples: the k3 estimator, unbiased and never
    negative (Schulman 2020, "Approximating KL divergence"): exp(d) - d - 1, d = log ref - log policy.

    [...], [...] -> [...], in nats. For logs; as a loss its gradient is that of another divergence.
    """
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL to the reference policy as a loss: the k2 estimator, half the squared log-ratio of each token.

    On the policy's own samples its gradient is an unbiased estimate of the gradient of each token's
    KL(policy || reference) (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL").

    [...] with gradient, [...] constant -> [...].
    """
    return 0.5 * (logprobs - reference_logprobs.detach()).square()


def cross_entropy_sum(logits: Tensor, token_ids: Tensor, mask: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy with label smoothing (Szegedy et al. 2016), summed over tokens.

    Args:
        logits: [P, V]; forbidden tokens stand at ``FORBIDDEN_LOGIT`` and take no smoothing mass.
        token_ids: [P] tokens of references.
        mask: [P], True for the tokens to learn.
        label_smoothing: share of the target spread evenly over the tokens that are not forbidden.

    Returns:
        Scalar, in nats.
    """
    logprobs = logits.log_softmax(-1)
    target = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        allowed = logits > FORBIDDEN_LOGIT
        spread = torch.where(allowed, logprobs, 0.0).sum(-1) / allowed.sum(-1)
        target = (1 - label_smoothing) * target + label_smoothing * spread
    return -(target * mask).sum()
