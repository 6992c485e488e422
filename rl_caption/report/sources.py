"""Where a report finds references and images: the data that a configuration names, or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_caption.build import ConfigError, build_data
from rl_caption.config import DataConfig
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import IdKey, find_images, read_references


@dataclass(frozen=True)
class Source:
    """Rows by image id, and what has to be said where there are none."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    missing: str = ""


def source_of(rows: Sequence[Row]) -> Source:
    """Rows that are at hand."""
    return Source({row["image_id"]: row for row in (rows[index] for index in range(len(rows)))})


def rows_of_config(data: Mapping[str, Any] | None, split: str) -> Source:
    """The rows of a split of the section ``data`` of a configuration; without them a report has captions only."""
    if not data:
        return Source({}, "No references and images are shown: the folder does not say which data was captioned.")
    try:
        rows = build_data(DataConfig(**data)).split(split)
        return Source({row["image_id"]: row for row in rows})
    except (DataError, ConfigError, OSError, TypeError) as error:
        where = f"split {split!r} of the data cannot be read from {Path.cwd()}"
        return Source({}, f"No references and images are shown: {where} ({error}).")


def rows_of_files(references: Path, image_folder: Path | None = None, by: IdKey = "image_id") -> Source:
    """Rows made of a file of references and, where it is named, a folder of images.

    Raises:
        DataError: no such file, or an image that is not in the folder.
    """
    known = read_references(references, by=by)
    files: Mapping[str, str] = {}
    if image_folder is not None:
        files = dict(zip(known, find_images(image_folder, known), strict=True))
    return rows_of_references(known, files)


def rows_of_references(references: Mapping[str, list[str]], files: Mapping[str, str] | None = None) -> Source:
    """Rows of the images that have references, and their files where there are any."""
    images = files or {}
    rows = {i: Row(image_id=i, image=images.get(i, ""), references=texts) for i, texts in references.items() if texts}
    return Source(rows, "" if images else "No images are shown: no folder of images was named.")
