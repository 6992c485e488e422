"""Region features, for captioners that read the regions of a detector, or a grid, instead of
pixels.

A store (a folder with one ``.npz`` or ``.npy`` file per image, or one HDF5 file) reads arrays or
their headers; ``ImageFeatures`` checks them. Stores are picklable; an open file is not carried into
another process.
"""

from __future__ import annotations

import itertools
import math
import os
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewards.base import naming
from rewards.files import UNREADABLE_ARRAY
from rewards.images import file_stamp
from rewards.options import check_fields
from rl_caption.data.base import DataError, Row
from rl_caption.runtime.options import Range

if TYPE_CHECKING:
    import torch

FEATURE_KEYS = ("features", "x", "feat")
HDF5_PATTERNS = ("{image_id}_features", "{image_id}_grids", "{image_id}/features", "{image_id}")
"""Keys that are tried in an HDF5 file where no pattern is given; the first that any image has is
used.
"""
_BOXES_OF = {"{image_id}_features": "{image_id}_boxes", "{image_id}/features": "{image_id}/boxes"}


@dataclass(frozen=True)
class FeatureOptions:
    """How features are stored and read (``data.features_kwargs``).

    Args:
        dim: size of a stored region feature (2048 bottom-up, 2054 VinVL); None accepts any size
            that all files share.
        pattern: name of an image's file without extension, or its key in the HDF5 file, made of
            ``{image_id}``, ``{stem}`` (the image file's name without extension) and ``{folder}``
            (the name of that file's folder). None is ``{image_id}``, and in HDF5 one of
            ``HDF5_PATTERNS``.
        max_regions: keep at most so many regions, the first of the file; None keeps all.
        views: roots of V further sets of features in the same layout, which ``prepare_features
            --augment`` made from random views of the training images. Training draws one of an
            image's 1 + V at each step; nothing else reads them.
    """

    dim: Annotated[int, Range(min=1)] | None = None
    pattern: str | None = None
    max_regions: Annotated[int, Range(min=1)] | None = None
    views: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        with naming("data.features_kwargs", (ValueError,), DataError):
            check_fields(self)
        if not any(name in (self.pattern or "{image_id}") for name in ("{image_id}", "{stem}")):
            raise DataError(
                f"features_kwargs.pattern is {self.pattern!r}: expected {{image_id}} or {{stem}} "
                f"in it"
            )


def fill_pattern(pattern: str, row: Row) -> str:
    """Fill in ``{image_id}``, and ``{stem}`` and ``{folder}`` of the image's file."""
    image = row.get("image")
    file = Path(image if isinstance(image, str | Path) else "")
    for name, value in (
        ("image_id", row["image_id"]),
        ("stem", file.stem),
        ("folder", file.parent.name),
    ):
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


class Location(NamedTuple):
    """Where the features of one image are: a path, or a key in an HDF5 file."""

    features: str
    boxes: str | None = None
    """Key of the boxes beside them, which only fingerprints of the data name."""


class ArrayHeader(NamedTuple):
    """Shape and type of an array that is not read."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _readable(where: str) -> AbstractContextManager[None]:
    """Context that turns what NumPy and h5py raise on a damaged file into a ``DataError`` that
    begins with ``where``.
    """
    return naming(where, UNREADABLE_ARRAY, DataError, (DataError,))


def array_header(file: Any) -> ArrayHeader:
    """Read shape and dtype of an array in NumPy's format."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    return ArrayHeader(shape, dtype)


class FeatureFolder:
    """A folder with one file per image."""

    parallel = True
    """Whether several threads read faster than one."""

    def __init__(self, root: Path, options: FeatureOptions) -> None:
        self.path, self.options = root, options

    def locations(self, rows: Sequence[Row]) -> list[Location]:
        """Paths for N rows, whether or not the files exist; ``.npz`` is preferred to ``.npy``."""
        places = []
        for row in rows:
            path = str(self.path / fill_pattern(self.options.pattern or "{image_id}", row))
            is_npy = not os.path.isfile(f"{path}.npz") and os.path.isfile(f"{path}.npy")
            places.append(Location(f"{path}.npy" if is_npy else f"{path}.npz"))
        return places

    def read(self, location: Location, where: str, values: bool) -> Any:
        """Read the array, or without ``values`` only its header. Raises ``DataError`` where this is
        impossible.
        """
        with _readable(where):
            if not zipfile.is_zipfile(location.features):
                with open(location.features, "rb") as file:
                    return np.load(file) if values else array_header(file)
            with np.load(location.features) as archive:
                key = next((key for key in FEATURE_KEYS if key in archive), FEATURE_KEYS[0])
                if values:
                    return archive[key]
                with archive.zip.open(f"{key}.npy") as file:
                    return array_header(file)

    def stamp(self, location: Location) -> tuple[str, list[int]] | None:
        """Path and ``file_stamp``; None where the file is missing."""
        try:
            return location.features, [*file_stamp(location.features)]
        except OSError:
            return None


