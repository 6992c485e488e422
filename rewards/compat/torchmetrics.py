"""A reward as a metric of torchmetrics: ``pip install 'rl-caption[torchmetrics]'``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder


class RewardMetric(Metric):
    """The mean of a reward over all captions of all updates and processes, a float64
    scalar within its bounds.

    CIDEr-D without ``df`` counts document frequencies in the references of each update
    alone: give it ``df``.

    Args:
        reward: a reward, or the name of one (``rewards.registry.available()``, or
            ``package.module:Class``).
        reward_kwargs: arguments of a reward that is named.
        **kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: the reward cannot be built.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(
        self,
        reward: Reward | str,
        reward_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(reward, str):
            reward = RewardBuilder(counting=()).build(reward, reward_kwargs or {})
        self.reward = reward
        self.add_state(
            "total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum"
        )
        self.add_state(
            "count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum"
        )

    def update(self, completions: Sequence[str], **columns: Any) -> None:
        """Score N captions with the columns that the reward needs, such as
        ``references`` or ``image``.

        Raises:
            RewardError: the reward cannot score them.
        """
        scores = score_captions(
            self.reward, f"reward {self.reward.__name__!r}", None, completions, columns
        )
        self.total += sum(scores)
        self.count += len(scores)

    def compute(self) -> Tensor:
        """The mean score. Raises ``ValueError`` where no caption has been scored."""
        if not self.count:
            raise ValueError(
                f"{self.reward.__name__}: no caption was scored: call update first"
            )
        return self.total / self.count
