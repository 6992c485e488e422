"""What checks of a dataset found, and the dataset without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, overload

from rl_caption.data.base import DataError, DataModule, Row

SHOWN = 3
"""Offenders that a report names for each kind of problem."""

MISSING = "missing images"
UNREADABLE = "unreadable images"
BAD_FEATURES = "missing or unusable features"
EMPTY_CAPTIONS = "empty captions"
NO_REFERENCES = "images without references"
DUPLICATE_IDS = "duplicate image ids in a split"
LEAKED_IDS = "image ids in two splits"
LEAKED_FILES = "image files in two splits"
LEAKED_CONTENT = "equal images in two splits"

ADVICE = {
    MISSING: "complete the images, or set data.on_bad: skip",
    UNREADABLE: "replace the files, or set data.on_bad: skip",
    BAD_FEATURES: "extract them again, or set data.on_bad: skip",
    EMPTY_CAPTIONS: "remove them, or set data.on_bad: skip",
    NO_REFERENCES: "add captions, or set data.on_bad: skip",
    DUPLICATE_IDS: "write one row per image, with all its references",
    LEAKED_IDS: "use one id per image, and each image in one split",
    LEAKED_FILES: "keep each image in one split; data.on_bad: skip takes them out of train",
    LEAKED_CONTENT: "keep each image in one split; data.on_bad: skip takes them out of train",
}
"""What would be right, for each kind, in the order of the report."""


@dataclass(frozen=True)
class Problem:
    """One kind of problem."""

    kind: str
    """One of the names above, such as ``missing images``."""
    count: int
    """How many: rows, captions for empty captions, images for leakage."""
    offenders: tuple[str, ...]
    """The first of them, at most ``SHOWN``."""
    advice: str
    """What would be right."""

    def __str__(self) -> str:
        more = f", and {self.count - len(self.offenders)} more" if self.count > len(self.offenders) else ""
        return f"{self.count} {self.kind}: {'; '.join(self.offenders)}{more} ({self.advice})"


@dataclass(frozen=True)
class CheckReport:
    """What the checks found in some splits of a dataset, and which rows are good."""

    rows: Mapping[str, int]
    """Number of rows of every split that was checked."""
    problems: tuple[Problem, ...]
    """Every kind of problem that occurs."""
    kept: Mapping[str, Sequence[int]]
    """Indices of the rows to keep, per split, ascending."""
    references: Mapping[str, Mapping[int, list[str]]]
    """The references of those rows that lost empty captions, by split and index."""
    skips: bool
    """Whether the bad rows are left out (``data.on_bad: skip``), which the text then says."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem at all."""
        return not self.problems

    @property
    def left_out(self) -> dict[str, int]:
        """Number of rows per split that ``filtered`` leaves out."""
        return {split: self.rows[split] - len(self.kept[split]) for split in self.rows}

    def __str__(self) -> str:
        splits = ", ".join(f"{split} {count}" for split, count in self.rows.items())
        if self.ok:
            return f"data: no problems in {sum(self.rows.values())} rows ({splits})"
        lines = [f"data: {len(self.problems)} kinds of problem in {sum(self.rows.values())} rows ({splits}):"]
        lines += [f"  - {problem}" for problem in self.problems]
        return "\n".join([*lines, self.summary_of_left_out()] if self.skips else lines)

    def summary_of_left_out(self) -> str:
        """Say in one line what ``filtered`` leaves out."""
        rows = ", ".join(f"{split} {count} of {self.rows[split]} rows" for split, count in self.left_out.items())
        captions = sum(problem.count for problem in self.problems if problem.kind == EMPTY_CAPTIONS)
        return f"left out: {rows}; empty captions: {captions}"

    def filtered(self, data: DataModule) -> DataModule:
        """Return ``data`` with the good rows only; splits that were not checked stay as they are.

        Raises:
            DataError: ``data`` is not the dataset that was checked (a split has another length).
        """
        return _FilteredData(data, self)


class _FilteredData:
    def __init__(self, data: DataModule, report: CheckReport) -> None:
        self._data = data
        self._report = report
        for split, count in report.rows.items():
            if len(data.split(split)) != count:
                raise DataError(f"split {split!r} has {len(data.split(split))} rows, but {count} were checked")

    @property
    def splits(self) -> tuple[str, ...]:
        return self._data.splits

    def split(self, name: str) -> Sequence[Row]:
        rows = self._data.split(name)
        if name not in self._report.kept:
            return rows
        return _KeptRows(rows, self._report.kept[name], self._report.references.get(name, {}))


class _KeptRows(Sequence[Row]):
    """Some rows of a sequence that may draw or read its rows only when asked."""

    def __init__(self, rows: Sequence[Row], kept: Sequence[int], references: Mapping[int, list[str]]) -> None:
        self._rows, self._kept, self._references = rows, kept, references

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return _KeptRows(self._rows, self._kept[index], self._references)
        original = self._kept[index]
        row = self._rows[original]
        if original not in self._references:
            return row
        return cast(Row, {**row, "references": self._references[original]})
