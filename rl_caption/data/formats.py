"""Data formats by name, and what formats that read a file share.

A format of this package is a line in ``FORMATS``. One from outside is named by ``data.target``
(``package.module:Name``): a function that yields rows, or the rows themselves (``rows_of``). Its
parameters are its options, with ranges in their annotations (``Annotated[int, Field(ge=1)]``);
their values come from ``data.kwargs``, or, for parameters named like one of ``KEYS``, from that key
of ``data``.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os.path import exists
from typing import TYPE_CHECKING, Any, cast

from rewards.base import naming
from rewards.videos import video_frames
from rl_caption.data.base import BY_REFERENCE, DataError, Row, RowView, Splits
from rl_caption.data.rows import ROW_KEYS, STANDARD_SPLITS, read_row
from rl_caption.runtime.errors import ConfigError, errors_of_user_code
from rl_caption.runtime.options import load_target, wrong_arguments

if TYPE_CHECKING:
    from rl_caption.config.schema import DataConfig

FORMATS = {
    "karpathy": "rl_caption.data.rows:karpathy",
    "jsonl": "rl_caption.data.rows:jsonl",
    "hub": "rl_caption.data.hub:hub",
    "coco": "rl_caption.data.published:coco",
    "sharegpt4v": "rl_caption.data.published:sharegpt4v",
    "dci": "rl_caption.data.published:densely_captioned",
    "urban1k": "rl_caption.data.published:urban1k",
    "scenes": "rl_caption.data.scenes:ScenesData",
    "images": "rl_caption.data.published:images",
    "captions": "rl_caption.data.published:captions",
    "caption_targets": "rl_caption.data.published:caption_targets",
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


def wrong_options(config: DataConfig, required: bool = False) -> list[str]:
    """What is wrong with the options of a format, one sentence each. Raises ``ConfigError`` for an
    unknown format.

    ``config`` is the section ``data`` of a configuration. With ``required``, missing options are
    wrong, too.
    """
    target, name = _target(config)

    def key_of(option: str) -> str:
        return f"data.{option}" if option in KEYS else f"data.kwargs.{option}"

    if not callable(target):  # rows themselves
        return []
    return wrong_arguments(target, 0, name, _options(config), key_of, required)


def where_from(source: str | None) -> str:
    """The end of a message about missing files: what they are made of, where ``source`` says it."""
    return "" if source is None else f". It takes {source}"


def build_data(config: DataConfig) -> Splits:
    """Build the dataset of the section ``data`` of a configuration; ``check_data`` is separate.

    Raises:
        ConfigError: the format is unknown, or an option is unknown, missing or wrong.
        DataError: a file is missing or malformed.
    """
    wrong = wrong_options(config, required=True)
    if wrong:
        raise ConfigError("; ".join(wrong))
    target, name = _target(config)
    is_local = config.format != "hub" and config.target is None
    if config.source and config.path and is_local and not exists(config.path):
        raise DataError(
            f"data.path {config.path!r} does not exist{where_from(config.source)}"
        )
    kept = (ConfigError, DataError)
    with (
        naming(f"data: {name}", (TypeError, ValueError), ConfigError, kept),
        errors_of_user_code(name),
    ):
        made = target(**_options(config)) if callable(target) else target
        source = config.path if callable(target) and config.path else name
        data = rows_of(made, source, checked=config.target is None)
    if config.num_frames is not None:
        data = _map_rows(data, partial(_video, config.num_frames))
    return _map_rows(data, _long) if config.long_captions else data


def _target(config: DataConfig) -> tuple[Any, str]:
    """The class or function of a format, and its name in messages."""
    option, table = ("format", FORMATS) if config.target is None else ("target", None)
    name = getattr(config, option)
    target = load_target(name, f"data.{option}", table, values=(Iterable,))
    return target, f"data.{option} {name}"


def _options(config: DataConfig) -> dict[str, Any]:
    """Those of ``KEYS`` that are set, and ``kwargs``."""
    return config.model_dump(include=set(KEYS), exclude_defaults=True) | config.kwargs


class PackedRows(Sequence[Row]):
    """Rows in one buffer, so that millions of them take what their texts take."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])

    def append(self, row: Row) -> None:
        """Add a row at the end."""
        self._bytes += pickle.dumps(row)
        self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        start, end = self._ends[index : index + 2]
        return pickle.loads(self._bytes[start:end])


def rows_of(source: Any, name: str = "the rows", checked: bool = False) -> Splits:
    """The rows of Python objects by split.

    Args:
        source: rows (``Row``, and the ``split`` if it is not ``train``) as a list or from a
            generator; a table of ``datasets``; or a dict of these by split.
        name: of the source in messages.
        checked: its rows are right, so that types and keys are not looked at.

    Raises:
        DataError: a row is wrong; the message names it and the key.
    """
    if isinstance(source, Splits):
        return source
    tables = source if isinstance(source, Mapping) else {"train": source}
    if tables and all(map(_is_table, tables.values())):
        from rl_caption.data.hub import rows_of_tables

        return rows_of_tables(tables, name)
    if isinstance(source, Mapping):
        views = {}
        for split, items in source.items():
            listed = items if isinstance(items, Sequence) else list(items)
            views[split] = RowView(
                listed, partial(_read, f"{name}, split {split!r}", split)
            )
        return Splits(views, name)
    new: Any = list if isinstance(source, Sequence) else PackedRows
    groups: dict[str, Any] = {split: new() for split in STANDARD_SPLITS}
    for index, item in enumerate(source):
        if checked:
            split, row = item.pop("split"), item
        else:
            split, row = read_row(
                item, f"{name}, row {index}", "", None, ROW_KEYS, f"{index}"
            )
        groups.setdefault(split, new()).append(row)
    splits = {split: RowView(rows) for split, rows in groups.items() if len(rows)}
    if not splits:
        raise DataError(f"{name} holds no images")
    return Splits(splits, name)


def _is_table(source: Any) -> bool:
    """Whether it is a ``datasets.Dataset``, and not a stream."""
    return hasattr(source, "column_names") and hasattr(source, "__len__")


def _read(where: str, split: str, index: int, item: Any) -> Row:
    place = f"{where}, row {index}"
    return read_row(item, place, "", None, ROW_KEYS, f"{split}/{index}")[1]


def _map_rows(data: Splits, make: Callable[[int, Row], Row]) -> Splits:
    """A dataset whose rows are ``make(index, row)``, applied when a row is accessed."""
    return Splits(
        {split: RowView(rows, make) for split, rows in data.items()}, data.source
    )


def _video(num_frames: int, _: int, row: Row) -> Row:
    """Replace a row's video file by ``num_frames`` of its frames."""
    if "image" not in row:
        return row
    return {**row, "image": video_frames(cast(str, row["image"]), num_frames)}


def _long(_: int, row: Row) -> Row:
    """Make the long description of a row its only reference; the others become
    ``short_references``.

    Drops the columns ``BY_REFERENCE``. Raises ``DataError`` where there is no long description.
    """
    description = row.get("long_reference", "")
    if not description.strip():
        raise DataError(
            f"image {row['image_id']!r} has no long_reference, which data.long_captions makes its "
            "caption"
        )
    long_row: Any = {
        name: value for name, value in row.items() if name not in BY_REFERENCE
    }
    long_row |= {"references": [description], "short_references": row["references"]}
    return long_row  # type: ignore[no-any-return]
