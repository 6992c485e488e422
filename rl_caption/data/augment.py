"""Random views of training images, each a pure function of (seed, step, image id). Colours are never touched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_caption.data.order import row_generator

AUGMENTATIONS = ("horizontal", "vertical", "transpose", "crop", "shift", "rotate")
SMALLEST_CROP = 0.75
"""Side of the smallest crop, as a share of the image's side."""
LARGEST_SHIFT = 1 / 8
"""Largest shift in either direction, as a share of the image's side."""
LARGEST_ANGLE = 10.0
"""Largest rotation either way, in degrees."""


def augment(pixels: Tensor, names: Sequence[str], seed: int, step: int, image_id: str) -> Tensor:
    """One random view of an image.

    Args:
        pixels: [3, S, S].
        names: among ``AUGMENTATIONS``. ``horizontal`` and ``vertical`` mirror half of the images; ``transpose`` swaps
            the axes of half of them (with both mirrors: all eight views of a square); ``crop`` cuts out a square of
            0.75 to 1 of the side and scales it back (bilinear); ``shift`` moves the image by up to 1/8 of the side in
            each direction, ``rotate`` turns it by up to 10 degrees either way (bilinear), and both repeat the edge
            where nothing was.
        seed, step, image_id: what the view depends on.

    Returns:
        [3, S, S], a new tensor.
    """
    generator = row_generator(seed, step, image_id)
    draws = dict(zip(("horizontal", "vertical", "transpose", "crop"), generator.random(4), strict=True))
    if "horizontal" in names and draws["horizontal"] < 0.5:
        pixels = pixels.flip(-1)
    if "vertical" in names and draws["vertical"] < 0.5:
        pixels = pixels.flip(-2)
    if "transpose" in names and draws["transpose"] < 0.5:
        pixels = pixels.transpose(-1, -2)
    if "crop" in names:
        side = pixels.shape[-1]
        size = round(side * (SMALLEST_CROP + (1 - SMALLEST_CROP) * draws["crop"]))
        top, left = generator.integers(0, side - size + 1, 2)
        window = pixels[None, :, top : top + size, left : left + size]
        pixels = torch.nn.functional.interpolate(window, (side, side), mode="bilinear", align_corners=False)[0]
    # A generator of their own: the views of the others do not depend on whether these are asked for.
    further = row_generator(seed, step, f"shift and rotate/{image_id}").uniform(-1, 1, 3)
    if "shift" in names:
        pixels = _shifted(pixels, further[0], further[1])
    if "rotate" in names:
        pixels = _rotated(pixels, math.radians(LARGEST_ANGLE * further[2]))
    return pixels.clone()


def _shifted(pixels: Tensor, down: float, right: float) -> Tensor:
    """Move by whole pixels; ``down`` and ``right`` in [-1, 1] are shares of the largest shift."""
    side = pixels.shape[-1]
    room = int(side * LARGEST_SHIFT)
    top, left = (room - round(room * share) for share in (down, right))
    padded = torch.nn.functional.pad(pixels[None], (room,) * 4, mode="replicate")[0]
    return padded[:, top : top + side, left : left + side]


def _rotated(pixels: Tensor, angle: float) -> Tensor:
    """Turn about the centre by ``angle`` in radians."""
    cosine, sine = math.cos(angle), math.sin(angle)
    turn = pixels.new_tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]])
    grid = torch.nn.functional.affine_grid(turn, [1, *pixels.shape], align_corners=False)
    return torch.nn.functional.grid_sample(
        pixels[None], grid, mode="bilinear", padding_mode="border", align_corners=False
    )[0]
