"""PAC-S and RefPAC-S: CLIPScore's equations with w = 2 under a CLIP that was tuned on positive-augmented pairs.

Sources: Sarto et al., "Positive-Augmented Contrastive Learning for Image and Video Captioning Evaluation", CVPR 2023;
for PAC-S++, with low-rank updates of both towers, Sarto et al., "Positive-Augmented Contrastive Learning for
Vision-and-Language Evaluation and Training", IJCV 2025. Captions and references are embedded as they were written,
after CLIPScore's prefix; no PTB tokens are made of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rewards.clip.clipscore import PREFIX, ClipScore, RefClipScore, load_encoder
from rewards.clip.encoder import CachedEncoder, DualEncoder

if TYPE_CHECKING:
    from rewards.clip.tuned import MlpDeltas


class PacScore(ClipScore):
    """PAC-S: 2 * max(cos(image, caption), 0) under a positive-augmented CLIP; no references.

    Source: Sarto et al., CVPR 2023. The released example's good captions have the mean 0.8264, its bad ones 0.5772.
    """

    __name__ = "pac_s"
    bounds = (0.0, 2.0)

    def __init__(
        self,
        backbone: str | Path | DualEncoder | CachedEncoder | None = None,
        pretrained: str | None = None,
        tuned_from: str | None = None,
        mlp_deltas: MlpDeltas = "ignored",
        prefix: str = PREFIX,
        w: float = 2.0,
        device: str | None = None,
        precision: str = "fp32",
        batch_size: int = 64,
        truncate: bool = True,
        cache_dir: str | Path | None = None,
        cache_images: int | None = None,
        cache_references: int | None = None,
        context_length: int | None = None,
    ) -> None:
        """Load the dual encoder. There is no default: without weights that were tuned for it, it would not be PAC-S.

        Args:
            backbone: architecture of open_clip, with ``pretrained``; None is what the released file of that name has.
                Or a folder that has its own weights, or an encoder that is loaded already, which several rewards may
                share.
            pretrained: checkpoint file: ``clip_ViT-B-32.pth`` or another of ``RELEASED``, or one in the same form.
            tuned_from: tag of open_clip for the weights that the file was tuned from, which decides activation and
                preprocessing; None for released files under their own names.
            mlp_deltas: low-rank updates of MLPs, in files of PAC-S++: ``ignored``, as the released scorer does, or
                ``added`` as all others (``rewards.clip.tuned``).
            w: scale, above 0; 2 in the paper.
            prefix, device, precision, batch_size, truncate, cache_dir, cache_images, cache_references, context_length:
                as for ``ClipScore``.

        Raises:
            ValueError: there is no such file, it is not said what it was tuned from, it does not fit the architecture,
                or an argument is wrong.
        """
        if backbone is None or isinstance(backbone, str | Path):
            backbone = _tuned_encoder(
                backbone, pretrained, tuned_from, mlp_deltas, device, precision, batch_size, truncate, context_length
            )
        super().__init__(
            backbone, prefix=prefix, w=w, cache_dir=cache_dir, cache_images=cache_images,
            cache_references=cache_references,
        )  # fmt: skip


class RefPacScore(RefClipScore):
    """RefPAC-S: harmonic mean of PAC-S and the best cosine to a reference, in [0, 4/3] for w = 2.

    That cosine is clipped at 0, as in RefCLIPScore and for its reason; PAC-S's released code does not clip it, and has
    no value where a + b is 0. Where the best cosine is positive, both are equal.

    Source: Sarto et al., CVPR 2023. The released example's good captions have the mean 0.8393, its bad ones 0.6357.
    """

    __name__ = "ref_pac_s"
    bounds = (0.0, 4 / 3)

    def __init__(
        self,
        backbone: str | Path | DualEncoder | CachedEncoder | None = None,
        pretrained: str | None = None,
        tuned_from: str | None = None,
        mlp_deltas: MlpDeltas = "ignored",
        prefix: str = PREFIX,
        w: float = 2.0,
        clip_references: bool = True,
        device: str | None = None,
        precision: str = "fp32",
        batch_size: int = 64,
        truncate: bool = True,
        cache_dir: str | Path | None = None,
        cache_images: int | None = None,
        cache_references: int | None = None,
        context_length: int | None = None,
    ) -> None:
        """Load the dual encoder.

        Args:
            backbone, pretrained, tuned_from, mlp_deltas, w: as for ``PacScore``.
            prefix, clip_references, device, precision, batch_size, truncate, cache_dir, cache_images, cache_references,
                context_length: as for ``RefClipScore``.

        Raises:
            ValueError: as for ``PacScore``.
        """
        if backbone is None or isinstance(backbone, str | Path):
            backbone = _tuned_encoder(
                backbone, pretrained, tuned_from, mlp_deltas, device, precision, batch_size, truncate, context_length
            )
        super().__init__(
            backbone, prefix=prefix, w=w, clip_references=clip_references, cache_dir=cache_dir,
            cache_images=cache_images, cache_references=cache_references,
        )  # fmt: skip


def _tuned_encoder(
    backbone: str | Path | None,
    pretrained: str | None,
    tuned_from: str | None,
    mlp_deltas: MlpDeltas,
    device: str | None,
    precision: str,
    batch_size: int,
    truncate: bool,
    context_length: int | None,
) -> DualEncoder:
    """Load a folder, or a file after what is known of it."""
    from rewards.clip.tuned import RELEASED  # imports torch

    if backbone is None or not Path(backbone).is_dir():
        if pretrained is None or not Path(pretrained).is_file():
            given = "is not given" if pretrained is None else f"is {str(pretrained)!r}, which is no file"
            raise ValueError(
                f"'pretrained' {given}: PAC-S needs a checkpoint that was tuned for it, such as clip_ViT-B-32.pth or "
                "openClip_ViT-L-14.pth; the repository aimagelab/pacscore says where they are"
            )
        architecture, tag = RELEASED.get(Path(pretrained).name, (None, None))
        backbone, tuned_from = backbone or architecture, tuned_from or tag
        if backbone is None or tuned_from is None:
            raise ValueError(
                f"what {str(pretrained)!r} was tuned from is not known by its name (known: {', '.join(RELEASED)}): say "
                "'backbone' and 'tuned_from', such as ViT-B-32 and openai, which decide activation and preprocessing"
            )
    return load_encoder(
        str(backbone), pretrained, device, precision, batch_size, truncate, context_length, tuned_from, mlp_deltas
    )
