"""Where region features lie: a folder with one ``.npz`` or ``.npy`` file per image, or (``feature_hdf5.py``) one file.

A store reads arrays and headers; what is right about them is decided in ``features.py``. Stores are picklable and
carry no open file to another process.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rl_caption.data.base import DataError

SUFFIXES = (".npz", ".npy")
FEATURE_KEYS = ("features", "x", "feat")
BOX_KEYS = ("boxes", "bbox")
SIZE_KEYS = ("image_w", "image_h")
# What numpy and zipfile raise on a file that is cut off, is not an array, or would have to be unpickled.
_READ_ERRORS = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)


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


class Place(NamedTuple):
    """Where one image's arrays lie: a file, or a key of the HDF5 file."""

    features: str
    boxes: str | None = None
    """Where boxes have a place of their own."""


class Header(NamedTuple):
    """Shapes and types of one image's arrays."""

    features: list[tuple[tuple[int, ...], np.dtype]]
    """One of each array; several are put side by side."""
    boxes: tuple[tuple[int, ...], np.dtype] | None
    size: tuple[float, float] | None


class Arrays(NamedTuple):
    """One image's arrays as they are stored."""

    features: list[NDArray]
    boxes: NDArray | None
    size: tuple[float, float] | None
    """Width and height of the image in pixels, where the file says it."""


class Store(Protocol):
    """A folder or a file of region features."""

    parallel: bool
    """Whether several threads read faster than one."""

    def places(self, names: Sequence[Names]) -> list[Place]:
        """Where each image's features lie, or would lie."""
        ...

    def header(self, place: Place, where: str) -> Header:
        """Shapes, without the values. Raises ``DataError`` where there are no features, or they cannot be read."""
        ...

    def arrays(self, place: Place, where: str, with_boxes: bool) -> Arrays:
        """The values. Raises ``DataError`` as ``header`` does."""
        ...

    def stamp(self, place: Place) -> tuple[str, int, int] | None:
        """What changes when the file does: a name, bytes, time of change. None where there is no file."""
        ...


class FeatureFolder:
    """A folder with one file per image.

    Args:
        root: the folder.
        pattern: the file's name without its extension; None is ``{image_id}``.
        arrays: names of the arrays of an ``.npz`` to put side by side; empty takes ``features``, ``x`` or ``feat``.
        boxes_root: folder of the boxes, ``NAME.npy`` each, where the features' files have none.

    Raises:
        DataError: a folder does not exist.
    """

    parallel = True

    def __init__(
        self, root: Path, pattern: str | None = None, arrays: Sequence[str] = (), boxes_root: str | None = None
    ) -> None:
        self.root = root
        self.pattern = pattern or "{image_id}"
        self.wanted = tuple(arrays)
        self.boxes_root = None if boxes_root is None else Path(boxes_root)
        for folder in (self.root, self.boxes_root):
            if folder is not None and not folder.is_dir():
                raise DataError(f"{str(folder)!r} is not a folder: expected one .npz or .npy file per image")

    def places(self, names: Sequence[Names]) -> list[Place]:
        """The file of each image, ``.npz`` before ``.npy``, whether or not there is one."""
        listed = set(os.listdir(self.root)) if len(names) > 1 else None
        return [self._place(name.fill(self.pattern), listed) for name in names]

    def _place(self, name: str, listed: set[str] | None) -> Place:
        boxes = None if self.boxes_root is None else str(self.boxes_root / f"{name}.npy")
        for suffix in SUFFIXES:
            file = name + suffix
            # One listing answers for a whole dataset; names with a folder in them ask the file system.
            if os.path.isfile(self.root / file) if listed is None or os.sep in name else file in listed:
                return Place(str(self.root / file), boxes)
        return Place(str(self.root / (name + SUFFIXES[0])), boxes)

    def header(self, place: Place, where: str) -> Header:
        """Shapes from the files' headers."""
        with _readable(place.features, where):
            if zipfile.is_zipfile(place.features):
                header = _npz_header(place.features, self.wanted, where)
            else:
                header = Header([_npy_header(place.features, where)], None, None)
        if place.boxes is not None:
            with _readable(place.boxes, where):
                header = header._replace(boxes=_npy_header(place.boxes, where))
        return header

    def arrays(self, place: Place, where: str, with_boxes: bool) -> Arrays:
        """The arrays of the file; boxes only where they are asked for."""
        boxes = size = None
        with _readable(place.features, where):
            loaded = np.load(place.features, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                features = [loaded]
            else:
                with loaded as archive:
                    features = [archive[key] for key in _feature_keys(archive.files, self.wanted, where)]
                    if with_boxes:
                        boxes = next((archive[key] for key in BOX_KEYS if key in archive.files), None)
                        size = _size(archive, archive.files)
        if with_boxes and place.boxes is not None:
            with _readable(place.boxes, where):
                boxes = np.load(place.boxes, allow_pickle=False)
        return Arrays(features, boxes, size)

    def stamp(self, place: Place) -> tuple[str, int, int] | None:
        """Path, bytes and time of change; both files' where boxes have their own."""
        try:
            found = [os.stat(path) for path in (place.features, place.boxes) if path is not None]
        except OSError:
            return None
        return place.features, sum(s.st_size for s in found), max(s.st_mtime_ns for s in found)


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
    except _READ_ERRORS as error:
        raise DataError(f"{where}: cannot be read: {error}") from error


def _feature_keys(keys: Sequence[str], wanted: Sequence[str], where: str) -> list[str]:
    if wanted:
        absent = [key for key in wanted if key not in keys]
        if absent:
            raise DataError(f"{where}: holds the arrays {sorted(keys)}, expected {', '.join(wanted)}")
        return list(wanted)
    for key in FEATURE_KEYS:
        if key in keys:
            return [key]
    raise DataError(f"{where}: holds the arrays {sorted(keys)}, expected one of {', '.join(FEATURE_KEYS)}")


def _size(archive: Mapping[str, Any], keys: Sequence[str]) -> tuple[float, float] | None:
    if not all(key in keys for key in SIZE_KEYS):
        return None
    width, height = (float(archive[key].item()) for key in SIZE_KEYS)
    return width, height


def _npz_header(path: str, wanted: Sequence[str], where: str) -> Header:
    with zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist()]

        def shape_of(key: str) -> tuple[tuple[int, ...], np.dtype]:
            with archive.open(key + ".npy") as member:
                return _array_header(member)  # type: ignore[arg-type]

        features = [shape_of(key) for key in _feature_keys(keys, wanted, where)]
        boxes = next((shape_of(key) for key in BOX_KEYS if key in keys), None)
        if not all(key in keys for key in SIZE_KEYS):
            return Header(features, boxes, None)
    with np.load(path, allow_pickle=False) as loaded:
        return Header(features, boxes, _size(loaded, loaded.files))


def _npy_header(path: str, where: str) -> tuple[tuple[int, ...], np.dtype]:
    with open(path, "rb") as file:
        shape, dtype = _array_header(file)
        expected = file.tell() + int(np.prod(shape)) * dtype.itemsize
    if os.path.getsize(path) < expected:
        raise DataError(f"{where}: cut off at {os.path.getsize(path)} of {expected} bytes")
    return shape, dtype


def _array_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
