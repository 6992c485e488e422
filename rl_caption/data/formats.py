"""Data formats by name, and what formats that read a file share.

A format of this package is a line in ``FORMATS``. One from outside is named by ``data.target``
(``package.module:Name``): a class or function that makes a ``DataModule``. Its parameters are its
options, with ranges in their annotations (``Annotated[int, Range(min=1)]``); their values come from
``data.kwargs``, or, for parameters named like one of ``KEYS``, from that key of ``data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rewards.base import naming
from rewards.videos import video_frames
from rl_caption.data.base import BY_REFERENCE, DataError, DataModule, Row, RowView, Splits
from rl_caption.data.features import FeatureOptions, features_of
from rl_caption.data.splits import STANDARD_SPLITS
from rl_caption.runtime.errors import ConfigError, errors_of_user_code
from rl_caption.runtime.options import check_type, load_target, wrong_arguments

if TYPE_CHECKING:
    from rl_caption.config.schema import DataConfig

FORMATS = {
    "karpathy": "rl_caption.data.karpathy:KarpathyData",
    "jsonl": "rl_caption.data.jsonl:JsonLinesData",
    "hub": "rl_caption.data.hub:hub",
    "coco": "rl_caption.data.published:coco",
    "sharegpt4v": "rl_caption.data.published:sharegpt4v",
    "dci": "rl_caption.data.published:densely_captioned",
    "urban1k": "rl_caption.data.published:urban1k",
    "scenes": "rl_caption.data.scenes:ScenesData",
    "images": "rl_caption.data.unpaired:ImageFolder",
    "captions": "rl_caption.data.unpaired:CaptionFile",
    "caption_targets": "rl_caption.data.unpaired:CaptionTargets",
}
"""Name -> ``module:Name``."""
KEYS = (
    "path",
    "image_root",
    "image_extension",
    "flatten",
    "columns",
    "features_root",
    "features_kwargs",
)
"""Keys of ``data`` that are options of some formats."""


def wrong_options(config: DataConfig, key: str = "data", required: bool = False) -> list[str]:
    """What is wrong with the options of a format, one sentence each. Raises ``ConfigError`` for an
    unknown format.

    ``config`` is the section ``data`` of a configuration, and ``key`` its dotted name. With
    ``required``, missing options are wrong, too.
    """
    target, name = _target(config, key)

    def key_of(option: str) -> str:
        return f"{key}.{option}" if option in KEYS else f"{key}.kwargs.{option}"

    return wrong_arguments(target, 0, name, _given(config) | config.kwargs, key_of, required)


def check_path(config: DataConfig, run: str = "") -> None:
    """Raise ``DataError`` if ``data.path`` is local and does not exist; it has ``data.source``
    where that is set.

    ``run`` is the beginning of the message.
    """
    if (
        config.path is not None
        and config.format != "hub"
        and config.target is None
        and not exists(config.path)
    ):
        raise DataError(f"{run}data.path {config.path!r} does not exist{where_from(config.source)}")


def where_from(source: str | None) -> str:
    """The end of a message about missing files: what they are made of, where ``source`` says it."""
    return "" if source is None else f". It takes {source}"


def build_data(config: DataConfig) -> DataModule:
    """Build the dataset of the section ``data`` of a configuration; ``check_data`` is separate.

    Raises:
        ConfigError: the format is unknown, or an option is unknown, missing or wrong.
        DataError: a file is missing or malformed.
    """
    wrong = wrong_options(config, required=True)
    if wrong:
        raise ConfigError("; ".join(wrong))
    target, name = _target(config, "data")
    if config.source is not None:
        check_path(config)
    kept = (ConfigError, DataError)
    with (
        naming(f"data: {name}", (TypeError, ValueError), ConfigError, kept),
        errors_of_user_code(name),
    ):
        data = target(**_given(config) | config.kwargs)
        if config.target is not None:
            data = map_rows(data, partial(_check_row, name))
    if config.num_frames is not None:
        data = map_rows(data, partial(_video, config.num_frames))
    return map_rows(data, _long) if config.long_captions else data


def _target(config: DataConfig, key: str) -> tuple[Any, str]:
    """The class or function of a format, and its name in messages."""
    option, table = ("format", FORMATS) if config.target is None else ("target", None)
    name = getattr(config, option)
    return load_target(name, f"{key}.{option}", table), f"{key}.{option} {name}"


def _given(config: DataConfig) -> dict[str, Any]:
    """Those of ``KEYS`` that are set."""
    plain = {
        option.name: option.default for option in fields(config) if option.default is not MISSING
    }
    return {key: getattr(config, key) for key in KEYS if getattr(config, key) != plain.get(key, {})}


def grouped_by_split(
    rows: Iterable[tuple[str, Row]], source: Path, max_images: Mapping[str, int] | None = None
) -> dict[str, list[Row]]:
    """Group ``(split, row)`` pairs: first the standard splits, then others in the order of the
    file.

    ``max_images`` limits the number of rows of a split; the first ones stay. Raises ``DataError``
    where ``source`` has no row.
    """
    groups: dict[str, list[Row]] = {}
    for split, row in rows:
        groups.setdefault(split, []).append(row)
    if not groups:
        raise DataError(f"{source} holds no images")
    limits = max_images or {}
    return {
        split: groups[split][: limits.get(split)]
        for split in dict.fromkeys((*STANDARD_SPLITS, *groups))
        if split in groups
    }


def add_features(
    rows: Mapping[str, list[Row]], root: str | Path | None, options: Mapping[str, Any] | None = None
) -> None:
    """Set ``features`` of every row to its ``ImageFeatures`` under ``root``; do nothing where
    ``root`` is None.

    ``root`` is a folder or an HDF5 file, ``options`` are arguments of ``FeatureOptions``.
    """
    if root is None:
        return
    every = [row for split in rows.values() for row in split]
    for row, features in zip(
        every, features_of(every, root, FeatureOptions(**(options or {}))), strict=True
    ):
        row["features"] = features


def map_rows(data: DataModule, make: Callable[[str, int, Row], Row]) -> DataModule:
    """A dataset whose rows are ``make(split, index, row)``, applied when a row is accessed."""
    rows = {split: RowView(data.split(split), partial(make, split)) for split in data.splits}
    return Splits(rows, getattr(data, "path", "the data"))


def _check_row(name: str, split: str, index: int, row: Any) -> Row:
    check_type(row, Row, f"{name}, split {split!r}, row {index}", DataError)
    return row  # type: ignore[no-any-return]


def _video(num_frames: int, split: str, index: int, row: Row) -> Row:
    """Replace a row's video file by ``num_frames`` of its frames."""
    if "image" not in row:
        return row
    return {**row, "image": video_frames(cast(str, row["image"]), num_frames)}


def _long(split: str, index: int, row: Row) -> Row:
    """Make the long description of a row its only reference; the others become
    ``short_references``.

    Drops the columns ``BY_REFERENCE``. Raises ``DataError`` where there is no long description.
    """
    description = row.get("long_reference", "")
    if not description.strip():
        raise DataError(
            f"{split} {row['image_id']!r} has no long_reference, which data.long_captions makes "
            f"its caption: expected "
            "a long description in every row (data.format jsonl or scenes)"
        )
    long_row: Any = {name: value for name, value in row.items() if name not in BY_REFERENCE}
    long_row |= {"references": [description], "short_references": row["references"]}
    return long_row  # type: ignore[no-any-return]
