"""Tables read by the library ``datasets`` (extra ``hub``): the hub, Parquet, CSV, webdataset's tar
shards.

Texts are read when a row is accessed, and images when they are opened: both from the library's
memory-mapped files.
"""

import hashlib
import io
import os
from abc import ABC, abstractmethod
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
from rl_caption.data.splits import SplitNames, regrouped, standard_split

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
            train+restval}``). None takes all, and ``validation`` is ``val``; or those that the
            column ``split`` names, where there is one.
        name: the configuration, where the data set has several.
        revision: branch, tag or commit.

    Raises:
        DataError: it cannot be loaded, or has other columns or splits.
    """
    place = Path(path)
    options: dict[str, Any] = {"path": path, "name": name, "revision": revision}
    if place.is_file():
        options = {"path": LOADERS.get(place.suffix, "json"), "data_files": {"train": path}}
    if image_root is None and place.exists():
        image_root = str(place.parent if place.is_file() else place)
    tables = _load_tables(path, splits, options)
    if columns is None:
        has_split = any("split" in table.column_names for table in tables.values())
        optional = ["split"] if has_split and splits is None else []
        columns = {name: name for name in ("image", "references", *optional)}
    rows = {
        name: _rows(table, name, path, columns, image_root or "") for name, table in tables.items()
    }
    if "split" not in columns:
        return Splits(rows, path)
    if splits is not None:
        raise DataError(
            f"data.kwargs.splits and data.columns.split both say the splits of {path!r}"
        )
    names = SplitNames(path)
    named = {
        name: _splits_of(table, columns["split"], f"{path}, split {name!r}", names)
        for name, table in tables.items()
    }
    names.warn()
    return Splits(regrouped(rows, named), path)


def _load_tables(
    source: str, splits: Mapping[str, str] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Split -> table, a ``datasets.Dataset``."""
    import datasets
    from pyarrow import ArrowException

    unloadable = (OSError, ValueError, ArrowException, datasets.exceptions.DatasetsError)
    with naming(f"data.path {source!r} cannot be loaded", unloadable, DataError):
        if splits is None:
            loaded = datasets.load_dataset(**options)
            return {standard_split(name): table for name, table in loaded.items()}
        return {
            name: datasets.load_dataset(**options, split=there) for name, there in splits.items()
        }


def _splits_of(table: Any, column: str, where: str, names: SplitNames) -> list[str]:
    """The split that a column, or a text with columns in braces, names for each row of a table."""
    import datasets

    images = [
        name for name, kind in table.features.items() if isinstance(kind, datasets.Image)
    ]  # they would be decoded
    table = table.remove_columns(images)
    if column in table.column_names:
        table = table.select_columns([column])
    splits = []
    for index, item in enumerate(table):
        place = f"{where}, row {index}"
        splits.append(names.read(renamed_columns(item, {"split": column}, place)["split"], place))
    return splits


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
    if "__key__" in item:  # webdataset: texts are files, which end with a line feed
        item = {
            key: value.strip() if isinstance(value, str) else value for key, value in item.items()
        }
    values = renamed_columns(item, columns, where)
    if images is not None:
        values = {"image_id": f"{split}/{index}", "image": f"{split}/{index}"} | values
    _, row = read_row(values, where, Path(image_root))
    if images is not None:
        row["image"] = StoredImage(where, images, index, image_root)
    return row


class LazyImage(ABC):
    """An image that is read and decoded when it is used."""

    where: str
    """The place of its row, for errors."""

    @abstractmethod
    def read(self) -> str | bytes:
        """The bytes of the file, or its path."""

    def render(self) -> Image.Image:
        """Decode it; ``RewardError``, which names the row, where that fails."""
        with naming(self.where, (*UNREADABLE, RewardError), RewardError):
            content = self.read()
            source = content if isinstance(content, str) else Image.open(io.BytesIO(content))
            return open_image(source, own_mode=True)

    def dimensions(self) -> tuple[int, int]:
        """Width and height, without decoding it; ``RewardError`` as of ``render``."""
        with naming(self.where, (*UNREADABLE, RewardError), RewardError):
            content = self.read()
            if isinstance(content, str):
                return image_size(content)
            with Image.open(io.BytesIO(content)) as image:
                return image.size

    def identity(self) -> str:
        """A key of caches, without decoding: a hash of the bytes, or that of the file."""
        content = self.read()
        if isinstance(content, str):
            return image_identity(content)
        return hashlib.blake2b(content).hexdigest()


@dataclass(frozen=True)
class EncodedImage(LazyImage):
    """An image in memory: the bytes of its file, and the place of its row for errors."""

    content: bytes = field(repr=False)
    where: str = field(compare=False)

    def read(self) -> bytes:
        """The bytes."""
        return self.content


@dataclass(frozen=True)
class StoredImage(LazyImage):
    """An image in a row of a table of ``datasets`` with one column: bytes, or a path."""

    where: str
    images: Any = field(repr=False, compare=False)
    row: int
    image_root: str

    def read(self) -> str | bytes:
        """The bytes, or the path below ``image_root``."""
        (value,) = self.images[self.row].values()
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        return value if isinstance(value, bytes) else os.path.join(self.image_root, value)
