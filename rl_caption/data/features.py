"""Region features, for captioners that read the regions of a detector, or a grid,
instead of pixels.

They are in a folder with one ``.npz`` or ``.npy`` file per image, or in one HDF5 file.
"""

from __future__ import annotations

import itertools
import math
import os
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


@dataclass(frozen=True)
class FeatureOptions:
    """Options of stored features (``data.features_kwargs``).

    Args:
        dim: size of a stored region feature (2048 bottom-up, 2054 VinVL); None accepts
            any size that all files share.
        pattern: name of an image's file without extension, or its key in the HDF5 file,
            made of ``{image_id}``, ``{stem}`` (the image file's name without extension)
            and ``{folder}`` (the name of that file's folder).
        max_regions: keep at most so many regions, the first of the file; None keeps all.
    """

    dim: Annotated[int, Field(ge=1)] | None = None
    pattern: Annotated[str, Field(pattern=r"\{(image_id|stem)\}")] = "{image_id}"
    max_regions: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        with naming("data.features_kwargs", (ValueError,), DataError):
            check_fields(self)


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


@dataclass(eq=False)
class Hdf5File:
    """An HDF5 file with a dataset per image. Each process opens the file for itself
    when it first reads from it; an open file is not carried into another process.
    """

    path: Path
    opened: dict[int, Any] = field(default_factory=dict, repr=False)
    """Process -> the file as that process has opened it."""

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the open file."""
        return {"path": self.path, "opened": {}}

    def _file(self) -> Any:
        process = os.getpid()
        if process not in self.opened:
            # In a fork of the process that opened the file, that handle is closed first: while it is
            # open here, the HDF5 library would answer with the same open file, whose descriptor and
            # position the processes share.
            self.opened.clear()
            import h5py

            self.opened[process] = h5py.File(self.path, "r", locking=False)
        return self.opened[process]

    def read(self, key: str, values: bool) -> Any:
        """Read as ``_read_file`` does."""
        file = self._file()
        array = file.get(key)
        if not hasattr(array, "dtype"):  # there is none, or a group
            keys = ", ".join(itertools.islice(file, 4))
            raise KeyError(
                f"no such key, they are such as {keys}: data.features_kwargs.pattern"
            )
        blocks, written = 1, int(array.id.get_storage_size() > 0)
        if array.chunks is not None:
            counts = map(math.ceil, np.divide(array.shape, array.chunks))
            blocks, written = math.prod(counts), array.id.get_num_chunks()
        if array.size and written < blocks:  # the library would return zeros
            shape = list(array.shape)
            raise ValueError(f"{written} of {blocks} blocks of {shape} were written")
        return array[()] if values else array


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image, read on demand and picklable: the ``features`` of a row."""

    place: str
    """The path of a file, or the key in ``file``."""
    image_id: str
    options: FeatureOptions = field(default=FeatureOptions(), compare=False)
    file: Hdf5File | None = None

    @property
    def where(self) -> str:
        """Name of these features in error messages."""
        inside = "" if self.file is None else f"{self.file.path}, key "
        return f"features of image {self.image_id!r} ({inside}{self.place})"

    def load(self, dim: int | None = None) -> NDArray[np.float32]:
        """Read the features, float32 [R, D]; ``dim`` is the expected D (None: any).

        Raises ``DataError`` where they are missing or unreadable, or a shape is wrong,
        or a value is not finite. Missing features are never replaced by zeros or noise.
        """
        stored = self._read(True, dim)
        with naming(self.where, UNREADABLE_ARRAY, DataError, (DataError,)):
            values = finite(stored.reshape(-1, stored.shape[-1]), self.where)
        return values[: self.options.max_regions]

    def check(self) -> int:
        """Check the header alone and return D. Raises ``DataError`` as ``load`` does."""
        return int(self._read(False).shape[-1])

    def stamp(self) -> list[Any]:
        """Everything that the result of ``check`` depends on. Raises ``OSError`` for a
        missing file.
        """
        path = self.place if self.file is None else self.file.path
        return [*file_stamp(path), repr(self.options)]

    def _read(self, values: bool, dim: int | None = None) -> Any:
        """The array or its header: [R, D], or a grid [H, W, D] with R = H·W."""
        with naming(self.where, UNREADABLE_ARRAY, DataError):
            read = _read_file if self.file is None else self.file.read
            stored = read(self.place, values)
        shape = stored.shape or ()  # None of an empty HDF5 dataset
        if len(shape) not in (2, 3) or 0 in shape:
            expected = "expected [regions, features] or a grid [H, W, features]"
            raise DataError(f"{self.where}: the shape is {list(shape)}, {expected}")
        for size in (self.options.dim, dim):
            check_width(shape, size, self.where)
        return stored


def features_of(
    row: Row,
    root: str | Path,
    options: FeatureOptions = FeatureOptions(),
    file: Hdf5File | None = None,
) -> ImageFeatures:
    """Features of a row (``image_id``, ``image``), not yet read; they may turn out missing.

    They are in the folder ``root``, or in ``file``.
    """
    image: Any = row.get("image")
    photo = Path(image if isinstance(image, str | Path) else "")
    place = options.pattern.replace("{image_id}", row["image_id"])
    place = place.replace("{stem}", photo.stem).replace("{folder}", photo.parent.name)
    if file is None:
        place = os.path.join(root, place)
        is_npy = os.path.isfile(f"{place}.npy") and not os.path.isfile(f"{place}.npz")
        place += ".npy" if is_npy else ".npz"
    return ImageFeatures(place, row["image_id"], options, file)


def as_image_features(features: Any, image_id: str) -> ImageFeatures:
    """Accept a row's ``ImageFeatures``, or the path of their file (``.npz``, ``.npy``)."""
    if isinstance(features, ImageFeatures):
        return features
    return ImageFeatures(str(features), image_id)


def check_width(shape: Sequence[int], dim: int | None, where: str) -> None:
    """Raise ``DataError`` unless the last axis, the size of a region feature, is
    ``dim`` (None: any).
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

    Returns features float32 [B, R, D], padded with zeros, and mask bool [B, R], True
    for real regions.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    tensors = [torch.as_tensor(item, dtype=torch.float32) for item in features]
    real = [torch.ones(len(tensor), dtype=torch.bool) for tensor in tensors]
    return pad_sequence(tensors, True), pad_sequence(real, True)
