"""Data sets of the Hugging Face hub and Parquet files, read by the library ``datasets`` (extra ``hub``).

Texts are read when a row is accessed, and images when they are opened: both from the library's memory-mapped files.
"""

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from rewards.base import RewardError, naming
from rewards.images import UNREADABLE, image_identity, image_size, open_image
from rl_caption.data.base import DataError, Row, RowView, Splits
from rl_caption.data.jsonl import read_row, renamed_columns
from rl_caption.data.splits import SplitNames, check_one_source, regrouped, standard_split


def hub(
    path: str,
    columns: dict[str, str] | None = None,
    image_root: str | None = None,
    splits: dict[str, str] | None = None,
    name: str | None = None,
    revision: str | None = None,
) -> Splits:
    """Read a data set of the hub.

    Args:
        path: its name, ``OWNER/NAME``, or a folder in a layout that ``datasets`` reads.
        columns: column of this package -> column there (``renamed_columns``).
        image_root: folder that images start from, where their column has paths.
        splits: split here -> split there, in the notation of ``datasets`` (``{train: train+restval}``). None takes all,
            and ``validation`` is ``val``; or those that the column ``split`` names, where there is one.
        name: the configuration, where the data set has several.
        revision: branch, tag or commit.

    Raises:
        DataError: it cannot be loaded, or has other columns or splits.
    """
    return _stored_splits(path, columns, image_root, splits, name=name, revision=revision)


def parquet(
    path: str,
    columns: dict[str, str] | None = None,
    image_root: str | None = None,
    splits: dict[str, str] | None = None,
) -> Splits:
    """Read Parquet files, whose images are bytes in a column, or paths.

    Args:
        path: a file, which is the split ``train``, or a folder of files ``SPLIT-*.parquet`` or ``SPLIT.parquet``.
        columns, splits: as for ``hub``.
        image_root: folder that images start from, where their column has paths; None is that of the files.

    Raises:
        DataError: there is no such file, or one is damaged or has other columns.
    """
    place = Path(path)
    files: dict[str, list[str]] = {"train": [str(place)]} if place.is_file() else {}
    for file in sorted(place.glob("*.parquet")):
        files.setdefault(file.stem.partition("-")[0], []).append(str(file))
    root = image_root or str(place.parent if place.is_file() else place)
    return _stored_splits("parquet", columns, root, splits, source=path, data_files=files)


def _stored_splits(
    loader: str,
    columns: dict[str, str] | None,
    image_root: str | None,
    splits: Mapping[str, str] | None,
    source: str | None = None,
    **options: Any,
) -> Splits:
    source = loader if source is None else source
    import datasets
    from pyarrow import ArrowException

    unloadable = (OSError, ValueError, ArrowException, datasets.exceptions.DatasetsError)
    with naming(f"data.path {source!r} cannot be loaded", unloadable, DataError):
        if splits is None:
            tables = dict(datasets.load_dataset(loader, **options))
        else:
            tables = {
                name: datasets.load_dataset(loader, split=there, **options)
                for name, there in splits.items()
            }
    if splits is None:
        tables = {standard_split(name): table for name, table in tables.items()}
    has_split = splits is None and any("split" in table.column_names for table in tables.values())
    if columns is None:
        names = ("image", "references", *(["split"] if has_split else []))
        columns = {name: name for name in names}
    rows = {
        name: _rows(table, name, source, columns, image_root or "")
        for name, table in tables.items()
    }
    if "split" not in columns:
        return Splits(rows, source)
    check_one_source(source, columns, splits)
    names_of_rows = SplitNames(source)
    named = {
        name: _splits_of(table, columns["split"], f"{source}, split {name!r}", names_of_rows)
        for name, table in tables.items()
    }
    names_of_rows.warn()
    return Splits(regrouped(rows, named), source)


