"""Objectives that compare the K samples of an image as wholes, by their rewards: DiCO and classical structured losses.

B images, K samples each, L tokens. Each is a mean over images, takes rewards and not advantages, and does not change
when a constant is added to all rewards of an image. ``u*`` is the sample with the highest reward (the first of equal
ones); the gap of a sample u is r(u*) - r(u), at least 0. Images whose samples all have the same reward are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_caption.options import Positive, Temperature
from rl_caption.scst.objectives import Metrics, Objective
from rl_caption.types import Scores


@dataclass(frozen=True)
class Dico:
    """Direct CLIP-based optimization (Moratelli et al. 2024): the best sample against the others, as a classification.

    - log sigmoid(``beta`` (D(u*) - sum_i gamma_i D(u_i))) over the other samples u_i, with D(u) = log pi(u) / pi_ref(u)
    (sums over tokens), pi_ref the starting policy, and gamma = softmax(gap / ``temperature``) over the u_i, so that
    the worst weigh most. docs/scst.md says what is not known of the original.
    """

    beta: Positive = 0.2
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
            raise ValueError("objective 'dico' needs the log-probabilities of the starting policy")
        rows, best, gaps = compared(scores.samples)
        log_ratios = ((logprobs - ref_logprobs.detach()) * mask).sum(-1)[rows]
        gamma = (gaps / self.temperature).scatter(1, best, -torch.inf).softmax(1)
        margin = self.beta * (log_ratios.gather(1, best).squeeze(1) - (gamma * log_ratios).sum(1))
        loss, count = -logsigmoid(margin).sum(), rows.sum()
        values = {"dico/margin": margin.detach(), "dico/accuracy": margin > 0}
        metrics = {name: (value.double().sum(), count) for name, value in values.items()}
        return loss, count, {"loss/policy": (loss.detach(), count), **metrics}


def structured(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """The objective whose losses of B images [B] are ``loss(s, best, gaps)``: those of Edunov et al. 2018, "Classical
    structured prediction losses for sequence to sequence learning" (equations of fig. 1).

    The cost of a sample is its gap [B, K]; ``s`` [B, K] is its score, the mean log-probability of its tokens up to and
    including EOS; ``best`` [B, 1] is the index of u*. Logs ``loss/policy``.
    """

    def objective(
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        scores: Scores,
        advantages: Tensor,
    ) -> tuple[Tensor, Tensor, Metrics]:
        """See ``structured``; its own docstring is that of ``loss``."""
        rows, best, gaps = compared(scores.samples)
        total, images = loss(((logprobs * mask).sum(-1) / mask.sum(-1))[rows], best, gaps).sum(), rows.sum()
        return total, images, {"loss/policy": (total.detach(), images)}

    objective.__name__, objective.__doc__ = loss.__name__, loss.__doc__
    return objective


@structured
def seq_nll(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Sequence negative log-likelihood (eq. 3): - s(u*) + log sum_u exp s(u)."""
    return s.logsumexp(1) - s.gather(1, best).squeeze(1)


@structured
def risk(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Expected risk (eq. 4): sum_u gap(u) p(u), p = softmax of s over the samples."""
    return (gaps * s.softmax(1)).sum(1)


@structured
def max_margin(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Max-margin (eq. 5): max(0, gap(v) - s(u*) + s(v)), v the sample with the highest score s."""
    return _hinges(s, best, gaps).gather(1, s.argmax(1, keepdim=True)).squeeze(1)


@structured
def multi_margin(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Multi-margin (eq. 6): sum_u max(0, gap(u) - s(u*) + s(u))."""
    return _hinges(s, best, gaps).sum(1)


@structured
def softmax_margin(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    """Softmax-margin (eq. 7): - s(u*) + log sum_u exp(s(u) + gap(u))."""
    return (s + gaps).logsumexp(1) - s.gather(1, best).squeeze(1)


def compared(rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of B images [B] have samples of different rewards; of those, the index of u* [., 1] and the gaps [., K]."""
    highest, best = rewards.max(1, keepdim=True)
    gaps = highest - rewards
    rows = gaps.amax(1) > 0
    return rows, best[rows], gaps[rows]


def _hinges(s: Tensor, best: Tensor, gaps: Tensor) -> Tensor:
    return (gaps - s.gather(1, best) + s).relu()
