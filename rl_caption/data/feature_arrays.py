"""What an array of region features has to be: shapes, numbers, boxes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_caption.data.base import DataError

if TYPE_CHECKING:
    import torch

GEOMETRY = 5
"""Values that a normalised box adds to a region."""
ImageSize = tuple[float, float]
"""Width and height in pixels."""


def regions_and_width(shape: Sequence[int], dtype: np.dtype, where: str) -> tuple[int, int]:
    """Number of regions R and of values D of an array [R, D], or of a grid [H, W, D], which is R = H·W regions.

    Raises:
        DataError: another shape, no region, or not numbers.
    """
    if dtype.kind not in "fiu":
        raise DataError(f"{where}: the array is {dtype}, expected numbers")
    shape = list(shape)
    if len(shape) not in (2, 3):
        raise DataError(f"{where}: the shape is {shape}, expected [regions, features] or a grid [H, W, features]")
    regions = math.prod(shape[:-1])
    if regions < 1 or shape[-1] < 1:
        raise DataError(f"{where}: no regions, the shape is {shape}, expected [regions, features]")
    return regions, shape[-1]


def check_width(width: int, dim: int | None, shape: Sequence[int], where: str) -> None:
    """See to it that a region has ``dim`` values (None: any number).

    Raises:
        DataError: the message gives the shape that was found, and the one that is expected.
    """
    if dim is not None and width != dim:
        hint = "; a grid has its features in the last axis, [H, W, features]" if dim in tuple(shape)[:-1] else ""
        raise DataError(f"{where}: the shape is {list(shape)}, expected [regions, {dim}]{hint}")


def check_boxes(shape: Sequence[int], dtype: np.dtype, regions: int, where: str) -> None:
    """See to it that boxes are numbers of shape [R, 4].

    Raises:
        DataError: they are not.
    """
    if tuple(shape) != (regions, 4) or dtype.kind not in "fiu":
        raise DataError(f"{where}: boxes are {dtype} {list(shape)}, expected numbers [{regions}, 4]")


def finite(array: NDArray, name: str, where: str) -> NDArray[np.float32]:
    """``array`` [R, D] as float32.

    Raises:
        DataError: a value is NaN, infinite, or beyond float32.
    """
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which the next line reports
        values = array.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        row, column = (int(index) for index in wrong[0])
        raise DataError(f"{where}: {name}[{row}, {column}] is {array[row, column]}, expected finite float32 values")
    return values


def normalised_boxes(boxes: NDArray[np.float32], size: ImageSize, where: str) -> NDArray[np.float32]:
    """Boxes (x1, y1, x2, y2) [R, 4] in pixels to (x1/w, y1/h, x2/w, y2/h, area/(w·h)) [R, 5], each in [0, 1].

    Up to one pixel beyond the image is taken for rounding and cut off.

    Raises:
        DataError: a box lies outside the image or has no area, or all of them are in [0, 1], which is not pixels.
    """
    width, height = size
    x1, y1, x2, y2 = boxes.T
    outside = (boxes.min(axis=1) < -1) | (x2 > width + 1) | (y2 > height + 1) | (x2 <= x1) | (y2 <= y1)
    if outside.any():
        row = int(np.argmax(outside))
        raise DataError(
            f"{where}: boxes[{row}] is {boxes[row].tolist()}, expected x1 < x2 <= {width:g} and y1 < y2 <= {height:g} "
            "pixels"
        )
    if boxes.max() <= 1 < min(width, height):
        raise DataError(f"{where}: boxes are all in [0, 1], expected pixels of an image of {width:g} x {height:g}")
    corners = np.clip(np.stack([x1 / width, y1 / height, x2 / width, y2 / height], axis=1), 0.0, 1.0)
    area = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return np.concatenate([corners, area[:, None]], axis=1).astype(np.float32)


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
