"""What changes over the steps of a run: weights of reward terms, the sampling temperature, the KL
coefficient.

Schedules are pure functions of the step, so a resumed run needs no state for them. The KL
coefficient depends on all
steps before: it is saved with every checkpoint.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rewards.mixed import MixedReward
from rl_caption.scst.objectives import Objective

Points: TypeAlias = Sequence[tuple[int, float]]
"""(step, factor) in the order of the steps; equal steps are a jump."""
KL_COEF, KL_START = "kl_coef", "kl_start"
"""Keys of ``TrainState.notes``, which is saved with a run."""
MAX_ERROR = 0.2
"""Largest relative error of the divergence that one update of the KL coefficient corrects."""


def factor_at(points: Points, step: int) -> float:
    """The factor at ``step`` (from 0): linear between two points, constant before the first and
    after the last one.

    Of points with the same step the last one counts from that step on. Without points it is 1.
    """
    if not points:
        return 1.0
    after = bisect_right(points, step, key=lambda point: point[0])
    if after in (0, len(points)):
        return float(points[max(after - 1, 0)][1])
    (start, low), (end, high) = points[after - 1 : after + 1]
    return low + (high - low) * (step - start) / (end - start)


def scheduled_weights(
    reward: MixedReward, schedules: Mapping[str, Points], step: int
) -> dict[str, float]:
    """Weight of every term at ``step``: its own times the factor of its schedule, if it has one."""
    return {
        name: weight * factor_at(schedules.get(name, ()), step)
        for name, weight in reward.weights.items()
    }


def adapted_kl_coef(coef: float, kl: float, target: float, horizon: int, captions: int) -> float:
    """The KL coefficient after a step whose ``captions`` samples had the divergence ``kl``, in the
    unit of ``target``.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) captions / horizon): Ziegler et al. 2019,
    "Fine-tuning language models from human preferences", section 2.2, as ``AdaptiveKLController``
    of its code has it.
    """
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coef * (1 + error * captions / horizon)


@dataclass
class AdaptiveKl:
    """The KL coefficient that keeps the divergence from the starting policy near a target.

    Args:
        objective: from a coefficient to the objective with that coefficient.
        start: coefficient of the first step; if a run goes on with another ``start``, it begins
            anew from that.
        target: divergence in nats per token (``policy/kl``).
        horizon: number of captions over which an error of the divergence is corrected (episodes in
            the paper).
        notes: saved with the run; they hold the present coefficient, from which a resumed run goes
            on.
    """

    objective: Callable[[float], Objective]
    start: float
    target: float
    horizon: int
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def coef(self) -> float:
        """The present coefficient."""
        return float(self.notes[KL_COEF]) if self.notes.get(KL_START) == self.start else self.start

    def update(self, kl: float, captions: int) -> None:
        """Adapt the coefficient to the divergence ``kl`` of the newest step's ``captions``, over
        all processes.
        """
        coef = adapted_kl_coef(self.coef, kl, self.target, self.horizon, captions)
        self.notes |= {KL_START: self.start, KL_COEF: coef}
