"""RandAugment (Cubuk et al. 2020) without Color, Solarize and Invert: the views that L-CLIP is distilled on."""

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from rl_caption.data.loader import row_generator

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Contrast", "Sharpness", "Posterize", "AutoContrast", "Equalize"),
)
"""As in L-CLIP's released code."""
NUM_OPERATIONS = 4
STRENGTH = 9 / 30
"""Of the largest magnitude: index 9 of 31."""


def rand_augment(square: Tensor, seed: int, step: int, image_id: str) -> Tensor:
    """A view of an image, [3, S, S] in uint8, by four random operations, each upwards or downwards.

    A pure function of the arguments; black where nothing was.
    """
    generator = row_generator(seed, step, f"rand_augment/{image_id}")
    drawn, signs = generator.integers(len(OPERATIONS), size=NUM_OPERATIONS), generator.integers(2, size=NUM_OPERATIONS)
    image = Image.fromarray(square.permute(1, 2, 0).numpy())
    for index, sign in zip(drawn, signs, strict=True):
        image = operated(image, OPERATIONS[index], STRENGTH * (1 - 2 * int(sign)))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def operated(image: Image.Image, operation: str, strength: float) -> Image.Image:
    """An RGB image after one of ``OPERATIONS``; ``strength`` in [-1, 1] is a fraction of the largest magnitude.

    These are a shear of 0.3, a shift by 150/331 of the side (whole pixels), 30 degrees, factors of 1 ± 0.9, and 4 bits
    less a channel (``Posterize``, whatever the sign). Pixels are moved to the nearest place, without interpolation.
    """

    def moved(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix)

    match operation:
        case "ShearX":
            return moved(1, 0.3 * strength, 0, 0, 1, 0)
        case "ShearY":
            return moved(1, 0, 0, 0.3 * strength, 1, 0)
        case "TranslateX":
            return moved(1, 0, -int(150 / 331 * image.width * strength), 0, 1, 0)
        case "TranslateY":
            return moved(1, 0, 0, 0, 1, -int(150 / 331 * image.height * strength))
        case "Rotate":
            return image.rotate(30 * strength)
        case "Brightness" | "Contrast" | "Sharpness":
            return getattr(ImageEnhance, operation)(image).enhance(1 + 0.9 * strength)
        case "Posterize":
            return ImageOps.posterize(image, 8 - round(4 * abs(strength)))
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
    return image
