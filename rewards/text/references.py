"""The ``references`` column, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewards.base import RewardError, required_column


def reference_lists(columns: dict[str, Any], reward: str, count: int) -> list[tuple[str, ...]]:
    """Return the references of each of ``count`` rows.

    Raises:
        RewardError: the column is missing or has another length, a row has no reference, or one is not a string.
    """
    checked: dict[int, tuple[str, ...]] = {}  # the samples of an image share one list
    rows = required_column(columns, "references", reward, count)
    for row, captions in enumerate(rows):
        if id(captions) not in checked:
            checked[id(captions)] = _checked(captions, row, reward)
    return [checked[id(captions)] for captions in rows]


def _checked(captions: Any, row: int, reward: str) -> tuple[str, ...]:
    if isinstance(captions, str) or not isinstance(captions, Sequence):
        raise RewardError(
            f"reward {reward!r}: references of row {row} are {captions!r:.80}: expected a list of strings"
        )
    if set(map(type, captions)) == {str}:
        return tuple(captions)
    if not captions:
        raise RewardError(f"reward {reward!r}: row {row} has no reference; it needs at least one per image")
    for caption in captions:
        if not isinstance(caption, str):
            raise RewardError(f"reward {reward!r}: row {row} has the reference {caption!r:.80}: expected a string")
    return tuple(captions)
