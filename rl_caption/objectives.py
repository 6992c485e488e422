"""Losses as sums over tokens or captions. Pure functions of tensors.

Every loss is returned as a sum; the caller divides by a count taken over the whole global batch, so that
accumulation and data parallelism change nothing. B images, K captions each, L tokens, V words.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rl_caption.captioners.base import FORBIDDEN_LOGIT

LossReduction = Literal["token", "sequence"]


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature): [B, K, L, V], [B, K, L] -> [B, K, L]."""
    scaled = logits / temperature
    return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature) at each position: [B, K, L, V] -> [B, K, L]."""
    logprobs = (logits / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def reduction_count(mask: Tensor, reduction: LossReduction) -> Tensor:
    """What the loss is averaged over: tokens up to and including EOS, or captions; a scalar, from mask [B, K, L]."""
    return mask.sum() if reduction == "token" else mask.any(-1).sum()


def policy_gradient_sum(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE with a baseline (Williams 1992; Rennie et al. 2017, eq. 7), summed over the batch.

    Divided by the number of tokens it is the token mean of self-critical.pytorch (a long caption counts more);
    divided by the number of captions it is the sequence mean of ExpansionNet v2 and SacreEOS. The two differ by about
    the caption length, and the learning rate goes with them.

    Args:
        logprobs: [B, K, L] with gradient.
        advantages: [B, K], constant.
        mask: [B, K, L], True up to and including EOS.

    Returns:
        Scalar: -sum over b, k, t of advantage[b, k] · logprobs[b, k, t].
    """
    return -(advantages.detach().unsqueeze(-1) * logprobs * mask).sum()


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's own samples: the k3 estimator, unbiased and never
    negative (Schulman 2020, "Approximating KL divergence"): exp(d) - d - 1, d = log ref - log policy.

    [B, K, L], [B, K, L] -> [B, K, L], in nats. For logs; as a loss its gradient is that of another divergence.
    """
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1


def kl_penalty_sum(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """KL to the reference policy as a loss: the k2 estimator, half the squared log-ratio, summed over tokens.

    On the policy's own samples its gradient is an unbiased estimate of the gradient of each token's
    KL(policy || reference) (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL").

    Args:
        logprobs: [B, K, L] with gradient.
        reference_logprobs: [B, K, L], constant.
        mask: [B, K, L].
    """
    return (0.5 * (logprobs - reference_logprobs.detach()).square() * mask).sum()


def cross_entropy_sum(logits: Tensor, token_ids: Tensor, mask: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy with label smoothing (Szegedy et al. 2016), summed over tokens.

    Args:
        logits: [B, C, L, V]; forbidden tokens stand at ``FORBIDDEN_LOGIT`` and take no smoothing mass.
        token_ids: [B, C, L] references.
        mask: [B, C, L], True for the tokens to learn.
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
