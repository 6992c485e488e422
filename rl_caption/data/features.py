"""Region features, for captioners that read the regions of a detector, or a grid, instead of
pixels.

They are in a folder with one ``.npz`` or ``.npy`` file per image, or in one HDF5 file.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rewards.base import naming
from rewards.files import UNREADABLE_ARRAY, atomic_write
from rewards.images import file_stamp
from rewards.options import check_fields
from rl_caption.data.base import DataError, Row

if TYPE_CHECKING:
    import torch

FEATURE_KEYS = ("features", "x", "feat")
HDF5_PATTERNS = (
    "{image_id}_features",
    "{image_id}_grids",
    "{image_id}/features",
    "{image_id}",
)
"""Keys that are tried in an HDF5 file where no pattern is given; the first that any image has is
used.
"""


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
    """

    dim: Annotated[int, Field(ge=1)] | None = None
    pattern: str | None = None
    max_regions: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        with naming("data.features_kwargs", (ValueError,), DataError):
            check_fields(self)
        if not re.search("{(image_id|stem)}", self.pattern or "{image_id}"):
            raise DataError(
                f"features_kwargs.pattern is {self.pattern!r}: expected {{image_id}} or {{stem}}"
            )


def fill_pattern(pattern: str, row: Row) -> str:
    """Fill in ``{image_id}``, and ``{stem}`` and ``{folder}`` of the image's file."""
    image = row.get("image")
    file = Path(image if isinstance(image, str | Path) else "")
    pattern = pattern.replace("{image_id}", row["image_id"])
    return pattern.replace("{stem}", file.stem).replace("{folder}", file.parent.name)


def _read_file(path: str, values: bool) -> Any:
    """The array of an ``.npz`` or ``.npy`` file, or without ``values`` an object with its ``shape``."""
    if not zipfile.is_zipfile(path):
        return np.load(path, mmap_mode=None if values else "r")
    with np.load(path) as archive:
        key = next((key for key in FEATURE_KEYS if key in archive), FEATURE_KEYS[0])
        if values:
            return archive[key]
        with archive.zip.open(f"{key}.npy") as file:
            np.lib.format.read_magic(file)
            return SimpleNamespace(shape=np.lib.format.read_array_header_1_0(file)[0])


class Hdf5File:
    """An HDF5 file with a dataset per image. Each process opens the file for itself when it first
    reads from it; an open file is not carried into another process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def dataset(self, key: str) -> Any:
        """The HDF5 dataset at ``key`` (its values are read when it is indexed), or None."""
        node = self._file().get(key)
        return node if hasattr(node, "dtype") else None

    def read(self, key: str, values: bool) -> Any:
        """Read as ``_read_file`` does."""
        array = self.dataset(key)
        if array is None:
            keys = ", ".join(itertools.islice(self._file(), 4))
            raise KeyError(
                f"no such key, they are such as {keys}: data.features_kwargs.pattern"
            )
        if array.size:  # the library returns zeros for what is not written
            expected, written = 1, int(array.id.get_storage_size() > 0)
            if array.chunks is not None:
                blocks = map(math.ceil, np.divide(array.shape, array.chunks))
                expected, written = math.prod(blocks), array.id.get_num_chunks()
            if written < expected:
                raise ValueError(
                    f"{written} of {expected} blocks of {list(array.shape)} were written"
                )
        return array[()] if values else array


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image, read on demand and picklable: the ``features`` of a row."""

    place: str
    """The path of a file, or the key in ``file``."""
    image_id: str
    options: FeatureOptions = field(default=FeatureOptions(), compare=False)
    file: Hdf5File | None = None

    def __str__(self) -> str:
        return self.place

    @property
    def where(self) -> str:
        """How error messages name these features."""
        inside = "" if self.file is None else f"{self.file.path}, key "
        return f"features of image {self.image_id!r} ({inside}{self.place})"

    def load(self, dim: int | None = None) -> NDArray[np.float32]:
        """Read the features, float32 [R, D]; ``dim`` is the expected D (None: any).

        Raises ``DataError`` where they are missing or unreadable, or a shape is wrong, or a value
        is not finite. Missing features are never replaced by zeros or noise.
        """
        stored = self._read(True)
        with naming(self.where, UNREADABLE_ARRAY, DataError, (DataError,)):
            values = finite(stored.reshape(-1, stored.shape[-1]), self.where)
        check_width(values.shape, dim, self.where)
        return values[: self.options.max_regions]

    def check(self) -> int:
        """Check the header alone and return D. Raises ``DataError`` as ``load`` does."""
        return int(self._read(False).shape[-1])

    def stamp(self) -> list[Any]:
        """Everything that the result of ``check`` depends on. Raises ``OSError`` if it is missing."""
        path = self.place if self.file is None else self.file.path
        return [*file_stamp(path), repr(self.options)]

    def _read(self, values: bool) -> Any:
        """The array or its header: [R, D], or a grid [H, W, D] with R = H·W."""
        with naming(self.where, UNREADABLE_ARRAY, DataError):
            read = _read_file if self.file is None else self.file.read
            stored = read(self.place, values)
        shape = stored.shape or ()  # None of an empty HDF5 dataset
        if len(shape) not in (2, 3) or 0 in shape:
            expected = "expected [regions, features] or a grid [H, W, features]"
            raise DataError(f"{self.where}: the shape is {list(shape)}, {expected}")
        check_width(shape, self.options.dim, self.where)
        return stored


