"""Where region features lie: a folder with one ``.npz`` or ``.npy`` file per image, or one HDF5 file for all.

A store reads arrays and their headers; ``features.py`` decides whether they are right. Stores are picklable and carry
no open file to another process.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from rewards.files import UNREADABLE_ARRAY, array_header, check_expansion, member, read_array
from rl_caption.data.base import DataError

SUFFIXES = (".npz", ".npy")
FEATURE_KEYS = ("features", "x", "feat")
BOX_KEYS = ("boxes", "bbox")
SIZE_KEYS = ("image_w", "image_h")
HDF5_PATTERNS = ("{image_id}_features", "{image_id}_grids", "{image_id}/features", "{image_id}")
"""Keys of an image's features in an HDF5 file, where no pattern is given: the first that fits an image."""
_BOXES_OF = {"{image_id}_features": "{image_id}_boxes", "{image_id}/features": "{image_id}/boxes"}


class Names(NamedTuple):
    """What an image may be called in a store."""

    image_id: str
    stem: str
    """Its file's name without folder and extension."""
    folder: str
    """The name of the folder that its file lies in, such as ``val2014``."""

    def fill(self, pattern: str) -> str:
        """``pattern`` with ``{image_id}``, ``{stem}`` and ``{folder}`` replaced."""
        for name, value in zip(self._fields, self, strict=True):
            pattern = pattern.replace(f"{{{name}}}", value)
        return pattern


class Location(NamedTuple):
    """The path of one image's arrays, or their key in the HDF5 file."""

    features: str
    boxes: str | None = None
    """Where boxes have a file or a key of their own."""


class ArrayHeader(NamedTuple):
    """What is known of an array that is not read."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Stored(NamedTuple):
    """One image's arrays as they are stored, or their headers: whatever has ``shape`` and ``dtype``."""

    features: list[Any]
    """Several are concatenated along the last axis."""
    boxes: Any
    """None where there are none."""
    size: tuple[float, float] | None
    """Width and height of the image in pixels, where the file says it."""


class FeatureFolder:
    """A folder with one file per image. ``DataError`` where a folder does not exist.

    Args:
        root: the folder.
        pattern: the file's name without its extension; None is ``{image_id}``.
        arrays: names of the arrays of an ``.npz`` to concatenate; empty takes ``features``, ``x`` or ``feat``.
        boxes_root: folder of the boxes, ``NAME.npy`` each, where the features' files have none.
    """

    parallel = True
    """Whether several threads read faster than one."""

    def __init__(
        self, root: Path, pattern: str | None = None, arrays: Sequence[str] = (), boxes_root: str | None = None
    ) -> None:
        self.root, self.pattern, self.wanted = root, pattern or "{image_id}", tuple(arrays)
        self.boxes_root = None if boxes_root is None else Path(boxes_root)
        for folder in (self.root, self.boxes_root):
            if folder is not None and not folder.is_dir():
                raise DataError(f"{str(folder)!r} is not a folder: expected one .npz or .npy file per image")

    def locations(self, names: Sequence[Names]) -> list[Location]:
        """The file of each image, ``.npz`` before ``.npy``, whether or not there is one."""
        listed = set(os.listdir(self.root)) if len(names) > 1 else None

        def exists(file: str) -> bool:
            """One listing answers for a whole dataset; names with a folder in them ask the file system."""
            return os.path.isfile(self.root / file) if listed is None or os.sep in file else file in listed

        found = []
        for name in [name.fill(self.pattern) for name in names]:
            files = [name + suffix for suffix in SUFFIXES]
            boxes = None if self.boxes_root is None else str(self.boxes_root / f"{name}.npy")
            found.append(Location(str(self.root / next(filter(exists, files), files[0])), boxes))
        return found

    def read(self, location: Location, where: str, values: bool, with_boxes: bool) -> Stored:
        """Arrays, or without ``values`` their headers. Raises ``DataError`` where they are absent or unreadable."""
        read = read_array if values else _header
        with _readable(location.features, where):
            stored = _from_file(location.features, read, self.wanted, where, with_boxes)
        if with_boxes and location.boxes is not None:
            with _readable(location.boxes, where), open(location.boxes, "rb") as file:
                stored = stored._replace(boxes=read(file, os.path.getsize(location.boxes)))
        return stored

    def stamp(self, location: Location) -> tuple[str, int, int] | None:
        """Path, bytes and time of change of the files; None where one is not there."""
        try:
            found = [os.stat(path) for path in location if path is not None]
        except OSError:
            return None
        return location.features, sum(s.st_size for s in found), max(s.st_mtime_ns for s in found)


@contextmanager
def _readable(path: str, where: str) -> Iterator[None]:
    """Turn what damaged or absent files raise into a ``DataError``."""
    if not os.path.isfile(path):
        name = os.path.splitext(os.path.basename(path))[0]
        expected = f"{name}.npz or {name}.npy" if path.endswith(SUFFIXES[0]) else os.path.basename(path)
        raise DataError(f"{where}: no such file; expected {expected} in {os.path.dirname(path) or '.'}")
    try:
        yield
    except DataError:
        raise
    except UNREADABLE_ARRAY as error:
        raise DataError(f"{where}: cannot be read: {error or type(error).__name__}") from error


