"""Where a report finds references and images: the data that a configuration names, or files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_caption.build import ConfigError, build_data
from rl_caption.config import DataConfig
from rl_caption.data.base import DataError, Row


@dataclass(frozen=True)
class Source:
    """Rows by image id, and what has to be said where there are none."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    missing: str = ""


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
