"""What the text tower of a dual encoder sees by itself: a score for ``judge`` that needs references and no image.

    python scripts/judge.py --set sugarcrepe --data DIR --metrics rouge,cider --out OUT \
        --judges.text.target benchmarks.studies.text_similarity:TextSimilarity --judges.text.kwargs.backbone MODEL
"""

from typing import Any

import numpy as np

from rewards.base import as_texts
from rewards.clip.backbone import load_frozen_encoder


class TextSimilarity:
    """Mean cosine of a caption's embedding with those of its references, in [-1, 1].

    Args:
        backbone: folder or name of a dual encoder (docs/clipscore.md).
        device: where its text encoder runs.

    Raises:
        ValueError: there is no such model.
    """

    __name__ = "text_similarity"
    columns = frozenset({"references"})
    bounds = (-1.0, 1.0)

    def __init__(self, backbone: str, device: str = "cpu") -> None:
        self.backbone = load_frozen_encoder(backbone, device=device)
        self.signature = f"text_similarity[{self.backbone.signature}]"

    def __call__(
        self, prompts: Any, completions: Any, references: list[list[str]], **_: Any
    ) -> list[float]:
        captions = as_texts(completions)
        texts = sorted({*captions, *(text for own in references for text in own)})
        embedded = dict(zip(texts, self.backbone.encode_texts(texts).double().numpy(), strict=True))
        return [
            float(np.mean([embedded[caption] @ embedded[text] for text in own]))
            for caption, own in zip(captions, references, strict=True)
        ]
