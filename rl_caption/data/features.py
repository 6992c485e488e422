"""Region features: one ``.npz`` or ``.npy`` file per image, for captioners that read features instead of pixels."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rl_caption.data.base import DataError

if TYPE_CHECKING:
    import torch

SUFFIXES = (".npz", ".npy")
FEATURE_KEYS = ("features", "x", "feat")
BOX_KEYS = ("boxes", "bbox")
# What numpy and zipfile raise on a file that is cut off, is not an array, or would have to be unpickled.
_READ_ERRORS = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


class FeatureStore:
    """A folder of region features, one file per image id.

    ``<image_id>.npz`` holds ``features`` (or ``x``, or ``feat``) of shape [R, D] and, where known, ``boxes`` (or
    ``bbox``) of shape [R, 4], whose unit is whatever the extractor wrote; ``<image_id>.npy`` holds the features alone.
    Nothing is ever unpickled. A picklable object that holds no open file.

    Args:
        root: the folder.
        dim: D, the number of features of a region.
        max_regions: regions after this many are left out, in the order of the file.

    Raises:
        DataError: ``root`` is not a folder, or a size is below 1.
    """

    def __init__(self, root: str | Path, dim: int, max_regions: int = 100) -> None:
        if dim < 1 or max_regions < 1:
            raise DataError(f"dim is {dim} and max_regions is {max_regions}: both must be at least 1")
        self.root = _folder(root)
        self.dim = dim
        self.max_regions = max_regions

    def load(self, image_id: str) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the features, float32 [R, D], and the boxes, float32 [R, 4] or None, of one image.

        Raises:
            DataError: the file is missing or unreadable, a shape is wrong, or a value is not finite. An image without
                features never becomes zeros or noise.
        """
        return load_features(feature_paths(self.root, [image_id])[0], image_id, self.dim, self.max_regions)


def feature_paths(root: str | Path, image_ids: Iterable[str]) -> list[str]:
    """Return the path of each image's feature file, ``.npz`` before ``.npy``, whether or not there is one.

    Raises:
        DataError: ``root`` is not a folder.
    """
    folder = _folder(root)
    ids = list(image_ids)
    # One listing answers for a whole dataset; single look-ups and ids with a folder in them ask the file system.
    names = set(os.listdir(folder)) if len(ids) > 1 else None
    return [_feature_path(folder, image_id, names) for image_id in ids]


def _feature_path(folder: Path, image_id: str, names: set[str] | None) -> str:
    for suffix in SUFFIXES:
        name = image_id + suffix
        exists = os.path.isfile(folder / name) if names is None or os.sep in name else name in names
        if exists:
            return str(folder / name)
    return str(folder / (image_id + SUFFIXES[0]))


def _folder(root: str | Path) -> Path:
    folder = Path(root)
    if not folder.is_dir():
        raise DataError(f"features_root {str(root)!r} is not a folder: expected one .npz or .npy file per image id")
    return folder


def load_features(
    path: str | Path, image_id: str, dim: int | None = None, max_regions: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Read one file of region features: float32 [R, D] and, where it has them, boxes float32 [R, 4].

    Args:
        path: the ``.npz`` or ``.npy`` file.
        image_id: the image, for messages.
        dim: the D that is expected; None takes any.
        max_regions: keep the first so many regions; None keeps all.

    Raises:
        DataError: the file is missing or unreadable, a shape is wrong, or a value is not finite.
    """
    where = f"features of image {image_id!r} ({path})"
    if not os.path.isfile(path):
        raise DataError(f"{where}: no such file; expected {image_id}.npz or {image_id}.npy")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            features, boxes = loaded, None
        else:
            with loaded as arrays:
                features = arrays[_feature_key(arrays.files, where)]
                boxes = next((arrays[key] for key in BOX_KEYS if key in arrays.files), None)
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise DataError(f"{where}: cannot be read: {error}") from error
    _check_array(features.shape, features.dtype, dim, where)
    if boxes is not None and (boxes.shape != (len(features), 4) or boxes.dtype.kind not in "fiu"):
        raise DataError(f"{where}: boxes are {boxes.dtype} {list(boxes.shape)}, expected numbers [{len(features)}, 4]")
    kept = _finite(features[:max_regions], "features", where)
    return kept, None if boxes is None else _finite(boxes[:max_regions], "boxes", where)


def check_feature_file(path: str | Path, image_id: str, dim: int | None = None) -> int:
    """Check that a feature file is there and that its header declares [R, D], without reading the values.

    Returns:
        D, the number of features of a region.

    Raises:
        DataError: as ``load_features``, except that the values are not looked at.
    """
    where = f"features of image {image_id!r} ({path})"
    if not os.path.isfile(path):
        raise DataError(f"{where}: no such file; expected {image_id}.npz or {image_id}.npy")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
                with archive.open(_feature_key(keys, where) + ".npy") as member:
                    shape, dtype = _array_header(member)  # type: ignore[arg-type]
        else:
            with open(path, "rb") as file:
                shape, dtype = _array_header(file)
                expected = file.tell() + int(np.prod(shape)) * dtype.itemsize
            if os.path.getsize(path) < expected:
                raise DataError(f"{where}: cut off at {os.path.getsize(path)} of {expected} bytes")
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise DataError(f"{where}: cannot be read: {error}") from error
    _check_array(shape, dtype, dim, where)
    return shape[1]


def _array_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def _feature_key(keys: Sequence[str], where: str) -> str:
    for key in FEATURE_KEYS:
        if key in keys:
            return key
    raise DataError(f"{where}: holds the arrays {sorted(keys)}, expected one of {', '.join(FEATURE_KEYS)}")


def _check_array(shape: tuple[int, ...], dtype: np.dtype, dim: int | None, where: str) -> None:
    expected = f"[regions, {dim or 'features'}]"
    if dtype.kind not in "fiu":
        raise DataError(f"{where}: the array is {dtype}, expected numbers")
    if len(shape) != 2:
        raise DataError(f"{where}: the shape is {list(shape)}, expected {expected}; save a grid as one row per cell")
    if shape[0] < 1:
        raise DataError(f"{where}: no regions, the shape is {list(shape)}, expected {expected}")
    if shape[1] < 1 or (dim is not None and shape[1] != dim):
        raise DataError(f"{where}: the shape is {list(shape)}, expected {expected}")


def _finite(array: NDArray, name: str, where: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the next line reports
        values = array.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = (int(index) for index in wrong[0])
        raise DataError(f"{where}: {name}[{row}, {column}] is {array[row, column]}, expected finite float32 values")
    return values


def pad_features(features: Sequence[NDArray[np.floating]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the features of B images to the largest number of regions R.

    Args:
        features: B arrays (or tensors) of shape [R_i, D].

    Returns:
        features float32 [B, R, D], zero behind each image's regions, and mask bool [B, R], True on real regions.

    Raises:
        DataError: no image, or arrays that are not [R_i, D] with one D.
    """
    import torch

    tensors = [torch.as_tensor(item, dtype=torch.float32) for item in features]
    if not tensors:
        raise DataError("pad_features got no images: expected at least one array [R, D]")
    dim = tensors[0].shape[-1] if tensors[0].ndim else 0
    for index, tensor in enumerate(tensors):
        if tensor.ndim != 2 or tensor.shape[1] != dim:
            raise DataError(f"pad_features: item {index} has the shape {list(tensor.shape)}, expected [regions, {dim}]")
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), mask
