"""Objectives that an update minimises: policy gradients of sampled tokens, DiCO,
classical structured losses.

B images, K captions each, L tokens, V words in the vocabulary. An objective returns a
sum and a count, and the step divides one by the other after adding both up over
micro-batches and processes: accumulation and data parallelism change nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_caption.runtime.errors import ConfigError, errors_of_user_code
from rl_caption.runtime.options import (
    Temperature,
    build_target,
    load_target,
    options_of,
    shown,
    target_name,
)
from rl_caption.runtime.types import Scores
from rl_caption.scst import OBJECTIVES

LossReduction = Literal["token", "sequence"]
Metrics: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Log key -> sum and count of a micro-batch, scalars without gradient; what is logged
is the mean over the step.
"""
SEAM = 6
"""Number of arguments that an objective is called with. Further parameters of a
function are its options.
"""
CHUNK = 2**22
"""Number of logits that are processed at a time: with a whole batch, each of several
passes would go through main memory.
"""


class Objective(Protocol):
    """The loss of one micro-batch in one update of a self-critical step: a function or
    a callable object.

    An objective may have an attribute ``needs_reference``. Where it is true, the frozen
    starting policy is kept and ``ref_logprobs`` is given; it may also be given because
    the run logs the divergence (``monitor.kl``).
    """

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        scores: Scores,
        advantages: Tensor,
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return sum, count, and what is logged.

        Args:
            logprobs: [B, K, L] with gradient, log-probabilities of the sampled tokens
                in nats; 0 after EOS.
            old_logprobs: [B, K, L], under the policy that sampled; in the first update
                of a rollout equal to ``logprobs``.
            ref_logprobs: [B, K, L], under the frozen starting policy; None without a
                starting policy.
            mask: [B, K, L], True up to and including EOS.
            scores: rewards of the samples [B, K] and of the greedy captions [B] | None.
            advantages: [B, K].

        Returns:
            Sum and count are scalars, and the loss is the sum divided by the count,
            both added up over the global batch. Or both are [T]: then the loss is the
            sum of T such means. The count must not depend on the log-probabilities,
            because it is asked for before the first forward pass of the loss.
        """
        ...


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE with a baseline, plus ``kl_coef`` times the KL penalty to the starting
    policy (a token mean).

    Divided by the number of tokens, REINFORCE is the token mean of
    self-critical.pytorch (a long caption counts more); divided by the number of
    captions, it is the sequence mean of ExpansionNet v2 and SacreEOS. The losses differ
    by a factor of about the caption length, and so do suitable learning rates.
    """

    loss_reduction: LossReduction = "token"
    kl_coef: NonNegativeFloat = 0.0

    @property
    def needs_reference(self) -> bool:
        """See ``Objective``."""
        return self.kl_coef > 0

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        scores: Scores,
        advantages: Tensor,
    ) -> tuple[Tensor, Tensor, Metrics]:
        """See ``Objective``. Logs ``loss/policy`` and the values of ``policy_sum``; the
        KL penalty is a term of its own.
        """
        tokens = mask.sum()
        count = tokens if self.loss_reduction == "token" else mask.any(-1).sum()
        weights = advantages.detach().unsqueeze(-1).expand(mask.shape)[mask]
        policy, values = self.policy_sum(logprobs[mask], old_logprobs[mask], weights)
        metrics = {
            name: (value.double().sum(), tokens) for name, value in values.items()
        }
        metrics["loss/policy"] = policy.detach(), count
        if not self.kl_coef or ref_logprobs is None:
            return policy, count, metrics
        penalty = self.kl_coef * kl_penalty(logprobs[mask], ref_logprobs[mask]).sum()
        return torch.stack([policy, penalty]), torch.stack([count, tokens]), metrics

    def policy_sum(
        self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over P tokens, and values [P] to log; ``weights`` [P] are the
        advantages of their captions.

        REINFORCE: -sum advantage[b, k] · logprob[b, k, t] (Williams 1992; Rennie et al.
        2017, eq. 7).
        """
        return -(weights * logprobs).sum(), {}


@dataclass(frozen=True)
class PpoClip(Reinforce):
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7), without a critic, for
    several updates on one rollout. With the advantage ``group_norm`` it is GRPO's (Shao
    et al. 2024), except for GRPO's mean over captions of means over tokens.

    The loss is the sum over tokens of -min(w A, clip(w, 1 - clip_low, 1 + clip_high)
    A), with w = pi(token) / pi_old(token) and pi_old the policy that sampled. A token
    of positive advantage has no gradient once w is above 1 + ``clip_high``, a token of
    negative advantage once w is below 1 - ``clip_low``. In the first update w is 1, and
    the gradient equals ``Reinforce``'s.
    """

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0, le=1e6)] = 0.2

    def policy_sum(
        self, logprobs: Tensor, old_logprobs: Tensor, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``Reinforce``. Logs, over tokens, how far the policy went from the policy
        that sampled: ``policy/ratio``, ``policy/clip_fraction``, ``policy/approx_kl``.
        """
        log_ratio = logprobs - old_logprobs
        ratio = log_ratio.exp()
        surrogate, clipped = (
            ratio * weights,
            ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * weights,
        )
        return -torch.minimum(surrogate, clipped).sum(), {
            "policy/ratio": log_ratio.detach().double().exp(),
            "policy/clip_fraction": clipped < surrogate,
            "policy/approx_kl": kl_to_reference(
                old_logprobs, logprobs.detach()
            ),  # samples are the old policy's
        }


# Objectives of whole captions: means over images, of rewards and not advantages, which do not
# change when a constant is added to all rewards of an image. ``u*`` is the sample with the highest
# reward (the first of equal ones); the gap of a sample u is r(u*) - r(u), at least 0. Images whose
# samples all have the same reward are left out.


@dataclass(frozen=True)
class Dico:
    """Direct CLIP-based optimization (Moratelli et al. 2024): the best sample against
    the others, as a classification.

    The loss is -log sigmoid(``beta`` (D(u*) - sum_i gamma_i D(u_i))) over the other
    samples u_i, with D(u) = log pi(u) / pi_ref(u) (sums over tokens), pi_ref the
    starting policy, and gamma = softmax(gap / ``temperature``) over the u_i, so that
    the worst weigh most. docs/scst.md says what is not known of the original.
    """

    beta: PositiveFloat = 0.2
    temperature: Temperature = 1 / 300
    needs_reference = True

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        scores: Scores,
        advantages: Tensor,
    ) -> tuple[Tensor, Tensor, Metrics]:
        """See ``Objective``. Logs ``loss/policy``, ``dico/margin`` and ``dico/accuracy``."""
        if ref_logprobs is None:
            raise ValueError(
                "objective 'dico' needs the log-probabilities of the starting policy"
            )
        rows, best, gaps = gaps_to_best(scores.samples)
        log_ratios = ((logprobs - ref_logprobs.detach()) * mask).sum(-1)[rows]
        gamma = (gaps / self.temperature).scatter(1, best, -torch.inf).softmax(1)
        margin = self.beta * (
            log_ratios.gather(1, best).squeeze(1) - (gamma * log_ratios).sum(1)
        )
        loss, count = -logsigmoid(margin).sum(), rows.sum()
        values = {"dico/margin": margin.detach(), "dico/accuracy": margin > 0}
        metrics = {
            name: (value.double().sum(), count) for name, value in values.items()
        }
        return loss, count, {"loss/policy": (loss.detach(), count), **metrics}


def structured_objective(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """Make the objective whose losses [B] of B images are ``loss(s, best, gaps)``,
    after Edunov et al. 2018, "Classical structured prediction losses for sequence to
    sequence learning" (equations of fig. 1).

    The cost of a sample is its gap [B, K]; ``s`` [B, K] is its score, the mean
    log-probability of its tokens up to and including EOS; ``best`` [B, 1] is the index
    of u*. Logs ``loss/policy``.
    """

    def objective(
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        scores: Scores,
        advantages: Tensor,
    ) -> tuple[Tensor, Tensor, Metrics]:
        """See ``structured_objective``; the docstring of ``loss`` replaces this one."""
        rows, best, gaps = gaps_to_best(scores.samples)
        total, images = (
            loss(((logprobs * mask).sum(-1) / mask.sum(-1))[rows], best, gaps).sum(),
            rows.sum(),
        )
        return total, images, {"loss/policy": (total.detach(), images)}

    objective.__name__, objective.__doc__ = loss.__name__, loss.__doc__
    return objective


@structured_objective
def seq_nll(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Sequence negative log-likelihood (eq. 3): - s(u*) + log sum_u exp s(u)."""
    return s.logsumexp(1) - s.gather(1, best).squeeze(1)


@structured_objective
def risk(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Expected risk (eq. 4): sum_u gap(u) p(u), p = softmax of s over the samples."""
    return (gaps * s.softmax(1)).sum(1)


@structured_objective
def max_margin(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Max-margin (eq. 5): max(0, gap(v) - s(u*) + s(v)), v the sample with the highest score s."""
    return _hinges(s, best, gaps).gather(1, s.argmax(1, keepdim=True)).squeeze(1)


@structured_objective
def multi_margin(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Multi-margin (eq. 6): sum_u max(0, gap(u) - s(u*) + s(u))."""
    return _hinges(s, best, gaps).sum(1)


@structured_objective
def softmax_margin(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Softmax-margin (eq. 7): - s(u*) + log sum_u exp(s(u) + gap(u))."""
    return (s + gaps).logsumexp(1) - s.gather(1, best).squeeze(1)


def gaps_to_best(rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mask [B] of the images whose samples have different rewards; for these images,
    the index [., 1] of u* and the gaps [., K].
    """
    highest, best = rewards.max(1, keepdim=True)
    gaps = highest - rewards
    rows = gaps.amax(1) > 0
    return rows, best[rows], gaps[rows]


def _hinges(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    return (gaps - s.gather(1, best) + s).relu()


def build_objective(
    name: str,
    kwargs: Mapping[str, Any],
    loss_reduction: LossReduction = "token",
    kl_coef: float = 0.0,
) -> Objective:
    """The objective ``train.objective`` (a name, or ``package.module:Name``) with
    ``train.objective_kwargs``.

    ``loss_reduction`` and ``kl_coef`` have configuration keys of their own. If an
    objective has no such option, any value but the default is refused.

    Raises:
        ConfigError: an unknown name, a target that cannot be imported or called, an
            unknown or missing option, or a value out of its range.
    """
    target = load_target(name, "train.objective", OBJECTIVES)
    takes = options_of(target, SEAM)
    options = dict(kwargs)
    for key, value in (("loss_reduction", loss_reduction), ("kl_coef", kl_coef)):
        if key in kwargs:
            raise ConfigError(
                f"train.objective_kwargs.{key} is set: set train.{key} instead"
            )
        if key in takes:
            options[key] = value
        elif value != getattr(Reinforce, key):
            raise ConfigError(
                f"train.{key} is {value!r}: train.objective {name} does not have it, leave it out"
            )
    objective: Objective = build_target(
        target, SEAM, name, options, "train.objective_kwargs"
    )
    return objective


def sum_and_count(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    scores: Scores,
    advantages: Tensor,
) -> tuple[Tensor, Tensor, Metrics]:
    """Call ``objective`` on a micro-batch, and check what it returns (see
    ``Objective``).

    Raises:
        ConfigError: it is from outside this package and failed, or returned something else.
    """
    with errors_of_user_code(f"train.objective {target_name(objective)}"):
        answer = objective(
            logprobs, old_logprobs, ref_logprobs, mask, scores, advantages
        )
    kinds = tuple(map(type, answer)) if isinstance(answer, tuple) else ()
    if (
        len(kinds) != 3
        or not issubclass(kinds[0], Tensor)
        or not issubclass(kinds[1], Tensor)
    ):
        raise ConfigError(
            f"train.objective returned {shown(answer)}: expected a sum, a count (tensors), and "
            f"metrics"
        )
    return answer


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(policy || reference) of each token on the policy's own samples, in nats: the
    k3 estimator, unbiased and never negative (Schulman 2020, "Approximating KL
    divergence"): exp(d) - d - 1, d = log ref - log policy.

    [...], [...] -> [...] float64. For logs; as a loss it would have the gradient of
    another divergence. In float64: after a far update d is above 88, where exp
    overflows float32, and near 0 the terms cancel.
    """
    difference = (reference_logprobs - logprobs).double()
    return difference.expm1() - difference


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL to the reference policy as a loss: the k2 estimator, half the squared
    log-ratio of each token.

    On the policy's own samples its gradient is an unbiased estimate of the gradient of
    each token's KL(policy || reference) (Tang and Munos 2025, "On a few pitfalls in KL
    divergence gradient estimation for RL").

    [...] with gradient, [...] constant -> [...].
    """
    return 0.5 * (logprobs - reference_logprobs.detach()).square()


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    row: Tensor | None = None,
) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature): [..., V], [...] -> [...]."""
    return token_logprobs_and_entropy(logits, token_ids, temperature, row)[0]


def token_logprobs_and_entropy(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under softmax(logits / temperature) and the
    distribution's entropy, in nats.

    Logits [..., V] float32 and token ids [...] -> log-probabilities [...] with gradient
    and entropies [...] without. With ``row`` [P], logits are [U, V] and token p is
    looked up in row ``row[p]``; tokens may share a row. For the backward pass nothing
    of the logits' size is kept but the logits, and one such tensor is made, the
    gradient.
    """
    ids = token_ids.flatten()
    rows = torch.arange(len(ids), device=ids.device) if row is None else row
    result: tuple[Tensor, Tensor] = _TokenStatistics.apply(
        logits.flatten(0, -2), ids, rows, temperature
    )
    return result[0].view(token_ids.shape), result[1][rows].view(token_ids.shape)


class _TokenStatistics(torch.autograd.Function):
    """``token_logprobs_and_entropy`` of U rows of V logits and P tokens, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ids: Tensor, row: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities [P] and entropies [U]; of each row its largest logit and
        the logarithm of its sum are kept.

        The largest one is subtracted before anything else: where all logits are far
        from 0, as GPT-2's are, their last digits would be lost.
        """
        highest, totals, entropies = rows.new_empty(3, len(rows), 1)
        for chunk in _parts(rows):
            highest[chunk] = rows[chunk].amax(-1, keepdim=True)
            below = (rows[chunk] - highest[chunk]).div_(temperature)
            weights = below.exp()
            sums = weights.sum(-1, keepdim=True)
            totals[chunk] = sums.log()
            entropies[chunk] = (
                totals[chunk] - below.mul_(weights).sum(-1, keepdim=True) / sums
            )
        ctx.save_for_backward(rows, ids, row, highest, totals)
        ctx.temperature = temperature
        entropies = entropies.squeeze(-1)
        ctx.mark_non_differentiable(entropies)
        return (rows[row, ids] - highest[row, 0]) / temperature - totals[
            row, 0
        ], entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """(1[token] - softmax) / temperature, times the gradient of the
        log-probability, summed over a row's tokens.
        """
        rows, ids, row, highest, totals = ctx.saved_tensors
        gradient = gradients[0] / ctx.temperature
        per_row = torch.zeros_like(totals).index_add_(0, row, gradient.unsqueeze(-1))
        result = torch.empty_like(rows)
        for chunk in _parts(rows):
            probabilities = (
                (rows[chunk] - highest[chunk])
                .div_(ctx.temperature)
                .sub_(totals[chunk])
                .exp_()
            )
            torch.mul(probabilities, -per_row[chunk], out=result[chunk])
        result.view(-1).scatter_add_(0, row * rows.shape[-1] + ids, gradient)
        return result, None, None, None


def _parts(rows: Tensor) -> list[slice]:
    size = max(CHUNK // rows.shape[-1], 1)
    return [slice(start, start + size) for start in range(0, len(rows), size)]