def _splits_of(table: Any, column: str, where: str, names: SplitNames) -> list[str]:
    """The split that a column, or a text with columns in braces, names for each row of a table."""
    if column in table.column_names:
        table = table.select_columns([column])
    return [
        names.read(
            renamed_columns(item, {"split": column}, f"{where}, row {index}")["split"],
            f"{where}, row {index}",
        )
        for index, item in enumerate(table)
    ]


def _rows(table: Any, split: str, source: str, columns: dict[str, str], image_root: str) -> RowView:
    """The rows of one stored split, a ``datasets.Dataset``."""
    where = f"{source}, split {split!r}"
    stored = columns.get("image", "")
    images = None
    if stored in table.column_names and getattr(table.features[stored], "dtype", "") != "string":
        import datasets

        if isinstance(table.features[stored], datasets.Image):
            table = table.cast_column(stored, datasets.Image(decode=False))
        images = table.select_columns([stored])
        table = table.remove_columns([stored])
    text_columns = {
        name: column for name, column in columns.items() if images is None or name != "image"
    }
    return RowView(table, partial(_row, where, split, text_columns, images, image_root))


def _row(
    where: str,
    split: str,
    columns: Mapping[str, str],
    images: Any,
    image_root: str,
    index: int,
    item: Any,
) -> Row:
    where = f"{where}, row {index}"
    values = renamed_columns(item, columns, where)
    if images is not None:
        values = {"image_id": f"{split}/{index}", "image": f"{split}/{index}"} | values
    _, row = read_row(values, where, Path(image_root))
    if images is not None:
        row["image"] = StoredImage(images, index, where, image_root)
    return row


def decode_image(content: str | bytes, where: str) -> Image.Image:
    """The image of a path, or of the bytes of a file; ``RewardError``, which names ``where``, if it cannot be read."""
    with naming(where, (*UNREADABLE, RewardError), RewardError):
        source = content if isinstance(content, str) else Image.open(io.BytesIO(content))
        return open_image(source, own_mode=True)


def stored_size(content: str | bytes, where: str) -> tuple[int, int]:
    """Width and height of the image of a path, or of the bytes of a file, without decoding it. Raises as above."""
    try:
        if isinstance(content, str):
            return image_size(content)
        with Image.open(io.BytesIO(content)) as image:
            return image.size
    except (*UNREADABLE, RewardError) as error:
        raise RewardError(f"{where}: the image cannot be read: {error}") from error


@dataclass(frozen=True)
class EncodedImage:
    """An image in memory: the bytes of its file, and the place of its row for errors."""

    content: bytes = field(repr=False)
    where: str = field(compare=False)

    def render(self) -> Image.Image:
        """Decode it; ``RewardError``, which names the row, where that fails."""
        return decode_image(self.content, self.where)

    def dimensions(self) -> tuple[int, int]:
        """Width and height, without decoding it."""
        return stored_size(self.content, self.where)

    def identity(self) -> str:
        """A key of caches, without decoding: a hash of the bytes."""
        return hashlib.blake2b(self.content).hexdigest()


@dataclass(frozen=True)
class StoredImage:
    """An image in a row of a table of ``datasets`` with one column: bytes, or a path."""

    images: Any = field(repr=False, compare=False)
    row: int
    where: str
    image_root: str

    def render(self) -> Image.Image:
        """Read and decode it; ``RewardError``, which names the row, where that fails."""
        return decode_image(self._content(), self.where)

    def dimensions(self) -> tuple[int, int]:
        """Width and height, without decoding it."""
        return stored_size(self._content(), self.where)

    def identity(self) -> str:
        """A key of caches, without decoding: a hash of the bytes, or that of the file."""
        content = self._content()
        return (
            image_identity(content)
            if isinstance(content, str)
            else hashlib.blake2b(content).hexdigest()
        )

    def _content(self) -> str | bytes:
        (content,) = self.images[self.row].values()
        if isinstance(content, dict):
            content = content.get("bytes") or content.get("path")
        return content if isinstance(content, bytes) else os.path.join(self.image_root, content)
