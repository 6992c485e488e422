"""Generated scenes of which a caption tells a relation, and a wider image encoder: what it takes to learn relations.

docs/results.md ("Binding and relations") has the configurations.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from rl_caption.captioners.image_encoder import CaptionerImage
from rl_caption.data.base import Row, Splits
from rl_caption.data.scenes import ScenesData

_RELATION = re.compile(r"\b(left|right|above|over|below|beneath|under)\b")


class RelationScenes(Splits):
    """The scenes of ``ScenesData`` of which something tells a relation; their references are what does.

    That is those of their short captions and those sentences of their long description, without anaphora.

    Args:
        num_train: scenes looked at, of which about half have a relation; likewise ``num_val``.
        captions_per_image: short captions of a scene that are looked at, 1 to 20.
    """

    def __init__(self, num_train: int = 60000, num_val: int = 800, captions_per_image: int = 12) -> None:
        scenes = ScenesData(num_train, num_val, 0, 0, captions_per_image=captions_per_image)
        rows = {}
        for split in ("train", "val"):
            told: list[Row] = []
            for row in scenes.split(split):
                sentences = [sentence.rstrip(".") + "." for sentence in row["long_reference"].split(". ")]
                if texts := [text for text in [*row["references"], *sentences] if _RELATION.search(text)]:
                    told.append({**row, "references": texts})
            rows[split] = told
        super().__init__(rows, "generated scenes with relations")


class WideCaptionerImage(CaptionerImage):
    """``CaptionerImage`` with an MLP on every patch, to ``width`` values, of which a dual encoder takes the mean.

    A mean over patches knows where a thing is only if some of its values stand for that thing at that place.
    """

    def __init__(self, model: str, pretrained: bool = True, width: int = 512) -> None:
        super().__init__(model, pretrained)
        states = self.built_from[0].d_model
        self.mlp = nn.Sequential(nn.LayerNorm(states), nn.Linear(states, width), nn.GELU(), nn.Linear(width, width))
        self.skip = nn.Linear(states, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, S, S] -> states [B, H, W, ``width``]."""
        states = super().forward(pixels)
        return self.skip(states) + self.mlp(states)
