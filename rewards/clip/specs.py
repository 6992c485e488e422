"""SPECS: cosine of an image and a long caption under a dual encoder that was trained
for specificity.

Source: Chen et al., "Specificity-Enhanced CLIP-Score for Long Image Caption Evaluation"
(SPECS), EMNLP 2025, section 3; its released code for ``scale="shifted"``. Captions go
to CLIP's BPE as they are: no prefix, no PTB tokenisation.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rewards.base import RewardError, passes_on
from rewards.clip.clipscore import ClipScore, Floats
from rewards.clip.encoder import EncoderOptions, EncoderSource
from rewards.options import check_values

Scale = Literal["clipped", "shifted"]


class Specs(ClipScore):
    """SPECS: cosine of image and long caption under a specificity-tuned dual encoder;
    no references.

    Args:
        backbone: folder that ``reward_model`` exported, or another backbone of
            ``EncoderOptions``, such as ``ViT-B-32`` with ``pretrained: spec.pt``.
        pretrained: checkpoint file, with an architecture.
        scale: ``clipped`` at 0 (paper), or ``shifted`` to (cosine + 1) / 2 (released
            code). None is ``shifted`` for a file in the layout of the released weights,
            whose cosines are often negative, else ``clipped``.
        truncate: cut captions above the encoder's context; False raises.
        **encoder: the other fields of ``EncoderOptions``.

    Raises:
        ValueError: an argument is wrong, or the weights cannot be found or loaded.
    """

    __name__ = "specs"
    bounds = (0.0, 1.0)

    @passes_on(EncoderOptions)
    def __init__(
        self,
        backbone: EncoderSource,
        pretrained: str | None = None,
        *,
        scale: Scale | None = None,
        truncate: bool = False,
        **encoder: Any,
    ) -> None:
        if scale is not None:
            check_values(Scale, scale=scale)
        super().__init__(
            backbone, pretrained, prefix="", w=1.0, truncate=truncate, **encoder
        )
        released = getattr(self.backbone.encoder, "long_layout", False)
        self.scale: Scale = scale or ("shifted" if released else "clipped")
        self.truncate = truncate
        cut = ",truncate" if truncate else ""
        self.signature = f"{self.__name__}[{self.backbone.signature},{self.scale}{cut}]"

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """As ``ClipScore.embed_texts``. ``RewardError`` for a caption that would be cut."""
        encoder = self.backbone.encoder
        for text in () if self.truncate else texts:
            count = encoder.count_tokens(text)
            if count > encoder.context_length:
                raise RewardError(
                    f"reward {self.__name__!r}: {self.backbone.signature} reads "
                    f"{encoder.context_length} tokens, {text!r:.80} has {count}: shorten it, or "
                    "set truncate: true"
                )
        return super().embed_texts(texts)

    def scores(self, cosines: Floats) -> Floats:
        """Scores in [0, 1] of image-caption cosines [N]: max(cosine, 0) (paper) or
        (cosine + 1) / 2 (released code).
        """
        scaled = cosines if self.scale == "clipped" else (cosines + 1) / 2
        return np.clip(scaled, 0.0, 1.0)
