"""Rows grouped by split: what the file formats share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rl_caption.data.base import DataError, Row
from rl_caption.data.features import feature_paths

STANDARD_SPLITS = ("train", "restval", "val", "test")


def grouped_by_split(
    rows: Iterable[tuple[str, Row]], source: Path, max_images: Mapping[str, int] | None = None
) -> dict[str, list[Row]]:
    """Group ``(split, row)`` pairs; the standard splits come first, then the others in the order of the file.

    Args:
        rows: pairs in the order of the file, which each split keeps.
        source: the file they come from, for messages.
        max_images: at most so many rows of a split, the first ones; splits that are not named stay whole.

    Raises:
        DataError: there is no row, or ``max_images`` names an unknown split or a number below 1.
    """
    found: dict[str, list[Row]] = {}
    for split, row in rows:
        found.setdefault(split, []).append(row)
    if not found:
        raise DataError(f"{source} holds no images")
    for split, limit in (max_images or {}).items():
        if split not in found:
            raise DataError(f"max_images names the split {split!r}; {source} has {sorted(found)}")
        if limit < 1:
            raise DataError(f"max_images.{split} is {limit}: expected at least 1 image")
        found[split] = found[split][:limit]
    standard = [split for split in STANDARD_SPLITS if split in found]
    return {split: found[split] for split in [*standard, *(name for name in found if name not in STANDARD_SPLITS)]}


def rows_of(rows: Mapping[str, list[Row]], name: str, source: Path) -> Sequence[Row]:
    """Return the rows of split ``name``.

    Raises:
        DataError: there is no such split.
    """
    if name not in rows:
        raise DataError(f"no split {name!r} in {source}: it has {', '.join(rows)}")
    return rows[name]


def add_features(rows: Mapping[str, list[Row]], root: str | Path) -> None:
    """Give every row ``features``, the path of its file of region features under ``root``.

    Raises:
        DataError: ``root`` is not a folder.
    """
    every = [row for split in rows.values() for row in split]
    for row, path in zip(every, feature_paths(root, [row["image_id"] for row in every]), strict=True):
        row["features"] = path
