"""A weighted sum of rewards, with the scores of every term available on their own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rewards.base import Reward, checked_scores, score_captions
from rewards.options import check_values
from rewards.text.tokenize import TOKENIZER

Normalize = Literal["none", "per_term", "per_group"]
ROUNDING = 1e-6
"""A standard deviation below this fraction of the largest absolute score is rounding
(embeddings are float32).
"""

LOG_KEYS = frozenset({"total", "std", "greedy"})
"""Names that no term may have: ``reward/NAME`` is a log key of the whole reward (docs/metrics.md).
"""


class Moments(NamedTuple):
    """Mean and standard deviation (divisor N) of one term's scores."""

    mean: float
    std: float


def moments(scores: Sequence[float]) -> Moments:
    """Return mean and standard deviation of N scores.

    A standard deviation that is only rounding (``ROUNDING``) counts as 0; without scores, both are
    0. Sums are exact, so the result depends neither on the order of the scores nor on the number of
    processes.
    """
    if not scores:
        return Moments(0.0, 0.0)
    std = statistics.pstdev(scores)
    return Moments(
        statistics.fmean(scores), std if std > ROUNDING * max(map(abs, scores)) else 0.0
    )


def z_scores(scores: Sequence[float], of: Moments) -> list[float]:
    """Return the z-scores (r - mean) / std of N scores; if std is 0, they are all 0."""
    return [(score - of.mean) / of.std if of.std else 0.0 for score in scores]


class MixedReward:
    """Weighted sum of rewards, sum_t w_t r_t, or of their z-scores, sum_t w_t (r_t -
    mean_t) / std_t.

    For raw scores (``normalize="none"``), ``bounds`` follow from the bounds and weights
    of the terms. Z-scores (``per_term``, ``per_group``) are relative to other captions:
    they have no bounds, and totals of different calls do not compare. ``columns`` is
    the union over the terms.

    Args:
        terms: log key -> (reward, weight).
        normalize: ``none`` adds raw scores; ``per_term`` and ``per_group`` add z-scores
            of every term. The caller of ``combine`` decides over which captions: all of
            a step (``per_term``), or the samples of an image (``per_group``).
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``, which a trainer uses for
            its statistics of captions.

    Raises:
        ValueError: there is no term, a weight is not a finite number, ``normalize`` is
            unknown, or a term has a name of ``LOG_KEYS``.
    """

    __name__ = "total"

    def __init__(
        self,
        terms: Mapping[str, tuple[Reward, float]],
        normalize: Normalize = "none",
        tokenizer: str = TOKENIZER,
    ) -> None:
        check_values(Normalize, normalize=normalize)
        if not terms:
            raise ValueError("a mixed reward needs at least one term")
        if used := sorted(LOG_KEYS & terms.keys()):
            raise ValueError(
                f"reward/{used[0]} is another log key: rename the term {used[0]!r}"
            )
        for name, (_, weight) in terms.items():
            check_values(float, **{f"weight of {name!r}": weight})
        self.rewards = {name: reward for name, (reward, _) in terms.items()}
        self.weights = {name: float(weight) for name, (_, weight) in terms.items()}
        self.tokenizer = tokenizer
        self.normalize = normalize
        self.columns: frozenset[str] = frozenset().union(
            *(reward.columns for reward in self.rewards.values())
        )
        ends = []
        for name, weight in self.weights.items():
            low, high = self.rewards[name].bounds
            if weight:  # of 0, an infinite bound adds none
                ends.append(sorted((weight * low, weight * high)))
        self.bounds = (
            math.fsum(low for low, _ in ends),
            math.fsum(high for _, high in ends),
        )
        if normalize != "none":
            self.bounds = (-math.inf, math.inf)

    @property
    def signature(self) -> str:
        """``0.5*[...]+0.5*[...]``, inside ``per_term(...)`` or ``per_group(...)`` for
        z-scores; for a single raw term of weight 1, the term's own signature.
        """
        labels = {name: reward.signature for name, reward in self.rewards.items()}
        if self.normalize == "none" and list(self.weights.values()) == [1.0]:
            return next(iter(labels.values()))
        terms = "+".join(
            f"{weight:g}*[{labels[name]}]" for name, weight in self.weights.items()
        )
        return terms if self.normalize == "none" else f"{self.normalize}({terms})"

    def with_weights(self, weights: Mapping[str, float]) -> MixedReward:
        """The same mixture with other weights."""
        terms = {name: (reward, weights[name]) for name, reward in self.rewards.items()}
        return MixedReward(terms, self.normalize, self.tokenizer)

    def terms(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> dict[str, list[float]]:
        """Score N captions by every term: log key -> N raw scores.

        Raises:
            RewardError: as ``score_captions``.
        """
        return {
            name: score_captions(
                reward, f"reward term {name!r}", prompts, completions, columns
            )
            for name, reward in self.rewards.items()
        }

    def combine(
        self,
        terms: Mapping[str, Sequence[float]],
        of: Mapping[str, Moments] | None = None,
    ) -> list[float]:
        """Return the weighted sums [N] of the raw scores of ``terms`` (log key -> N scores).

        ``of`` are the moments of every term that z-scores are computed with, for
        example over all captions of a step or over the samples of an image; None uses
        the moments of these N captions.
        """
        if self.normalize != "none":
            if of is None:
                of = {name: moments(terms[name]) for name in self.weights}
            terms = {name: z_scores(terms[name], of[name]) for name in self.weights}
        rows = zip(*(terms[name] for name in self.weights), strict=True)
        weights = list(self.weights.values())
        return [
            math.fsum(
                weight * score for weight, score in zip(weights, row, strict=True)
            )
            for row in rows
        ]

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the weighted sum; z-scores are taken over these N
        captions. Raises as ``terms``.

        As a z-score a single caption scores 0, and a trainer that calls this in several
        processes normalises in each separately (``rl_caption`` uses all samples of a
        step, or all of an image, instead). The mean of every term is passed to TRL's
        ``log_metric``, where ``columns`` has it, as ``reward/<term>``.
        """
        terms = self.terms(prompts, completions, **columns)
        log_metric = columns.get("log_metric")
        if log_metric is not None and completions:
            for name, values in terms.items():
                log_metric(f"reward/{name}", math.fsum(values) / len(values))
        return checked_scores(self, self.combine(terms), len(completions))