def check_stored(dataset: Any, where: str) -> None:
    """Raise ``DataError`` unless all values of an HDF5 dataset were written: the library returns
    zeros for others.
    """
    if not dataset.size:
        return
    if dataset.chunks is None:
        expected, written = 1, int(dataset.id.get_storage_size() > 0)
    else:
        expected = math.prod(map(math.ceil, np.divide(dataset.shape, dataset.chunks)))
        written = dataset.id.get_num_chunks()
    if written < expected:
        raise DataError(
            f"{where}: {written} of {expected} blocks of {list(dataset.shape)} were written: make "
            f"it again"
        )


class FeatureHdf5:
    """One HDF5 file with a dataset per image. Each process opens the file for itself when it first
    reads from it.
    """

    parallel = False  # the HDF5 library reads one thing at a time

    def __init__(self, path: Path, options: FeatureOptions) -> None:
        self.path, self.options = path, options
        self._opened: tuple[int, Any] | None = None
        self._file()

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the open file."""
        return {**self.__dict__, "_opened": None}

    def _file(self) -> Any:
        process = os.getpid()
        if self._opened is None or self._opened[0] != process:
            if self._opened is not None:
                # A fork of the process that opened it. While that handle is open here, the HDF5
                # library would answer with the same open file, whose descriptor and position the
                # processes share.
                self._opened[1].close()
                self._opened = None
            import h5py

            with naming(str(self.path), (OSError,), DataError):
                self._opened = process, h5py.File(self.path, "r", locking=False)
        return self._opened[1]

    def _dataset(self, key: str | None) -> Any:
        """The HDF5 dataset at ``key`` (its values are read when it is indexed), or None."""
        node = None if key is None else self._file().get(key)
        return node if hasattr(node, "dtype") else None

    def locations(self, rows: Sequence[Row]) -> list[Location]:
        """Keys for N rows: those of the option ``pattern``, or of the first usual one that any
        image has.
        """
        usual = (
            key
            for row in rows
            for key in HDF5_PATTERNS
            if self._dataset(fill_pattern(key, row)) is not None
        )
        pattern = self.options.pattern or next(usual, HDF5_PATTERNS[0])
        boxes = _BOXES_OF.get(pattern)
        return [
            Location(
                fill_pattern(pattern, row), None if boxes is None else fill_pattern(boxes, row)
            )
            for row in rows
        ]

    def read(self, location: Location, where: str, values: bool) -> Any:
        """Read as ``FeatureFolder.read`` does."""
        with _readable(where):
            array = self._dataset(location.features)
            if array is None:
                keys = ", ".join(itertools.islice(self._file(), 4))
                raise DataError(
                    f"{where}: no such key; the file's keys are such as {keys}: set "
                    f"data.features_kwargs.pattern"
                )
            check_stored(array, where)
            return array[()] if values else array

    def stamp(self, location: Location) -> tuple[str, list[int]] | None:
        """Path and key, and the ``file_stamp`` of the whole file."""
        return f"{self.path}::{location.features}", [*file_stamp(self.path)]


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image, read on demand and picklable: the ``features`` of a row."""

    store: FeatureFolder | FeatureHdf5
    location: Location
    image_id: str
    views: tuple[ImageFeatures, ...] = ()
    """Features of further views of the image."""

    def __str__(self) -> str:
        return self.location.features

    @property
    def where(self) -> str:
        """How error messages name these features."""
        inside = f"{self.store.path}, key " if isinstance(self.store, FeatureHdf5) else ""
        return f"features of image {self.image_id!r} ({inside}{self.location.features})"

    def load(self, dim: int | None = None) -> NDArray[np.float32]:
        """Read the features, float32 [R, D]; ``dim`` is the expected D (None: any).

        Raises ``DataError`` where they are missing or unreadable, or a shape is wrong, or a value
        is not finite. Missing features are never replaced by zeros or noise.
        """
        stored, where = self._read(True), self.where
        with _readable(where):
            values = finite(stored.reshape(-1, stored.shape[-1]), "features", where)
        check_width(values.shape[1], dim, values.shape, where)
        return values[: self.store.options.max_regions]

    def check(self) -> int:
        """Check the header alone and return D. Raises ``DataError`` as ``load`` does."""
        return int(self._read(False).shape[-1])

    def _read(self, values: bool) -> Any:
        """The array or its header: [R, D], or a grid [H, W, D] with R = H·W."""
        stored = self.store.read(self.location, self.where, values)
        shape = list(stored.shape or ())  # None of an empty HDF5 dataset
        if len(shape) not in (2, 3) or 0 in shape:
            raise DataError(
                f"{self.where}: the shape is {shape}, expected [regions, features] or a grid [H, "
                f"W, features]"
            )
        check_width(shape[-1], self.store.options.dim, shape, self.where)
        return stored


