"""Schedules over the steps of a run: weights of reward terms, and the sampling
temperature.

Schedules are pure functions of the step, so a resumed run needs no state for them.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rewards.mixed import MixedReward

Points: TypeAlias = Sequence[tuple[int, float]]
"""(step, factor) in the order of the steps; equal steps are a jump."""


def factor_at(points: Points, step: int) -> float:
    """The factor at ``step`` (from 0): linear between two points, constant before the
    first and after the last one.

    Of points with the same step the last one counts from that step on. Without points
    the factor is 1.
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
