"""PAC-S and RefPAC-S: CLIPScore's equations with w = 2 under a CLIP that was tuned on
positive-augmented pairs.

Sources: Sarto et al., "Positive-Augmented Contrastive Learning for Image and Video
Captioning Evaluation", CVPR 2023; for PAC-S++, with low-rank updates of both towers,
Sarto et al., "Positive-Augmented Contrastive Learning for Vision-and-Language
Evaluation and Training", IJCV
2025. Captions and references are embedded as they were written, after CLIPScore's prefix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewards.base import passes_on
from rewards.clip.clipscore import ClipScore, RefClipScore
from rewards.clip.emscore import EmScore, RefEmScore
from rewards.clip.encoder import RELEASED, EncoderSource
from rewards.registry import ADDRESSES


class PacScore(ClipScore):
    """PAC-S: 2 * max(cos(image, caption), 0) under a positive-augmented CLIP; no references.

    Source: Sarto et al., CVPR 2023. The released example's good captions have the mean
    0.8264, its bad ones 0.5772.

    Args:
        backbone: an architecture of open_clip, with ``pretrained``; a folder that has
            its own weights; or a loaded encoder. It may be None for a released file
            under its own name. There is no default model, because the score is PAC-S
            only with weights that were tuned for it.
        pretrained: checkpoint file: ``clip_ViT-B-32.pth`` or another of ``RELEASED``,
            or one in the same format.
        tuned_from: as in ``EncoderOptions``; may be None for released files under their own names.
        w: scale, above 0; 2 in the paper.
        **arguments: as for ``ClipScore``.

    Raises:
        ValueError: the file does not exist or does not fit the architecture,
            ``tuned_from`` is missing, or an argument is wrong.
    """

    __name__ = "pac_s"
    bounds = (0.0, 2.0)

    @passes_on(ClipScore)
    def __init__(
        self,
        backbone: EncoderSource | None = None,
        pretrained: str | None = None,
        *,
        tuned_from: str | None = None,
        w: float = 2.0,
        **arguments: Any,
    ) -> None:
        super().__init__(
            **_tuned_source(backbone, pretrained, tuned_from), w=w, **arguments
        )


class RefPacScore(PacScore, RefClipScore):
    """RefPAC-S: harmonic mean of PAC-S and the best cosine to a reference, in [0, 4/3] for w = 2.

    The best cosine is clipped at 0, as in RefCLIPScore; PAC-S's released code does not
    clip it, and has no value where a + b is 0. Where the best cosine is positive, both
    scores are equal. Arguments as for ``PacScore`` and ``RefClipScore``.

    Source: Sarto et al., CVPR 2023. The released example's good captions have the mean
    0.8393, its bad ones 0.6357.
    """

    __name__ = "ref_pac_s"
    bounds = (0.0, 4 / 3)

    @passes_on(PacScore, RefClipScore)
    def __init__(self, backbone: EncoderSource | None = None, **arguments: Any) -> None:
        super().__init__(backbone, **arguments)


class PacVideoScore(EmScore):
    """PAC-S for video: EMScore under a positive-augmented CLIP; no references. Not scaled by w.

    Arguments as for ``PacScore`` and ``EmScore``. Source: Sarto et al., CVPR 2023,
    section 3.2; no code was released.
    """

    __name__ = "pac_s_video"

    @passes_on(EmScore)
    def __init__(
        self,
        backbone: EncoderSource | None = None,
        pretrained: str | None = None,
        *,
        tuned_from: str | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**_tuned_source(backbone, pretrained, tuned_from), **arguments)


class RefPacVideoScore(PacVideoScore, RefEmScore):
    """RefPAC-S for video: (PAC-S of the video + best PAC-S of a reference) / 2.
    Arguments as for ``PacVideoScore``.
    """

    __name__ = "ref_pac_s_video"


def _tuned_source(
    backbone: EncoderSource | None, pretrained: str | None, tuned_from: str | None
) -> dict[str, Any]:
    """The three arguments, completed by what is known of a released file."""
    file = Path(pretrained or "")
    architecture, tag = RELEASED.get(file.name, (None, None))
    backbone = backbone or architecture
    tuned_from = tuned_from or tag
    has_weights = (
        not isinstance(backbone, str | Path | None) or Path(backbone or "x").is_dir()
    )
    if not has_weights and not (file.is_file() and backbone and tuned_from):
        released = ", ".join(f"{name} at {ADDRESSES[name]}" for name in RELEASED)
        raise ValueError(
            f"'pretrained' is {pretrained!r}, 'backbone' {backbone!r} and 'tuned_from' "
            f"{tuned_from!r}: PAC-S needs a checkpoint file that was tuned for it. Released: "
            f"{released}; files of other names need 'backbone' and 'tuned_from', such as ViT-B-32 "
            "and openai"
        )
    return {"backbone": backbone, "pretrained": pretrained, "tuned_from": tuned_from}
