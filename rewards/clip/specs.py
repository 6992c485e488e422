"""SPECS: cosine of an image and a long caption under a dual encoder that was trained for
specificity.

Source: Chen et al., "Specificity-Enhanced CLIP-Score for Long Image Caption Evaluation" (SPECS),
EMNLP 2025, section 3; its released code for ``scale="shifted"``. Captions go to CLIP's BPE as they
are: no prefix, no PTB tokenisation.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rewards.base import RewardError, as_texts, passes_on
from rewards.clip.clipscore import ClipScore, Floats
from rewards.clip.encoder import EncoderOptions, EncoderSource
from rewards.devices import is_main_process
from rewards.options import check_values

logger = logging.getLogger(__name__)
Scale = Literal["clipped", "shifted"]


def specs_score(cosines: Floats, scale: Scale = "clipped") -> Floats:
    """Scores in [0, 1] of image-caption cosines [N]: max(cosine, 0) (paper) or (cosine + 1) / 2
    (released code).
    """
    scores = cosines if scale == "clipped" else (cosines + 1) / 2
    return np.clip(scores, 0.0, 1.0)


class Specs(ClipScore):
    """SPECS: cosine of image and long caption under a specificity-tuned dual encoder; no
    references.

    Args:
        backbone: folder that ``reward_model`` exported, or another of ``EncoderOptions``, such as
            ``ViT-B-32`` with ``pretrained: spec.pt``.
        pretrained: checkpoint file, with an architecture.
        scale: ``clipped`` at 0 (paper), or ``shifted`` to (cosine + 1) / 2 (released code). None is
            ``shifted`` for a file in the layout of the released weights, whose cosines are often
            negative, else ``clipped``.
        truncate: cut captions above the encoder's context; False raises and names the row.
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
        super().__init__(backbone, pretrained, prefix="", w=1.0, truncate=truncate, **encoder)
        released = getattr(self.backbone.encoder, "long_layout", False)
        self.scale: Scale = scale or ("shifted" if released else "clipped")
        self.truncate, self.clips = truncate, self.scale == "clipped"
        cut = ",truncate" if truncate else ""
        self.signature = f"{self.__name__}[{self.backbone.signature},{self.scale}{cut}]"
        if released and is_main_process():
            level = logging.WARNING if self.clips else logging.INFO
            why = "has the layout of released weights, whose cosines are often below 0"
            logger.log(level, "specs: %s %s; scale: %s", self.backbone.signature, why, self.scale)

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Return N scores in [0, 1]. Raises as ``ClipScore``."""
        texts = as_texts(completions)
        if not self.truncate:
            encoder = self.backbone.encoder
            longest = encoder.context_length - 2  # without start and end
            for row, text in enumerate(texts):
                if (tokens := encoder.count_tokens(text) - 2) > longest:
                    raise RewardError(
                        f"reward {self.__name__!r}: caption {row} has {tokens} tokens, its encoder "
                        f"({self.backbone.signature}) reads {longest}: {text!r:.80}. Shorten it, "
                        f"or set truncate: true"
                    )
        return super().__call__(prompts, texts, **columns)

    def _scores(self, cosines: Floats) -> Floats:
        return specs_score(cosines, self.scale)
