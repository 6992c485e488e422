"""What rewards are told of the rows whose captions they score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("references", "image_id", "image")
"""Columns of rows that rewards may use (``rewards.base.Reward``)."""


def reward_inputs(
    rows: Sequence[Mapping[str, Any]], finished: Sequence[bool] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Prompts and columns for a call of a reward, one item a row.

    Args:
        rows: N rows of data, one for each caption; a prompt that is not there is "".
        finished: whether each caption ended with EOS; None leaves the column out, which means all.

    Returns:
        N prompts, and column -> N values, of those ``COLUMNS`` that every row has.
    """
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if all(name in row for row in rows):
            columns[name] = [row[name] for row in rows]
    if finished is not None:
        columns["finished"] = list(finished)
    return [row.get("prompt", "") for row in rows], columns
