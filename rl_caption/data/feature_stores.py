"""Where region features lie: a folder with one ``.npz`` or ``.npy`` file per image, or (``feature_hdf5.py``) one file.

A store reads arrays and headers; what is right about them is decided in ``features.py``. Stores are picklable and
carry no open file to another process.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rewards.files import UNREADABLE_ARRAY, array_header, member, read_array
from rl_caption.data.base import DataError

T = TypeVar("T")
SUFFIXES = (".npz", ".npy")
FEATURE_KEYS = ("features", "x", "feat")
BOX_KEYS = ("boxes", "bbox")
SIZE_KEYS = ("image_w", "image_h")


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
            read = _from_file(place.features, array_header, self.wanted, where)
        if place.boxes is None:
            return Header(*read)
        with _readable(place.boxes, where), open(place.boxes, "rb") as file:
            return Header(*read)._replace(boxes=array_header(file, os.path.getsize(place.boxes)))

    def arrays(self, place: Place, where: str, with_boxes: bool) -> Arrays:
        """The arrays of the file; boxes only where they are asked for."""
        with _readable(place.features, where):
            read = _from_file(place.features, read_array, self.wanted, where, with_boxes)
        if not with_boxes or place.boxes is None:
            return Arrays(*read)
        with _readable(place.boxes, where), open(place.boxes, "rb") as file:
            return Arrays(*read)._replace(boxes=read_array(file, os.path.getsize(place.boxes)))

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
    except UNREADABLE_ARRAY as error:
        raise DataError(f"{where}: cannot be read: {error or type(error).__name__}") from error


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


def _from_file(
    path: str, read: Callable[[BinaryIO, int], T], wanted: Sequence[str], where: str, with_boxes: bool = True
) -> tuple[list[T], T | None, tuple[float, float] | None]:
    """What ``read`` makes of the features and the boxes of a file, and the image's width and height."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            return [read(file, os.path.getsize(path))], None, None
    with zipfile.ZipFile(path) as archive:
        keys = [name.removesuffix(".npy") for name in archive.namelist()]

        def one(key: str) -> T:
            with member(archive, key) as (file, size):
                return read(file, size)

        features = [one(key) for key in _feature_keys(keys, wanted, where)]
        if not with_boxes:
            return features, None, None
        boxes = next((one(key) for key in BOX_KEYS if key in keys), None)
        return features, boxes, _image_size(archive, keys)


def _image_size(archive: zipfile.ZipFile, keys: Sequence[str]) -> tuple[float, float] | None:
    if not all(key in keys for key in SIZE_KEYS):
        return None
    sides = []
    for key in SIZE_KEYS:
        with member(archive, key) as (file, size):
            sides.append(float(read_array(file, size).item()))
    return sides[0], sides[1]
