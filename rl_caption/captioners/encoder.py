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


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each position: [N, C, H, W] -> [N, C, H, W].

    Not batch norm, because the policy must be the same function in training and in sampling; not over the whole image,
    where a large background would drown small things.
    """

    def forward(self, states: Tensor) -> Tensor:
        """Normalise each position's C values."""
        return super().forward(states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _conv_stem(d_model: int, patch_size: int) -> nn.Sequential:
    stages = patch_size.bit_length() - 1
    if 2**stages != patch_size or stages < 1:
        raise ValueError(f"patch_size {patch_size} is not a power of two, which the conv stem needs")
    widths = [3] + [min(32 << stage, max(d_model, 32)) for stage in range(stages)]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), ChannelNorm(after), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], d_model, 1))


class RegionEmbedding(nn.Module):
    """Project region features, with dropout of their own: [B, R, F] -> [B, R, D]."""

    def __init__(self, d_model: int, feature_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.projection = nn.Linear(feature_dim, d_model)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, region_features: Tensor) -> Tensor:
        """[B, R, F] -> [B, R, D]."""
        return self.dropout(torch.relu(self.norm(self.projection(region_features))))
