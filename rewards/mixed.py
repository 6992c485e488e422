"""A weighted sum of rewards that keeps every term's own scores at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.base import Reward, RewardError, checked_scores


class MixedReward:
    """Weighted sum of rewards, sum_t w_t r_t. No term is rescaled: the weights carry the scales.

    ``bounds`` follow from those of the terms and the weights (a negative weight swaps a term's bounds), ``columns`` is
    what any of them needs, and ``signature`` lists all with their weights.
    """

    __name__ = "total"

    def __init__(self, terms: Mapping[str, tuple[Reward, float]]) -> None:
        """Choose the terms.

        Args:
            terms: log key -> (reward, weight).

        Raises:
            ValueError: there is no term, or a weight is not a finite number.
        """
        if not terms:
            raise ValueError("a mixed reward needs at least one term")
        for name, (_, weight) in terms.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"reward term {name!r} has the weight {weight!r}: expected a finite number")
        self.rewards = {name: reward for name, (reward, _) in terms.items()}
        self.weights = {name: float(weight) for name, (_, weight) in terms.items()}
        self.columns: frozenset[str] = frozenset().union(*(reward.columns for reward in self.rewards.values()))
        ends = [_scaled(reward.bounds, self.weights[name]) for name, reward in self.rewards.items()]
        self.bounds = (math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends))

    @property
    def signature(self) -> str:
        """The term's own signature where there is one of weight 1, else all as ``0.5*[...]+0.5*[...]``."""
        if list(self.weights.values()) == [1.0]:
            return next(iter(self.rewards.values())).signature
        return "+".join(f"{self.weights[name]:g}*[{reward.signature}]" for name, reward in self.rewards.items())

    def terms(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> dict[str, list[float]]:
        """Score N captions by every term: log key -> N unweighted scores.

        Raises:
            RewardError: a term failed, or returned another number of scores or one that is not finite.
        """
        scores = {}
        for name, reward in self.rewards.items():
            try:
                scores[name] = checked_scores(reward, reward(prompts, completions, **columns), len(completions))
            except RewardError as error:
                raise RewardError(f"reward term {name!r}: {error}") from error
        return scores

    def combine(self, terms: Mapping[str, Sequence[float]]) -> list[float]:
        """Return the N weighted sums of what ``terms`` returned."""
        rows = zip(*(terms[name] for name in self.weights), strict=True)
        weights = list(self.weights.values())
        return [math.fsum(weight * score for weight, score in zip(weights, row, strict=True)) for row in rows]

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions by the weighted sum.

        Where ``columns`` has TRL's ``log_metric``, the mean of every term is reported to it as ``reward/<term>``.

        Raises:
            RewardError: as for ``terms``.
        """
        terms = self.terms(prompts, completions, **columns)
        log_metric = columns.get("log_metric")
        if log_metric is not None and completions:
            for name, values in terms.items():
                log_metric(f"reward/{name}", math.fsum(values) / len(values))
        return checked_scores(self, self.combine(terms), len(completions))


def _scaled(bounds: tuple[float, float], weight: float) -> tuple[float, float]:
    if weight == 0:
        return 0.0, 0.0  # also where a bound is infinite
    low, high = weight * bounds[0], weight * bounds[1]
    return min(low, high), max(low, high)
