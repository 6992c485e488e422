"""Random views of training images, each a pure function of (seed, step, image id). Colours are never touched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_caption.data.order import row_generator

AUGMENTATIONS = ("horizontal", "vertical", "transpose", "crop")
SMALLEST_CROP = 0.75
"""Side of the smallest crop, as a share of the image's side."""


def augment(pixels: Tensor, names: Sequence[str], seed: int, step: int, image_id: str) -> Tensor:
    """One random view of an image.

    Args:
        pixels: [3, S, S].
        names: among ``AUGMENTATIONS``. ``horizontal`` and ``vertical`` mirror half of the images; ``transpose`` swaps
            the axes of half of them (with both mirrors: all eight views of a square); ``crop`` cuts out a square of
            0.75 to 1 of the side and scales it back (bilinear).
        seed, step, image_id: what the view depends on.

    Returns:
        [3, S, S], a new tensor.
    """
    generator = row_generator(seed, step, image_id)
    draws = dict(zip(AUGMENTATIONS, generator.random(len(AUGMENTATIONS)), strict=True))
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
    return pixels.clone()
