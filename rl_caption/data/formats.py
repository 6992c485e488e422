"""Data formats by name, the rows of Python objects and of tables, and what formats share.

A format of this package is a line in ``FORMATS``. One from outside is named by
``data.target`` (``package.module:Name``): a function that yields rows, or the rows
themselves (``rows_of``). Its parameters are its options, with ranges in their
annotations (``Annotated[int, Field(ge=1)]``); their values come from ``data.kwargs``,
or, for parameters named like one of ``KEYS``, from that key of ``data``.

The hub, Parquet, CSV, imagefolders and webdataset's tar shards are read by the library
``datasets`` (extra ``hub``): texts when a row is accessed, and images when they are
opened.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewards.base import naming
from rewards.videos import video_frames
from rl_caption.data.base import (
    BY_REFERENCE,
    DataError,
    LazyImage,
    Row,
    RowView,
    Splits,
)
from rl_caption.data.features import FeatureOptions, Hdf5File, features_of
from rl_caption.data.rows import (
    FILE_KEYS,
    ROW_KEYS,
    by_split,
    check_keys,
    read_row,
    standard_split,
)
from rl_caption.runtime.errors import ConfigError, errors_of_user_code
from rl_caption.runtime.options import check_options, load_target

if TYPE_CHECKING:
    from rl_caption.config.schema import DataConfig

FORMATS = {
    "karpathy": "rl_caption.data.rows:karpathy",
    "jsonl": "rl_caption.data.rows:jsonl",
    "hub": "rl_caption.data.formats:hub",
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
KEYS = ("path", "image_root", "image_extension", "flatten", "columns")
"""Keys of ``data`` that are options of some formats."""
LOADERS = {".parquet": "parquet", ".csv": "csv", ".tar": "webdataset"}
"""Extension of a single file -> its loader in ``datasets``."""


def check_format(config: DataConfig, required: bool = False) -> None:
    """Check the options of a format; with ``required``, that none is missing, too.

    ``config`` is the section ``data`` of a configuration. Raises ``ConfigError``.
    """
    target, name = _target(config)
    if callable(target):  # otherwise the rows themselves
        options = _options(config)
        check_options(target, 0, name, options, "data.kwargs", KEYS, required)


def build_data(config: DataConfig) -> Splits:
    """Build the dataset of the section ``data`` of a configuration; ``check_data`` is separate.

    Raises:
        ConfigError: the format is unknown, or an option is unknown, missing or wrong.
        DataError: a file is missing or malformed.
    """
    check_format(config, required=True)
    target, name = _target(config)
    path = config.path
    is_local = config.format != "hub" and config.target is None
    if path and is_local and not Path(path).exists():
        takes = config.source or "a file or folder on this machine"
        raise DataError(f"data.path {path!r} does not exist. It takes {takes}")
    kept = (ConfigError, DataError)
    wrong = (TypeError, ValueError, AttributeError, LookupError)
    with (
        naming(f"data: {name} {path or ''}", wrong, ConfigError, kept),
        errors_of_user_code(name),
    ):
        data = target
        if callable(target):
            data, name = target(**_options(config)), path or name
        data = rows_of(data, name, checked=config.target is None)
        if config.features_root is not None:
            data = with_features(data, config.features_root, config.features_kwargs)
    if config.num_frames is not None:
        data = _map_rows(data, partial(_video, config.num_frames))
    return _map_rows(data, _long) if config.long_captions else data


def _target(config: DataConfig) -> tuple[Any, str]:
    """The class or function of a format, and its name in messages."""
    option, table = ("format", FORMATS) if config.target is None else ("target", None)
    name = getattr(config, option)
    target = load_target(name, f"data.{option}", table)
    return target, f"data.{option} {name}"


def _options(config: DataConfig) -> dict[str, Any]:
    """Options of a format: the ``KEYS`` that are set, and ``kwargs``."""
    return config.model_dump(include=set(KEYS), exclude_defaults=True) | config.kwargs


def hub(
    path: str,
    columns: dict[str, str] | None = None,
    image_root: str | None = None,
    splits: dict[str, str] | None = None,
    name: str | None = None,
    revision: str | None = None,
) -> Splits:
    """Read a data set of the hub, or files in a layout that ``datasets`` reads.

    Args:
        path: its name, ``OWNER/NAME``; or a folder, such as one with
            ``train-*.parquet`` or ``train-*.tar``; or a file (``LOADERS``, or else
            JSON), which is the split ``train``.
        columns: column of this package -> column there (``renamed_columns``).
        image_root: folder that paths of images start from; None is the folder of local
            files.
        splits: split here -> split there, in the notation of ``datasets`` (``{train:
            train+restval}``); a column ``split`` is then ignored. None takes the splits
            that the column ``split`` names or, without one, all splits, with
            ``validation`` as ``val``.
        name: the configuration, where the data set has several.
        revision: branch, tag or commit.

    Raises:
        DataError: it cannot be loaded, or has other columns or splits.
    """
    import datasets
    from pyarrow import ArrowException

    place = Path(path)
    options: dict[str, Any] = {"path": path, "name": name, "revision": revision}
    if place.is_file():
        loader = LOADERS.get(place.suffix, "json")
        options = {"path": loader, "data_files": {"train": path}}
    if image_root is None and place.exists():
        image_root = str(place.parent if place.is_file() else place)
    library = datasets.exceptions.DatasetsError
    unloadable = (OSError, ValueError, ArrowException, library)
    with naming(f"data.path {path!r} cannot be loaded", unloadable, DataError):
        asked = None if splits is None else [*splits.values()]
        tables = datasets.load_dataset(**options, split=asked)
    if splits is not None:
        tables = dict(zip(splits, tables, strict=True))
    return _rows_of_tables(tables, path, columns, image_root or "", splits is None)


def rows_of(source: Any, name: str = "the rows", checked: bool = False) -> Splits:
    """The rows of Python objects by split.

    Args:
        source: rows (``Row``, and the ``split`` if it is not ``train``) as a list or
            from a generator; a table of ``datasets``; or a dict of these by split.
        name: name of the source in messages.
        checked: True where the rows are known to be right: skips the checks of types
            and keys.

    Raises:
        DataError: a row is wrong; the message names it and the key.
    """
    if isinstance(source, Splits):
        return source
    parts = source if isinstance(source, Mapping) else {"": source}
    if all(hasattr(part, "select_columns") for part in parts.values()):
        tables = {part or "train": table for part, table in parts.items()}
        return _rows_of_tables(tables, name)

    def rows() -> Iterator[tuple[str, Any]]:
        """Yield split and row. Rows of a generator are pickled: millions of them then
        take little more memory than their texts.
        """
        for part, items in parts.items():
            where = f"{name}, split {part!r}" if part else name
            is_listed = isinstance(items, Sequence)
            for index, item in enumerate(items):
                if checked:
                    split, row = item.pop("split"), item
                else:
                    number = os.path.join(part, str(index))
                    place = f"{where}, row {index}"
                    split, row = read_row(item, place, keys=ROW_KEYS, number=number)
                yield part or split, row if is_listed else pickle.dumps(row)

    return _map_rows(by_split(rows(), name), _kept_row)


def _kept_row(row: Any) -> Any:
    return pickle.loads(row) if isinstance(row, bytes) else row


def _rows_of_tables(
    tables: Mapping[str, Any],
    source: str,
    columns: Mapping[str, str] | None = None,
    image_root: str = "",
    by_column: bool = True,
) -> Splits:
    """The rows of tables (``datasets.Dataset``) by split.

    Args:
        tables: split -> table.
        source: the data set in messages.
        columns: as for ``renamed_columns``; None takes the columns named in
            ``FILE_KEYS``.
        image_root: folder of the images, where their column has paths.
        by_column: whether a column ``split`` names the splits of a table's rows.
    """
    import datasets

    def places() -> Iterator[tuple[str, Any]]:
        """Yield the split and the place of each row, without reading the rest of it."""
        for split_name, table in tables.items():
            where, names = f"{source}, split {split_name!r}", table.column_names
            if columns is None:
                check_keys(names, FILE_KEYS, where)
            named = dict(columns or {name: name for name in FILE_KEYS if name in names})
            if not by_column:
                named.pop("split", None)
            for name, feature in table.features.items():
                if isinstance(feature, datasets.Image):
                    table = table.cast_column(name, datasets.Image(decode=False))
            images, column = None, named.get("image")
            feature = table.features.get(column)
            if feature is not None and "string" not in getattr(feature, "dtype", ""):
                images = table.select_columns([column])
                table = table.remove_columns([column])
            split = standard_split(split_name)
            how = (table, images, where, split, named, image_root)
            for index in range(len(table)):
                place = (how, index)
                yield _read(place)[0] if "split" in named else split, place

    return _map_rows(by_split(places(), source), _row_at)


def _row_at(place: Any) -> Row:
    return _read(place)[1]


def _read(place: Any) -> tuple[str, Row]:
    """Split and row of a table; an image in the table ``images`` stays there, undecoded."""
    (table, images, where, split, columns, image_root), index = place
    where, item = f"{where}, row {index}", table[index]
    if images is not None:
        (column,) = images.column_names
        item[column] = LazyImage(where, images, index)
    if "__key__" in item:  # webdataset: texts are files, which end with a line feed
        for key, value in item.items():
            item[key] = value.strip() if isinstance(value, str) else value
    return read_row(item, where, image_root, columns, number=f"{split}/{index}")


def _map_rows(data: Splits, make: Callable[[Any], Row]) -> Splits:
    """A dataset whose rows are made by ``make`` when they are accessed."""
    views = {split: RowView(rows, make) for split, rows in data.items()}
    return Splits(views, data.source)


def with_features(data: Splits, root: str | Path, options: Mapping[str, Any]) -> Splits:
    """Add ``features`` to the rows, from a folder or an HDF5 file of any name.

    ``options`` are arguments of ``FeatureOptions``.
    """
    file = Hdf5File(Path(root)) if os.path.isfile(root) else None
    how = partial(
        _with_features, root=root, options=FeatureOptions(**options), file=file
    )
    return _map_rows(data, how)


def _with_features(row: Row, **how: Any) -> Row:
    return {**row, "features": features_of(row, **how)}


def _video(num_frames: int, row: Any) -> Any:
    """Replace a row's video file by ``num_frames`` of its frames."""
    return {**row, "image": video_frames(row.get("image"), num_frames)}


def _long(row: Row) -> Any:
    """Make the long description of a row its only reference; the others become
    ``short_references``.

    Drops the columns ``BY_REFERENCE``. Raises ``DataError`` where there is no long description.
    """
    image_id, description = row["image_id"], row.get("long_reference", "")
    if not description.strip():
        raise DataError(
            f"image {image_id!r} has no long_reference, which data.long_captions makes its caption"
        )
    kept = {key: value for key, value in row.items() if key not in BY_REFERENCE}
    long = {"references": [description], "short_references": row["references"]}
    return kept | long
