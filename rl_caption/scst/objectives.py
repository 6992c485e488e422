"""Losses as sums over tokens or captions. Pure functions of tensors.

Every loss is returned as a sum; the caller divides by a count taken over the whole global batch, so that
accumulation and data parallelism change nothing. B images, K captions each, L tokens, V words.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

LossReduction = Literal["token", "sequence"]


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
