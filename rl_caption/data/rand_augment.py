"""RandAugment (Cubuk et al. 2020) without Color, Solarize and Invert: the augmentation
of L-CLIP's distillation.
"""

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from rl_caption.data.loader import row_generator

OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Contrast",
    "Sharpness",
    "Posterize",
    "AutoContrast",
    "Equalize",
)
"""Operations of L-CLIP's released code."""
NUM_OPERATIONS = 4
STRENGTH = 9 / 30
"""Magnitude as a fraction of the largest: index 9 of 31 bins."""


def rand_augment(square: Tensor, seed: int, step: int, image_id: str) -> Tensor:
    """Augment an image, uint8 [3, S, S], by four random operations, each with a random sign.

    A pure function of the arguments. Pixels from outside the image are black.
    """
    generator = row_generator(seed, step, f"rand_augment/{image_id}")
    drawn = generator.integers(len(OPERATIONS), size=NUM_OPERATIONS)
    signs = generator.integers(2, size=NUM_OPERATIONS)
    image = Image.fromarray(square.permute(1, 2, 0).numpy())
    for index, sign in zip(drawn, signs, strict=True):
        image = apply_operation(
            image, OPERATIONS[index], STRENGTH * (1 - 2 * int(sign))
        )
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def apply_operation(image: Image.Image, operation: str, strength: float) -> Image.Image:
    """Apply one of ``OPERATIONS`` to a square RGB image; ``strength`` in [-1, 1] is a
    fraction of the largest magnitude.

    The largest magnitudes are a shear of 0.3, a shift by 150/331 of the side (whole
    pixels), 30 degrees, factors of 1 ± 0.9, and 4 bits less per channel (``Posterize``,
    whatever the sign). Interpolation is nearest-neighbour.
    """

    shear, shift = 0.3 * strength, -int(150 / 331 * image.width * strength)
    matrices = {
        "ShearX": (1, shear, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, shear, 1, 0),
        "TranslateX": (1, 0, shift, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, shift),
    }
    if operation in matrices:
        affine = Image.Transform.AFFINE
        return image.transform(image.size, affine, matrices[operation])
    match operation:
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
