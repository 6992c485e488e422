"""L-CLIPScore and RefL-CLIPScore: CLIPScore and RefCLIPScore under a distilled, lightweight dual encoder.

Source: the L-CLIPScore paper. Formulas, w = 2.5 and the zero case are those of ``rewards.clip.clipscore``.

Prefix: the paper does not say whether captions get CLIPScore's "A photo depicts ". The default here is none, because
the students are distilled on bare captions (in the released code as well), so that a prefix would ask them about
texts they have not seen; ``prefix="A photo depicts "`` gives the other reading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewards.clip.clipscore import ClipScore, RefClipScore
from rewards.clip.encoder import EncoderSource, passes_on


class LClipScore(ClipScore):
    """L-CLIPScore: 2.5 * max(cos(image, caption), 0) under a student of this package; no references."""

    __name__ = "l_clipscore"

    @passes_on(ClipScore)
    def __init__(self, backbone: EncoderSource, *, prefix: str = "", **arguments: Any) -> None:
        """Load the student.

        Args:
            backbone: folder of a student (``LCLIP.save_pretrained``), or an encoder that is loaded already.
            prefix: put before captions; none by default, see the module.
            **arguments: as for ``ClipScore``.

        Raises:
            ValueError: the folder does not exist or holds no student, or an argument is wrong.
        """
        super().__init__(_student(backbone), prefix=prefix, **arguments)


class RefLClipScore(RefClipScore):
    """RefL-CLIPScore: harmonic mean of L-CLIPScore and the best cosine to a reference, in [0, 10/7] for w = 2.5."""

    __name__ = "ref_l_clipscore"

    @passes_on(RefClipScore)
    def __init__(self, backbone: EncoderSource, *, prefix: str = "", **arguments: Any) -> None:
        """Load the student.

        Args:
            backbone, prefix: as for ``LClipScore``.
            **arguments: as for ``RefClipScore``.

        Raises:
            ValueError: as for ``LClipScore``.
        """
        super().__init__(_student(backbone), prefix=prefix, **arguments)


def _student(backbone: EncoderSource) -> EncoderSource:
    if isinstance(backbone, str | Path):
        if not Path(backbone).is_dir():
            raise ValueError(
                f"student folder {str(backbone)!r} does not exist: expected one that LCLIP.save_pretrained made"
            )
        if (Path(backbone) / "open_clip_config.json").is_file():
            raise ValueError(
                f"{str(backbone)!r} holds an open_clip model, no student: score with it as clipscore or ref_clipscore"
            )
    return backbone
