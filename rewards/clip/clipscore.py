"""CLIPScore and RefCLIPScore: how well a caption fits its image, and its references, in
a joint embedding space.

Source: Hessel et al., "CLIPScore: A Reference-free Evaluation Metric for Image
Captioning", EMNLP 2021, section 3. Captions and references are embedded as they were
written, without PTB tokenisation.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.base import (
    as_texts,
    checked_scores,
    passes_on,
    reference_lists,
    required_column,
)
from rewards.clip.encoder import EmbeddingCache, EncoderOptions, EncoderSource

PREFIX = "A photo depicts "
Floats = NDArray[np.floating[Any]]


def harmonic_mean(scores: Floats, agreements: Floats) -> Floats:
    """Compute 2ab / (a + b) of scores a [N] and agreements b [N]; 0 where a + b is 0,
    which the formula leaves open.
    """
    total = scores + agreements
    none = np.zeros_like(total)
    return np.divide(2 * scores * agreements, total, out=none, where=total != 0)


class ClipScore:
    """CLIPScore: 2.5 * max(cos(image, caption), 0) under a frozen dual encoder; no references.

    The image may be several frames of a video, whose embeddings are averaged
    (``CachedEncoder``). Source: Hessel et al., EMNLP 2021, section 3. The released
    example's good captions have the mean 0.858, its bad ones 0.715.

    Args:
        backbone, pretrained, **encoder: fields of ``EncoderOptions``. ``pretrained`` is
            ``openai`` for the default backbone.
        prefix: put before captions and references, as in the paper; "" or None for none.
        w: scale, above 0; 2.5 in the paper.

    Raises:
        ValueError: an argument is wrong, or the weights cannot be found or loaded.
    """

    __name__ = "clipscore"
    columns = frozenset({"image"})
    bounds = (0.0, 2.5)
    lowest = 0.0
    """Lower end of the range that the best cosine to a reference is clipped to."""

    @passes_on(EncoderOptions)
    def __init__(
        self,
        backbone: EncoderSource = "ViT-B-32",
        pretrained: str | None = None,
        *,
        prefix: str | None = PREFIX,
        w: float = 2.5,
        **encoder: Any,
    ) -> None:
        from rewards.clip.backbone import load_encoder  # imports torch

        if not (math.isfinite(w) and w > 0):
            raise ValueError(f"w = {w}: expected a number above 0")
        if str(backbone) == "ViT-B-32" and pretrained is None:
            pretrained = "openai"
        options = EncoderOptions(backbone, pretrained, **encoder)
        self.backbone = load_encoder(options)
        self.prefix = prefix or ""
        self.w = float(w)
        self.bounds = (0.0, self.w)
        self.signature = f"{self.__name__}[{self.backbone.signature},prefix={self.prefix!r},w{self.w:g}]"
        self._references = EmbeddingCache(
            self.backbone.encoder.fingerprint, None, options.cache_references
        )

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``image`` and, where ``columns`` names it, ``references``.

        Raises:
            RewardError: a column is missing or has another length, an image is missing
                or unreadable, a row has no reference, or a caption is too long and
                ``truncate`` is off.
        """
        texts = as_texts(completions)
        images = required_column(columns, "image", self.__name__, len(texts))
        references: list[tuple[str, ...]] = []
        if "references" in self.columns:
            references = reference_lists(columns, self.__name__, len(texts))
        scores = self._score_rows(texts, images, references) if texts else []
        return checked_scores(self, scores, len(texts))

    def _score_rows(
        self,
        texts: list[str],
        images: Sequence[Any],
        references: list[tuple[str, ...]],
    ) -> Sequence[float]:
        """Scores of N captions, N at least 1; ``references`` is empty where no column has them."""
        captions = self.embed_texts(texts)
        scores = self.scores(_cosines(captions, self.backbone.embed_images(images)))
        if not references:
            return scores.tolist()
        written = [self.prefix + text for row in references for text in row]
        embedded = self._references.embed(
            written, self.backbone.embed_texts, str, "reference"
        )
        counts = [len(row) for row in references]  # at least 1 each
        cosines = _cosines(np.repeat(captions, counts, axis=0), embedded)
        best = np.maximum.reduceat(cosines, np.cumsum([0, *counts[:-1]]))
        return harmonic_mean(scores, np.clip(best, self.lowest, 1.0)).tolist()

    def scores(self, cosines: Floats) -> Floats:
        """Scores of image-caption cosines [N]: w * max(cosine, 0), in [0, w]."""
        return self.w * np.clip(cosines, 0.0, 1.0)

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Embed N captions with the prefix, equal ones once: [N, D] of length 1."""
        distinct = list(dict.fromkeys(texts))
        rows = {text: row for row, text in enumerate(distinct)}
        embeddings = self.backbone.embed_texts(
            [self.prefix + text for text in distinct]
        )
        return embeddings[[rows[text] for text in texts]]


class RefClipScore(ClipScore):
    """RefCLIPScore: harmonic mean of CLIPScore and the best cosine to a reference, in
    [0, 10/7] for w = 2.5.

    The paper clips the best cosine at 0, the released code does not. Clipping is the
    default: without it a caption that contradicts all references gets a negative or,
    near a + b = 0, an unbounded score, which no policy should learn from. Where the
    best cosine is positive, both scores are equal. Source: Hessel et al., EMNLP 2021,
    section 3.

    Args:
        backbone, pretrained, **arguments: as for ``ClipScore``.
        clip_references: clip the best cosine to a reference at 0 (paper); False does
            not (released code).
    """

    __name__ = "ref_clipscore"
    columns = frozenset({"image", "references"})
    bounds = (0.0, 10 / 7)

    @passes_on(ClipScore)
    def __init__(
        self,
        backbone: EncoderSource = "ViT-B-32",
        pretrained: str | None = None,
        *,
        clip_references: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(backbone, pretrained, **arguments)
        clipped = "clipped"
        # At most the harmonic mean of w and 1.
        self.bounds = (0.0, 2 * self.w / (1 + self.w))
        if not clip_references:  # a + b may be arbitrarily close to 0
            clipped = "unclipped"
            self.lowest = -1.0
            self.bounds = (-math.inf, math.inf)
        self.signature = f"{self.signature[:-1]},{clipped} references]"


def _cosines(left: Floats, right: Floats) -> Floats:
    """Row-wise cosines [N] of embeddings [N, D] and [N, D] of length 1."""
    return (left.astype(np.float64) * right.astype(np.float64)).sum(axis=1)
