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
    rows = required_column(columns, "references", reward, count)
    identities = list(map(id, rows))  # the samples of an image share one list
    first = dict(zip(reversed(identities), reversed(range(count)), strict=True))
    checked = {identity: _checked(rows[row], row, reward) for identity, row in first.items()}
    return list(map(checked.__getitem__, identities))


def _checked(captions: Any, row: int, reward: str) -> tuple[str, ...]:
    if type(captions) in (list, tuple) and set(map(type, captions)) == {str}:
        return tuple(captions)
    if isinstance(captions, str) or not isinstance(captions, Sequence):
        raise RewardError(
            f"reward {reward!r}: references of row {row} are {captions!r:.80}: expected a list of strings"
        )
    if not captions:
        raise RewardError(f"reward {reward!r}: row {row} has no reference; it needs at least one per image")
    for caption in captions:
        if not isinstance(caption, str):
            raise RewardError(f"reward {reward!r}: row {row} has the reference {caption!r:.80}: expected a string")
    return tuple(captions)
