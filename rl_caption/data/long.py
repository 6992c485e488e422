"""Long descriptions as captions: ``data.long_captions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from rl_caption.data.base import DataError, DataModule, Row


class LongCaptions:
    """A dataset whose captions are the long descriptions of another.

    The one reference of a row is its ``long_reference``; the references that it had become ``short_references``.

    Args:
        data: rows with ``long_reference``: ``jsonl`` or ``scenes``.
    """

    def __init__(self, data: DataModule) -> None:
        self.data = data

    @property
    def splits(self) -> tuple[str, ...]:
        """Those of ``data``."""
        return self.data.splits

    def split(self, name: str) -> Sequence[Row]:
        """Return the rows of a split.

        Raises:
            DataError: no split has this name; and, when it is looked at, a row without a long description.
        """
        return _LongRows(self.data.split(name), name)


class _LongRows(Sequence[Row]):
    """Rows of one split, changed as they are looked at."""

    def __init__(self, rows: Sequence[Row], split: str) -> None:
        self._rows, self._split = rows, split

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._long(row) for row in self._rows[index]]
        return self._long(self._rows[index])

    def _long(self, row: Row) -> Row:
        description = row.get("long_reference", "")
        if not description.strip():
            raise DataError(
                f"{self._split} {row['image_id']!r} has no long_reference, which data.long_captions makes its caption: "
                "expected a long description in every row (data.format jsonl or scenes)"
            )
        return {**row, "references": [description], "short_references": row["references"]}