def _header(file: BinaryIO, size: int) -> ArrayHeader:
    return ArrayHeader(*array_header(file, size))


def _from_file(
    path: str, read: Callable[[BinaryIO, int], Any], wanted: Sequence[str], where: str, with_boxes: bool
) -> Stored:
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            return Stored([read(file, os.path.getsize(path))], None, None)
    with zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist()]
        named = wanted or [key for key in FEATURE_KEYS if key in keys][:1]
        if not named or not set(named) <= set(keys):
            expected = ", ".join(wanted) or f"one of {', '.join(FEATURE_KEYS)}"
            raise DataError(f"{where}: holds the arrays {sorted(keys)}, expected {expected}")

        def one(key: str, read: Callable[[BinaryIO, int], Any] = read) -> Any:
            with member(archive, key) as (file, size):
                return read(file, size)

        boxes = next((one(key) for key in BOX_KEYS if key in keys), None) if with_boxes else None
        sized = with_boxes and all(key in keys for key in SIZE_KEYS)
        size = [float(one(key, read_array).item()) for key in SIZE_KEYS] if sized else None
        return Stored([one(key) for key in named], boxes, (size[0], size[1]) if size else None)


def import_h5py(path: Path) -> Any:
    """The module ``h5py``. Raises ``DataError`` where it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{path}: HDF5 needs h5py ({error}): pip install 'rl-caption[features]'") from error
    return h5py


def open_hdf5(path: Path) -> Any:
    """An HDF5 file, open for reading. Raises ``DataError`` where it is none, or h5py is not installed."""
    try:
        return import_h5py(path).File(path, "r", locking=False)
    except OSError as error:
        raise DataError(f"{path} is not a readable HDF5 file: {error}") from error


class FeatureHdf5:
    """One HDF5 file for all images, a dataset per image. ``DataError`` where it is none, or h5py is not installed.

    The file is opened by the process that first reads from it, and not carried into another. ``pattern`` is the key of
    an image's features, such as ``{image_id}_features``, by default the first of ``HDF5_PATTERNS`` that fits an image;
    ``boxes_pattern`` that of its boxes, by default the one that goes with the key of the features.
    """

    parallel = False  # the HDF5 library reads one thing at a time

    def __init__(self, path: Path, pattern: str | None = None, boxes_pattern: str | None = None) -> None:
        self.path, self.pattern, self.boxes_pattern = path, pattern, boxes_pattern
        self._opened: tuple[int, Any] | None = None
        self._file()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the open file."""
        return {**self.__dict__, "_opened": None}

    def _file(self) -> Any:
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            if self._opened is not None:
                # A fork of the process that opened it. While that handle is open here, the HDF5 library would answer
                # with the same open file, whose descriptor and position the processes share.
                self._opened[1].close()
                self._opened = None
            self._opened = process, open_hdf5(self.path)
        return self._opened[1]

    def locations(self, names: Sequence[Names]) -> list[Location]:
        """The keys of each image. ``DataError`` where no pattern was given, and none of the usual ones fits any."""
        pattern = self.pattern or self._usual_pattern(names)
        boxes = self.boxes_pattern or _BOXES_OF.get(pattern)
        return [Location(name.fill(pattern), None if boxes is None else name.fill(boxes)) for name in names]

    def _usual_pattern(self, names: Sequence[Names]) -> str:
        file = self._file()
        for name in names:
            for pattern in HDF5_PATTERNS:
                if _is_dataset(file.get(name.fill(pattern))):
                    return pattern
        shown = ", ".join(repr(key) for key, _ in zip(file, range(4), strict=False)) or "none"
        first = names[0].image_id if names else "none"
        raise DataError(
            f"{self.path} has features of none of {len(names)} images: its keys are such as {shown}, the images' "
            f"ids such as {first!r}; give the key as data.features_kwargs.pattern, such as {{image_id}}_features"
        )

    def read(self, location: Location, where: str, values: bool, with_boxes: bool) -> Stored:
        """As of a folder; without ``values`` HDF5 datasets, of which only the header is read until they are indexed."""
        try:
            found = [self._file().get(key) for key in (location.features, location.boxes) if key is not None]
            features, boxes = (each if _is_dataset(each) else None for each in (*found, None)[:2])
            if features is None:
                raise DataError(f"{where}: no such key; expected a data set {location.features!r}")
            boxes = boxes if with_boxes else None
            if not values or features.dtype.kind not in "fiu":  # refused by its type, not read
                return Stored([features], boxes, None)
            for each in (features, boxes):
                if each is not None:
                    check_expansion(each.size * each.dtype.itemsize, each.id.get_storage_size())
            return Stored([features[()]], None if boxes is None else boxes[()], None)
        except DataError:
            raise
        except UNREADABLE_ARRAY as error:
            raise DataError(f"{where}: cannot be read: {error}") from error

    def stamp(self, location: Location) -> tuple[str, int, int] | None:
        """Path and key, bytes and time of change of the whole file."""
        status = os.stat(self.path)
        return f"{self.path}::{location.features}", status.st_size, status.st_mtime_ns


def _is_dataset(found: Any) -> bool:
    import h5py

    return isinstance(found, h5py.Dataset)


Store = FeatureFolder | FeatureHdf5
