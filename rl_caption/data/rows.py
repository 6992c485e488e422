"""Rows grouped by split: what the file formats share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError, Row
from rl_caption.data.feature_arrays import ImageSize
from rl_caption.data.features import FeatureOptions, features_of

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


def add_features(
    rows: Mapping[str, list[Row]],
    root: str | Path | None,
    options: Mapping[str, Any] | None = None,
    sizes: Mapping[str, ImageSize] | None = None,
) -> None:
    """Give every row ``features``, its ``ImageFeatures`` under ``root``; nothing where ``root`` is None.

    Args:
        rows: by split.
        root: a folder or an HDF5 file.
        options: arguments of ``FeatureOptions``.
        sizes: image id -> width and height in pixels, where they are known.

    Raises:
        DataError: ``root`` is neither, or there are options without a root, or wrong ones.
    """
    if root is None:
        if options:
            raise DataError(f"features_kwargs is {dict(options)}, but features_root is not set")
        return
    every = [row for split in rows.values() for row in split]
    for row, found in zip(every, features_of(every, root, FeatureOptions.of(options), sizes), strict=True):
        row["features"] = found
