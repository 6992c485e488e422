"""Generated scenes of which a caption tells a relation, and a wider image encoder: what it takes to learn relations.

docs/results_composition.md ("Binding and relations") has the configurations.
"""

import re
from itertools import islice

from torch import Tensor, nn

from rl_caption.captioners.image_encoder import CaptionerImage
from rl_caption.data.base import Row, Splits
from rl_caption.data.scenes import ScenesData

_RELATION = re.compile(r"\b(left|right|above|over|below|beneath|under)\b")


class RelationScenes(Splits):
    """The first scenes of ``ScenesData`` of which something tells a relation; their references are what does.

    That is those of their short captions and those sentences of their long description.

    Args:
        num_train: scenes with a relation, about one in two; likewise ``num_val``.
        captions_per_image: short captions of a scene that are looked at, 1 to 20.
    """

    def __init__(self, num_train: int = 30829, num_val: int = 403, captions_per_image: int = 12) -> None:
        sizes = {"train": num_train, "val": num_val}
        scenes = ScenesData(4 * num_train + 20, 4 * num_val + 20, 0, 0, captions_per_image=captions_per_image)
        told = {split: filter(None, map(_with_relations, scenes.split(split))) for split in sizes}
        super().__init__({split: list(islice(told[split], sizes[split])) for split in sizes}, "scenes with relations")


def _with_relations(row: Row) -> Row | None:
    sentences = [sentence.rstrip(".") + "." for sentence in row["long_reference"].split(". ")]
    texts = [text for text in [*row["references"], *sentences] if _RELATION.search(text)]
    return {**row, "references": texts} if texts else None


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
