"""Names of splits as data sets write them, and rows by the split that they name themselves."""

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rewards.devices import is_main_process
from rl_caption.data.base import DataError, Row, RowView
from rl_caption.data.plain_files import shown

logger = logging.getLogger(__name__)
STANDARD_SPLITS = ("train", "restval", "val", "test")
OTHER_NAMES = {
    "training": "train",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "testing": "test",
}
"""Usual names of the standard splits -> the names here."""


def standard_split(name: str) -> str:
    """The standard split that is meant by a name (``Train``, ``validation``), or else the name
    itself.
    """
    plain = name.strip().casefold()
    split = OTHER_NAMES.get(plain, plain)
    return split if split in STANDARD_SPLITS else name


class SplitNames:
    """Reads the splits of the rows of ``source``, and counts those that are not written as the
    standard splits are.

    A usual name (``training``, ``Validation``) is read as the standard split, a misspelt one is an
    error, and any other (``test_unseen``) is a split of its own. ``restval`` is ``train`` unless
    told otherwise.
    """

    def __init__(self, source: str | Path, restval_as_train: bool = True) -> None:
        self.source, self.restval_as_train = source, restval_as_train
        self.unusual: dict[str, list[str]] = {}
        """Name -> where its rows are."""

    def read(self, name: object, where: str) -> str:
        """The split of a row; ``where`` it is stands in messages. Raises ``DataError`` for a
        misspelt name.
        """
        if name in STANDARD_SPLITS:
            return "train" if name == "restval" and self.restval_as_train else str(name)
        known = ", ".join(STANDARD_SPLITS)
        if not isinstance(name, str) or not name.strip():
            raise DataError(
                f"{where}: the split is {shown(name)}: expected a text, such as {known}"
            )
        split, plain = standard_split(name), name.strip().casefold()
        meant = difflib.get_close_matches(plain, [*STANDARD_SPLITS, *OTHER_NAMES], 1, cutoff=0.8)
        # What goes on after a known name, such as testA or val2, is no misspelling.
        if split not in STANDARD_SPLITS and meant and not plain.startswith(meant[0]):
            raise DataError(
                f"{where}: the split is {shown(name)}: did you mean {meant[0]!r}? Known splits are "
                f"{known}"
            )
        self.unusual.setdefault(name, []).append(where)
        return split

    def warn(self) -> None:
        """Log each unusual name with the number of its rows and the first."""
        for name, places in self.unusual.items() if is_main_process() else ():
            split = standard_split(name)
            use = (
                "is read only where it is named (eval.split, --split)"
                if split == name
                else f"is read as {split!r}"
            )
            logger.warning(
                "WARNING: %s: the split %s of %d rows (first: %s) is none of %s: it %s",
                self.source, shown(name), len(places), places[0], ", ".join(STANDARD_SPLITS), use,
            )  # fmt: skip


def regrouped(
    rows: Mapping[str, Sequence[Row]], splits: Mapping[str, Iterable[str]]
) -> dict[str, Sequence[Row]]:
    """Rows of stored parts by the split of each row, in the order of the parts."""
    places: dict[str, list[tuple[str, int]]] = {}
    for part, names in splits.items():
        for index, split in enumerate(names):
            places.setdefault(split, []).append((part, index))
    return {split: RowView(found, partial(_row_at, rows)) for split, found in places.items()}


def _row_at(rows: Mapping[str, Sequence[Row]], index: int, place: tuple[str, int]) -> Row:
    part, number = place
    return rows[part][number]
