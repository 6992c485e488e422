"""Tiny image encoders with random weights, saved as those of Transformers are, and one of one's own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from rewards.clip.preprocessing import Preprocessing

SIDE = 32
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
VISION = {**TOWER, "image_size": SIDE, "patch_size": 8, "initializer_range": 0.3}
HALF = (0.5, 0.5, 0.5)


def save_vit(folder: Path, seed: int = 0, pooler: bool = True) -> str:
    """Save a ViT with its image processor; return its name as an encoder."""
    torch.manual_seed(seed)
    ViTModel(ViTConfig(**VISION), add_pooling_layer=pooler).save_pretrained(folder)
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return f"transformers:{folder}"


class MeanColours(nn.Module):
    """An encoder of one's own: the mean colour of each cell of a grid, times ``gain``, which is its one weight."""

    preprocessing = Preprocessing(SIDE, (0.0,) * 3, (1.0,) * 3, "bilinear", "squash")

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(float(gain)))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.gain * nn.functional.avg_pool2d(pixels, 8).permute(0, 2, 3, 1)
