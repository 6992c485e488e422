"""What a step minimises: REINFORCE, with a KL penalty to the starting policy. Pure functions of tensors.

B images, K captions each, L tokens. An objective returns a sum and a count, and the step divides one by the other after
adding both up over micro-batches and processes: accumulation and data parallelism change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rl_caption.config.ranges import Weight
from rl_caption.types import Scores

LossReduction = Literal["token", "sequence"]
Metrics: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Log key -> sum and count of a micro-batch, scalars without gradient; what is logged is the mean over the step."""


class Objective(Protocol):
    """The loss of a self-critical step, of one micro-batch; a function or an object that is called.

    An objective may have an attribute ``needs_reference``: where it is true, the frozen starting policy is kept, and
    ``ref_logprobs`` are given. They may also be given because a run logs the divergence (``monitor.kl``).
    """

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, scores: Scores, advantages: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Sum, count and what is logged.

        Args:
            logprobs: [B, K, L] with gradient, log-probabilities of the sampled tokens in nats; 0 after EOS.
            ref_logprobs: [B, K, L], those of the frozen starting policy; None where there is none.
            mask: [B, K, L], True up to and including EOS.
            scores: rewards of the samples [B, K] and of the greedy captions [B] | None.
            advantages: [B, K].

        Returns:
            The loss is the global sum divided by the global count: scalars, or both [T], for T terms with means of
            their own, which are added. The count is known before the first backward pass: it may depend on everything
            but the log-probabilities.
        """
        ...


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE with a baseline, plus ``kl_coef`` times the KL penalty to the starting policy (a token mean).

    Divided by the number of tokens, REINFORCE is the token mean of self-critical.pytorch (a long caption counts more);
    divided by the number of captions, it is the sequence mean of ExpansionNet v2 and SacreEOS. The two differ by about
    the caption length, and the learning rate goes with them.

    Args:
        loss_reduction: ``token`` (mean over tokens up to and including EOS) or ``sequence`` (mean over captions).
        kl_coef: weight of the KL penalty.
    """

    loss_reduction: LossReduction = "token"
    kl_coef: Weight = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the penalty needs the starting policy."""
        return self.kl_coef > 0

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, scores: Scores, advantages: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """See ``Objective``. Logs ``loss/policy`` and, where there is a reference, ``policy/kl``."""
        policy, count = policy_gradient_sum(logprobs, advantages, mask), reduction_count(mask, self.loss_reduction)
        metrics = {"loss/policy": (policy.detach(), count)}
        if ref_logprobs is None:
            return policy, count, metrics
        chosen, reference, tokens = logprobs[mask], ref_logprobs[mask], mask.sum()
        metrics["policy/kl"] = (kl_to_reference(chosen.detach(), reference).double().sum(), tokens)
        if not self.kl_coef:
            return policy, count, metrics
        penalty = self.kl_coef * kl_penalty(chosen, reference).sum()
        return torch.stack([policy, penalty]), torch.stack([count, tokens]), metrics


def reduction_count(mask: Tensor, reduction: LossReduction) -> Tensor:
    """What the loss is averaged over: tokens up to and including EOS, or captions; a scalar, from mask [B, K, L]."""
    return mask.sum() if reduction == "token" else mask.any(-1).sum()


def policy_gradient_sum(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE with a baseline (Williams 1992; Rennie et al. 2017, eq. 7), summed over the batch.

    Args:
        logprobs: [B, K, L] with gradient.
        advantages: [B, K], constant.
        mask: [B, K, L], True up to and including EOS.

    Returns:
        Scalar: -sum over the tokens t of all captions b, k of advantage[b, k] · logprob[b, k, t].
    """
    weights = advantages.detach().unsqueeze(-1).expand(mask.shape)[mask]
    return -(weights * logprobs[mask]).sum()


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
