"""Ranks of captions among the images of a split, by hand."""

from typing import Any

import torch
from PIL import Image

from rewards.clip.encoder import CachedEncoder
from rl_caption.evaluation.metrics import Evaluation
from rl_caption.evaluation.retrieval import add_retrieval

PLANE = {
    "north": (0.0, 1.0),
    "east": (1.0, 0.0),
    "up": (0.0, 1.0),
    "diagonal": (0.6, 0.8),
    "right": (0.8, 0.6),
    "west": (-1.0, 0.0),
}


class Plane:
    """Embeds names of directions, and images of a grey value, its place in the list of names."""

    fingerprint, signature, context_length = "plane", "plane", 77

    def encode_texts(self, texts: Any) -> torch.Tensor:
        return torch.tensor([PLANE[text] for text in texts])

    def encode_images(self, images: Any) -> torch.Tensor:
        return self.encode_texts(
            [list(PLANE)[image.getpixel((0, 0))] for image in images]
        )


def image(name: str) -> Image.Image:
    return Image.new("L", (1, 1), list(PLANE).index(name))


def test_references_are_averaged_within_their_image() -> None:
    rows = [
        {"image_id": "a", "image": image("north"), "references": ["right", "west"]},
        {"image_id": "b", "image": image("east"), "references": ["right"]},
        {"image_id": "c", "image": image("west"), "references": ["north"]},
    ]
    start = Evaluation({}, "S", 2, per_image={"b": {"CIDEr": 1.0}, "a": {"CIDEr": 2.0}})
    found = add_retrieval(
        start, rows, {"b": "diagonal", "a": "up"}, CachedEncoder(Plane())
    )
    assert found.metrics == {
        "retrieval/R@1": 0.5,
        "retrieval/R@5": 1.0,
        "retrieval/R@10": 1.0,
        "retrieval/median_rank": 1.5,
        "retrieval/references/R@1": 0.5,  # of a: right has rank 2, west 2; of b: 1
        "retrieval/references/R@5": 1.0,
        "retrieval/references/R@10": 1.0,
        "retrieval/references/median_rank": 2.0,
    }
    assert found.per_image["b"]["retrieval/rank"] == 2.0
    assert found.per_image["a"]["CIDEr"] == 2.0
    assert found.signature == "S+retrieval[plane,3 images]"
