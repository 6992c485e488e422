"""Random draws that are the same on every platform and for every version of the libraries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Draws:
    """A stream of draws that is a pure function of ``key``.

    Only ``random.Random.random`` is used, the one method whose sequence Python promises to keep; NumPy's generators
    and ``random.choice`` may change between versions, and with them every generated scene.

    Args:
        key: integers and strings; equal keys give equal streams.
    """

    def __init__(self, *key: int | str) -> None:
        self._unit = random.Random("/".join(str(part) for part in key)).random

    def below(self, bound: int) -> int:
        """Return an integer in 0 .. bound - 1."""
        return int(self._unit() * bound)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._unit() < probability

    def choice(self, items: Sequence[Item]) -> Item:
        """Return one item, each equally likely."""
        return items[self.below(len(items))]

    def weighted(self, items: Sequence[Item], weights: Sequence[int]) -> Item:
        """Return one item, item i with probability weights[i] / sum(weights)."""
        position = self.below(sum(weights))
        for item, weight in zip(items, weights, strict=True):
            if position < weight:
                return item
            position -= weight
        raise AssertionError("weights do not cover the draw")

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the items in random order (Fisher-Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