def features_of(
    rows: Sequence[Row], root: str | Path, options: FeatureOptions
) -> list[ImageFeatures]:
    """Features of N rows (``image_id``, ``image``), not yet read; they may turn out missing.

    ``root`` is a folder, or an HDF5 file of any name.
    """
    path = Path(root)
    store = FeatureHdf5(path, options) if path.is_file() else FeatureFolder(path, options)
    features = [
        ImageFeatures(store, location, row["image_id"])
        for location, row in zip(store.locations(rows), rows, strict=True)
    ]
    views = [features_of(rows, view, replace(options, views=[])) for view in options.views]
    return (
        [
            replace(one, views=tuple(views_of_image))
            for one, *views_of_image in zip(features, *views, strict=True)
        ]
        if views
        else features
    )


def as_image_features(features: Any, image_id: str) -> ImageFeatures:
    """Accept a row's ``ImageFeatures``, or the path of their file (``.npz``, ``.npy``)."""
    if isinstance(features, ImageFeatures):
        return features
    folder = FeatureFolder(Path(features).parent, FeatureOptions())
    return ImageFeatures(folder, Location(str(features)), image_id)


def check_width(width: int, dim: int | None, shape: Sequence[int], where: str) -> None:
    """Raise ``DataError`` unless ``width``, the size of a region feature, is ``dim`` (None: any)."""
    if dim is not None and width != dim:
        hint = (
            "; a grid has its features in the last axis, [H, W, features]"
            if dim in tuple(shape)[:-1]
            else ""
        )
        raise DataError(f"{where}: the shape is {list(shape)}, expected [regions, {dim}]{hint}")


def finite(array: NDArray, name: str, where: str) -> NDArray[np.float32]:
    """Convert ``array`` [R, D] to float32. Raises ``DataError`` for NaN, infinity, and values
    beyond float32.
    """
    with np.errstate(
        over="ignore"
    ):  # a float64 beyond float32 becomes inf, which the next line reports
        values = array.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = (int(index) for index in wrong[0])
        raise DataError(
            f"{where}: {name}[{row}, {column}] is {array[row, column]}, expected finite float32 "
            f"values"
        )
    return values


def as_stored(values: NDArray[Any], dtype: str, where: str) -> NDArray[Any]:
    """Convert features [..., D] to ``dtype`` (``float32``, ``float16``). Raises ``DataError`` where
    one is not finite.
    """
    single = finite(values.reshape(-1, values.shape[-1]), "features", where)
    with np.errstate(over="ignore"):  # what is beyond the type becomes inf
        stored = single.astype(dtype).reshape(values.shape)
    if not np.isfinite(stored).all():
        raise DataError(f"{where}: a value is beyond {dtype}: convert to float32")
    return stored


def pad_features(features: Sequence[NDArray[np.floating]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the features [R_i, D] of B images to the largest number of regions R.

    Returns features float32 [B, R, D], padded with zeros, and mask bool [B, R], True for real
    regions.
    """
    import torch

    tensors = [torch.as_tensor(item, dtype=torch.float32) for item in features]
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), mask
