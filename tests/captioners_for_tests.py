"""Tiny captioners with random weights, and images to caption."""

import numpy as np
import torch
from PIL import Image

from rl_caption.captioners.transformer import TransformerCaptioner

REFERENCES = [
    ["a red circle on a grey field", "a red circle", "one circle in red"],
    ["two blue squares", "two squares on a green field", "blue squares"],
    ["a dog runs in the park", "the dog is running", "a small dog"],
    ["a train on the tracks", "a red train near a station", "a train passing by"],
]
SHAPE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_heads": 4, "ffn_dim": 64, "max_positions": 16}


def tiny_captioner(seed: int = 0, dropout: float = 0.0, **shape) -> TransformerCaptioner:
    """A captioner over 16 x 16 pixels (or over regions, by ``input_kind``) that ends captions now and then."""
    torch.manual_seed(seed)
    options = {"image_size": 16, "patch_size": 8, "feature_dim": 6, **SHAPE, **shape}
    captioner = TransformerCaptioner.from_scratch(REFERENCES, min_count=1, dropout=dropout, **options)
    captioner.policy.eval()
    return captioner


def tiny_rows(count: int = 4, seed: int = 0) -> list[dict]:
    """Rows with random images."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return [
        {"image_id": f"image-{i}", "image": Image.fromarray(pixels[i]), "references": REFERENCES[i % len(REFERENCES)]}
        for i in range(count)
    ]


def region_inputs(count: int = 3) -> dict[str, torch.Tensor]:
    """Region features with different numbers of regions."""
    torch.manual_seed(5)
    mask = torch.arange(5).unsqueeze(0) < torch.tensor([[3], [5], [2]])[:count]
    return {"region_features": torch.randn(count, 5, 6), "region_mask": mask}
