"""CLIP's preprocessing: from a file, a PIL image or a scene to the pixels that an image encoder reads.

Pillow resizes the shorter side (bicubic, antialiased) in the image's own mode, as open_clip does, the centre is
cropped, then RGB, [0, 1], and mean and standard deviation per channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rewards.base import RewardError
from rewards.images import ImageSource, open_image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the pixels that a model reads."""

    size: int = 224
    """Side of the square in pixels."""
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    interpolation: str = "bicubic"
    """``bicubic`` or ``bilinear``."""
    resize: str = "shortest"
    """``shortest``: the shorter side becomes ``size`` and the centre is cropped; ``squash``: both sides do."""

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the pixels [3, size, size], float32, of an image in its own mode."""
        return self.normalise(self.square(image))

    def square(self, image: Image.Image) -> Tensor:
        """Return the resized and cropped RGB image [3, size, size], uint8."""
        method = Image.Resampling.BILINEAR if self.interpolation == "bilinear" else Image.Resampling.BICUBIC
        if self.resize == "squash":
            image = image.resize((self.size, self.size), method)
        else:
            width, height = image.size
            # The longer side is rounded down, as CLIP's own resize does.
            scaled = int(self.size * max(width, height) / min(width, height))
            target = (self.size, scaled) if width <= height else (scaled, self.size)
            if target != image.size:
                image = image.resize(target, method)
            left, top = (round((side - self.size) / 2) for side in image.size)
            image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    def normalise(self, square: Tensor) -> Tensor:
        """Return the pixels of a square [3, size, size], uint8, as the model reads them: float32."""
        values = square.float() / 255
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)
        return (values - mean) / std


def pixels(source: ImageSource, preprocessing: Preprocessing) -> Tensor:
    """Read or draw an image and return its pixels [3, size, size].

    Raises:
        RewardError: as for ``open_image``, or the image has a shape that cannot be prepared.
    """
    image = open_image(source, own_mode=True)
    try:
        return preprocessing(image)
    except (ValueError, OSError, ZeroDivisionError, MemoryError) as error:
        raise RewardError(f"image {source!r:.200} of {image.size} pixels cannot be prepared: {error}") from error


def preprocessing_of(visual: Any) -> Preprocessing:
    """Return the preprocessing of an open_clip image encoder.

    Raises:
        ValueError: it is of a kind that is not supported.
    """
    config = getattr(visual, "preprocess_cfg", None) or {"size": visual.image_size}
    size = config["size"]
    sides = set(size) if isinstance(size, tuple | list) else {size}
    resize, interpolation = config.get("resize_mode", "shortest"), config.get("interpolation", "bicubic")
    if len(sides) != 1 or resize not in ("shortest", "squash") or interpolation not in ("bicubic", "bilinear"):
        raise ValueError(
            f"preprocessing {config} is not supported: expected a square, resized by 'shortest' or 'squash', bicubic "
            "or bilinear"
        )
    mean, std = tuple(config.get("mean", CLIP_MEAN)), tuple(config.get("std", CLIP_STD))
    return Preprocessing(int(sides.pop()), mean, std, interpolation, resize)
