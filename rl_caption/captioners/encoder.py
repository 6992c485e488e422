"""How pixels and region features enter the Transformer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class PixelEmbedding(nn.Module):
    """Cut an image into patches, embed them, add learned positions: [B, 3, S, S] -> [B, (S / patch_size)², D]."""

    def __init__(self, d_model: int, image_size: int, patch_size: int, stem: str) -> None:
        super().__init__()
        if stem == "linear":
            self.stem: nn.Module = nn.Conv2d(3, d_model, patch_size, stride=patch_size)
        else:
            self.stem = _conv_stem(d_model, patch_size)
        self.position = nn.Parameter(torch.zeros(1, (image_size // patch_size) ** 2, d_model))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, P, D]."""
        return self.stem(pixel_values).flatten(2).transpose(1, 2) + self.position


class ConvBlock(nn.Module):
    """Residual 3x3 convolution at one resolution: [N, C, H, W] -> [N, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, states: Tensor) -> Tensor:
        """Add a convolution of the normalised, activated states."""
        return states + self.convolution(torch.nn.functional.gelu(self.norm(states)))


def _conv_stem(d_model: int, patch_size: int) -> nn.Sequential:
    stages = patch_size.bit_length() - 1
    if 2**stages != patch_size or stages < 1:
        raise ValueError(f"patch_size {patch_size} is not a power of two, which the conv stem needs")
    widths = [3] + [max(d_model >> (stages - stage), 16) for stage in range(1, stages + 1)]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        # Group norm, not batch norm: the policy must be the same function in training and in sampling.
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.GELU()]
        layers += [ConvBlock(after)]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], d_model, 1))


class RegionEmbedding(nn.Module):
    """Project region features: [B, R, F] -> [B, R, D]."""

    def __init__(self, d_model: int, feature_dim: int) -> None:
        super().__init__()
        self.projection = nn.Linear(feature_dim, d_model)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, region_features: Tensor) -> Tensor:
        """[B, R, F] -> [B, R, D]."""
        return torch.relu(self.norm(self.projection(region_features)))
