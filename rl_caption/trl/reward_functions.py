"""The terms of a mixed reward as TRL's reward functions, told which captions ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rewards.base import Reward, RewardError, checked_scores
from rewards.mixed import MixedReward


class FinishedAware:
    """A reward that gets the column ``finished`` from TRL's ``completion_ids``.

    TRL passes the token ids of a caption up to and including EOS; a caption that ran into the length limit has none.
    Without the column CIDEr-D would give such captions an EOS (docs/trl.md).
    """

    def __init__(self, reward: Reward, eos_token_ids: Collection[int], name: str | None = None) -> None:
        """Wrap ``reward``; ``name`` is its log key, by default its own."""
        self.reward = reward
        self.eos_token_ids = frozenset(eos_token_ids)
        self.__name__ = name or reward.__name__
        self.columns, self.bounds, self.signature = reward.columns, reward.bounds, reward.signature

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return N scores.

        Raises:
            RewardError: as the reward does; also for a score that is None or not finite, which TRL would leave out.
        """
        ids = columns.get("completion_ids")
        if ids is not None and "finished" not in columns:
            columns["finished"] = [bool(row) and row[-1] in self.eos_token_ids for row in ids]
        try:
            return checked_scores(self, self.reward(prompts, completions, **columns), len(completions))
        except RewardError as error:
            raise RewardError(f"reward term {self.__name__!r}: {error}") from error


def reward_functions(mixed: MixedReward, eos_token_ids: Collection[int]) -> tuple[list[FinishedAware], list[float]]:
    """The terms of ``mixed`` for ``reward_funcs``, and their weights for ``reward_weights``."""
    terms = [FinishedAware(reward, eos_token_ids, name) for name, reward in mixed.rewards.items()]
    return terms, [mixed.weights[name] for name in mixed.rewards]
