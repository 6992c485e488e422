"""Tables read by the library ``datasets`` (extra ``hub``): the hub, Parquet, CSV, webdataset's tar
shards, and tables in memory.

Texts are read when a row is accessed, and images when they are opened: both from the library's
memory-mapped files.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rewards.base import naming
from rl_caption.data.base import DataError, LazyImage, Row, RowView, Splits
from rl_caption.data.rows import (
    KEYS,
    check_keys,
    read_row,
    renamed_columns,
    split_name,
    standard_split,
)

LOADERS = {".parquet": "parquet", ".csv": "csv", ".tar": "webdataset"}
"""Extension of a single file -> its loader in ``datasets``."""


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
        path: its name, ``OWNER/NAME``, or a folder such as one of ``train-*.parquet`` or
            ``train-*.tar``, or a file of ``LOADERS``, which is the split ``train``.
        columns: column of this package -> column there (``renamed_columns``).
        image_root: folder that images start from, where their column has paths; None is that of
            local files.
        splits: split here -> split there, in the notation of ``datasets`` (``{train:
            train+restval}``), whatever a column ``split`` names. None takes all, and ``validation``
            is ``val``; or those that the column ``split`` names, where there is one.
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
        options = {
            "path": LOADERS.get(place.suffix, "json"),
            "data_files": {"train": path},
        }
    if image_root is None and place.exists():
        image_root = str(place.parent if place.is_file() else place)
    unloadable = (
        OSError,
        ValueError,
        ArrowException,
        datasets.exceptions.DatasetsError,
    )
    tables = {}
    with naming(f"data.path {path!r} cannot be loaded", unloadable, DataError):
        if splits is None:
            tables = dict(datasets.load_dataset(**options))
        for split, there in (splits or {}).items():
            tables[split] = datasets.load_dataset(**options, split=there)
    return rows_of_tables(tables, path, columns, image_root or "", splits is None)


def rows_of_tables(
    tables: Mapping[str, Any],
    source: str,
    columns: Mapping[str, str] | None = None,
    image_root: str | Path = "",
    by_column: bool = True,
) -> Splits:
    """The rows of tables (``datasets.Dataset``) by split.

    Args:
        tables: split -> table.
        source: the data set in messages.
        columns: as of ``renamed_columns``; None takes those with the names of ``KEYS``.
        image_root: folder of the images, where their column has paths.
        by_column: the rows of a table with a column ``split`` are in the splits that it names.
    """
    import datasets

    groups: dict[str, list[tuple[RowView, int]]] = {}
    for part, table in tables.items():
        where, part_split = f"{source}, split {part!r}", standard_split(part)
        for name, kind in table.features.items():
            if isinstance(kind, datasets.Image):
                table = table.cast_column(name, datasets.Image(decode=False))
        named = dict(columns or {})
        if columns is None:
            check_keys(table.column_names, KEYS, where)
            found = [name for name in KEYS if name in table.column_names]
            named = {name: name for name in ("image", "references", *found)}
        split = named.pop("split", None)
        images, column = None, named.get("image", "")
        is_stored = column in table.column_names
        if is_stored and getattr(table.features[column], "dtype", "") != "string":
            images = table.select_columns([column])
            table = table.remove_columns([column])
            del named["image"]
        rows = RowView(
            table, partial(_table_row, where, part_split, named, images, image_root)
        )
        for index in range(len(table)):
            name = part_split
            if split is not None and by_column:
                place = f"{where}, row {index}"
                name = split_name(
                    renamed_columns(table[index], {"split": split}, place)["split"],
                    place,
                )
            groups.setdefault(name, []).append((rows, index))
    return Splits(
        {split: RowView(places, _row_at) for split, places in groups.items()}, source
    )


def _row_at(_: int, place: tuple[RowView, int]) -> Row:
    rows, index = place
    return rows[index]


def _table_row(
    where: str,
    split: str,
    columns: Mapping[str, str],
    images: Any,
    image_root: str | Path,
    index: int,
    item: Any,
) -> Row:
    """A row of a table; its image stays in the table ``images``, undecoded."""
    where = f"{where}, row {index}"
    if "__key__" in item:  # webdataset: texts are files, which end with a line feed
        for key, value in item.items():
            item[key] = value.strip() if isinstance(value, str) else value
    values = renamed_columns(item, columns, where)
    if images is not None:
        values["image"] = LazyImage(where, images, index, image_root)
    return read_row(values, where, image_root, number=f"{split}/{index}")[1]