def features_of(
    rows: Sequence[Row], root: str | Path, options: FeatureOptions
) -> list[ImageFeatures]:
    """Features of N rows (``image_id``, ``image``), not yet read; they may turn out missing.

    ``root`` is a folder, or an HDF5 file of any name.
    """
    file = Hdf5File(Path(root)) if os.path.isfile(root) else None
    pattern = options.pattern or "{image_id}"
    if file is not None and options.pattern is None:
        usual = (
            key
            for row in rows
            for key in HDF5_PATTERNS
            if file.dataset(fill_pattern(key, row)) is not None
        )
        pattern = next(usual, HDF5_PATTERNS[0])
    found = []
    for row in rows:
        place = fill_pattern(pattern, row)
        if file is None:
            place = os.path.join(root, place)
            is_npy = not os.path.isfile(f"{place}.npz") and os.path.isfile(
                f"{place}.npy"
            )
            place += ".npy" if is_npy else ".npz"
        found.append(ImageFeatures(place, row["image_id"], options, file))
    return found


def as_image_features(features: Any, image_id: str) -> ImageFeatures:
    """Accept a row's ``ImageFeatures``, or the path of their file (``.npz``, ``.npy``)."""
    if isinstance(features, ImageFeatures):
        return features
    return ImageFeatures(str(features), image_id)


def check_width(shape: Sequence[int], dim: int | None, where: str) -> None:
    """Raise ``DataError`` unless the last axis, the size of a region feature, is ``dim`` (None:
    any).
    """
    if dim not in (None, shape[-1]):
        raise DataError(
            f"{where}: the shape is {list(shape)}, expected {dim} in the last axis"
        )


def finite(array: NDArray, where: str, dtype: str = "float32") -> NDArray[Any]:
    """Convert ``array`` [R, D]. Raises ``DataError`` for NaN, infinity, and values beyond ``dtype``."""
    with np.errstate(over="ignore"):  # what is beyond the type becomes inf
        values = array.astype(dtype)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = wrong[0].tolist()
        value = array[row, column]
        raise DataError(
            f"{where}: features[{row}, {column}] is {value}: not finite in {dtype}"
        )
    return values


def write_features(path: Path, values: NDArray[Any], dtype: str, where: str) -> None:
    """Write the features [..., D] of an image to an ``.npz`` file.

    Raises ``DataError`` where a value is not finite, or beyond ``dtype`` (``float32``,
    ``float16``).
    """
    stored = finite(values.reshape(-1, values.shape[-1]), where, dtype)
    with atomic_write(path) as file:
        np.savez(file, features=stored.reshape(values.shape))


def pad_features(
    features: Sequence[NDArray[np.floating]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the features [R_i, D] of B images to the largest number of regions R.

    Returns features float32 [B, R, D], padded with zeros, and mask bool [B, R], True for real
    regions.
    """
    import torch

    tensors = [torch.as_tensor(item, dtype=torch.float32) for item in features]
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), mask
