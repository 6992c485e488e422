"""L-CLIPScore and RefL-CLIPScore: CLIPScore and RefCLIPScore under a distilled,
lightweight dual encoder (L-CLIP).

Source: the L-CLIPScore paper. It does not say whether captions get CLIPScore's prefix;
its authors' scoring code, in branches other than ``main``, puts "A photo depicts"
before captions and references, which ``prefix="A photo depicts "`` reproduces. The
default is none: students are distilled on bare captions, in the authors' code as well.
"""

from typing import Any

from rewards.base import passes_on
from rewards.clip.clipscore import ClipScore, RefClipScore
from rewards.clip.encoder import EncoderSource


class LClipScore(ClipScore):
    """L-CLIPScore: 2.5 * max(cos(image, caption), 0) under a student of this package;
    no references.

    Args:
        backbone: folder of a student (``LCLIP.save_pretrained``), or a loaded encoder.
        prefix, **arguments: as for ``ClipScore``.

    Raises:
        ValueError: the folder does not exist or holds no model, or an argument is wrong.
    """

    __name__ = "l_clipscore"

    @passes_on(ClipScore)
    def __init__(
        self, backbone: EncoderSource, *, prefix: str = "", **arguments: Any
    ) -> None:
        super().__init__(backbone, prefix=prefix, **arguments)


class RefLClipScore(LClipScore, RefClipScore):
    """RefL-CLIPScore: harmonic mean of L-CLIPScore and the best cosine to a reference,
    in [0, 10/7] for w = 2.5.

    Arguments as for ``LClipScore`` and ``RefClipScore``.
    """

    __name__ = "ref_l_clipscore"

    @passes_on(LClipScore, RefClipScore)
    def __init__(self, backbone: EncoderSource, **arguments: Any) -> None:
        super().__init__(backbone, **arguments)
