"""Self-retrieval: a caption is good if it finds its image among others in a joint embedding space.

Sources: Luo et al., "Discriminability objective for training descriptive captions", CVPR 2018, and
Liu et al., "Show, Tell and Discriminate: Image Captioning by Self-retrieval with Partially Labeled
Data", ECCV 2018 (``margin``, the caption finds its image); Dessì et al., "Cross-Domain Image
Captioning with Discriminative Finetuning", CVPR 2023 (``log_softmax``, and distractors that are
near).
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rewards.base import RewardError, passes_on
from rewards.clip.clipscore import ClipScore, Floats
from rewards.clip.encoder import Embeddings, EncoderOptions, EncoderSource
from rewards.devices import is_main_process
from rewards.images import list_images
from rewards.options import Count, check_values

logger = logging.getLogger(__name__)
Score = Literal["log_softmax", "recall", "margin"]
TIE = 1e-6
"""Cosines nearer than this are tied; images whose cosine is nearer to 1 are one image."""
_CHUNK = 16


def retrieval_scores(
    targets: Floats,
    others: Floats,
    score: Score = "log_softmax",
    scale: float = 100.0,
    margin: float = 0.2,
    k: int = 1,
) -> Floats:
    """Scores [N] of N queries that should find their target, whose cosine is ``targets`` [N], among
    M distractors.

    With s the cosine to the target and s_j those to the distractors, ``others`` [N, M] (-inf means
    no distractor):

        log_softmax       scale · s - ln(exp(scale · s) + Σ_j exp(scale · s_j))
        recall            1 where the rank of the target is at most k, else 0 (R@k)
        margin            -max(0, margin - s + max_j s_j)

    For ties (cosines within ``TIE``), recall is the probability of a hit over random orders.
    Without any distractor, the three scores are 0, 1 and 0.
    """
    gaps = others - targets[:, None]
    hardest = gaps.max(axis=1, initial=-np.inf)
    if score == "log_softmax":
        top = scale * np.maximum(hardest, 0.0)
        return -(top + np.log(np.exp(-top) + np.exp(scale * gaps - top[:, None]).sum(axis=1)))
    if score == "margin":
        return -np.maximum(0.0, margin + hardest)
    better = (gaps > TIE).sum(axis=1)
    tied = (np.abs(gaps) <= TIE).sum(axis=1)
    return np.clip((k - better) / (1 + tied), 0.0, 1.0)


class Retrieval(ClipScore):
    """Self-retrieval: how well a caption finds its image among others under a frozen dual encoder;
    no references.

    The other images are the distinct ones (by ``image_id``) of the call or, with ``pool``, those of
    a folder. Captions of one image are never each other's distractors, and neither are images with
    equal embeddings. In training, a call has the images of one micro-batch of one process, greedy
    captions included, so without ``pool`` scores depend on ``train.micro_batch_size``. A caption
    without a distractor gets the upper bound, and a warning is logged.

    Args:
        backbone, pretrained, **encoder: as for ``ClipScore``.
        score: of ``retrieval_scores``.
        scale: of ``log_softmax``, above 0 and at most 300; CLIP's is 100.
        margin: of ``margin``, at least 0; 0.2 in Luo et al.
        k: of ``recall``, at least 1.
        distractors: use only this many nearest images, at least 1; None uses all. Ties are in the
            order of the pool.
        pool: folder of images, without subfolders; embedded at the first call.
        prefix: put before captions.

    Raises:
        ValueError: an argument is wrong, the folder has no image, or the weights cannot be found or
            loaded.
    """

    __name__ = "retrieval"
    columns = frozenset({"image", "image_id"})
    bounds = (-math.inf, 0.0)

    @passes_on(EncoderOptions)
    def __init__(
        self,
        backbone: EncoderSource = "ViT-B-32",
        pretrained: str | None = None,
        *,
        score: Score = "log_softmax",
        scale: float = 100.0,
        margin: float = 0.2,
        k: int = 1,
        distractors: int | None = None,
        pool: str | Path | None = None,
        prefix: str = "",
        **encoder: Any,
    ) -> None:
        check_values(Score, score=score)
        check_values(Count, k=k)
        check_values(Count | None, distractors=distractors)
        if not 0 < scale <= 300 or not (0 <= margin < math.inf):
            raise ValueError(
                f"scale = {scale}, margin = {margin}: expected a scale in (0, 300] and a margin of "
                f"0 or more"
            )
        self.pool = None
        others = "call"
        if pool is not None:
            self.pool = list(list_images(Path(pool), recursive=False))
            if not self.pool:
                raise ValueError(f"pool {str(pool)!r} has no image")
            sizes = "\n".join(f"{file.name} {file.stat().st_size}" for file in self.pool)
            digest = hashlib.blake2b(sizes.encode(), digest_size=4).hexdigest()
            others = f"{Path(pool).name}:{len(self.pool)}:{digest}"
        super().__init__(backbone, pretrained, prefix=prefix, w=1.0, **encoder)
        self.score, self.scale, self.margin, self.k = score, float(scale), float(margin), k
        self.distractors = distractors
        self._pool_embeddings: Embeddings | None = None
        least = -math.inf
        if distractors is not None:
            least = -float(np.logaddexp(0, math.log(distractors) + 2 * self.scale))
        self.bounds, option = {
            "log_softmax": ((least, 0.0), f",scale{self.scale:g}"),
            "margin": ((-(2 + self.margin), 0.0), f"{self.margin:g}"),
            "recall": ((0.0, 1.0), f"@{k}"),
        }[score]
        nearest = f"{'all' if distractors is None else f'nearest {distractors}'} of {others}"
        which = f"{score}{option},{nearest},prefix={self.prefix!r}"
        self.signature = f"{self.__name__}[{self.backbone.signature},{which}]"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the embeddings of the pool."""
        return {**self.__dict__, "_pool_embeddings": None}

    def _score_rows(
        self,
        texts: list[str],
        images: Sequence[Any],
        references: list[tuple[str, ...]],
        ids: Sequence[Any],
    ) -> Sequence[float]:
        first: dict[Any, int] = {}
        for row, image_id in enumerate(ids):
            first_row = first.setdefault(image_id, row)
            if images[row] is not images[first_row] and images[row] != images[first_row]:
                raise RewardError(f"{self.__name__}: two images have the image_id {image_id!r}")
        number = dict(zip(first, range(len(first)), strict=True))
        owners = np.array([number[image_id] for image_id in ids])
        captions = self.embed_texts(texts)
        embedded = self.backbone.embed_images([images[row] for row in first.values()])
        if self.pool is not None and self._pool_embeddings is None:
            self._pool_embeddings = self.backbone.embed_images(self.pool)
        pool = embedded if self._pool_embeddings is None else self._pool_embeddings
        scores = np.empty(len(texts))
        alone = 0
        for rows, is_distractor in self._distractors(embedded, pool, owners):
            alone += len(np.unique(owners[rows[~is_distractor.any(axis=1)]]))
            own = embedded[owners[rows]]
            targets = np.clip((captions[rows].astype(np.float64) * own).sum(axis=1), -1.0, 1.0)
            cosines = np.clip((captions[rows] @ pool.T).astype(np.float64), -1.0, 1.0)
            others = np.where(is_distractor, cosines, -np.inf)
            scores[rows] = retrieval_scores(
                targets, others, self.score, self.scale, self.margin, self.k
            )
        if alone and not self._warned:
            self._warned = True
            if is_main_process():
                logger.warning(
                    "%s: %d of %d images of a call have no distractor, so their captions get the "
                    "highest score: raise train.micro_batch_size, or set pool",
                    self.__name__,
                    alone,
                    len(first),
                )
        return scores.tolist()

    def _distractors(
        self, embedded: Embeddings, pool: Embeddings, owners: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """For the B images by chunks: the rows [R] of their captions, and for each which of the P
        images of the pool are its distractors [R, P].
        """
        for start in range(0, len(embedded), _CHUNK):
            near = embedded[start : start + _CHUNK] @ pool.T
            others = near < 1 - TIE
            if self.pool is None:
                others[np.arange(len(near)), start + np.arange(len(near))] = False
            if self.distractors is not None and self.distractors < len(pool):
                order = np.argsort(np.where(others, -near, np.inf), axis=1, kind="stable")
                kept = np.zeros_like(others)
                np.put_along_axis(kept, order[:, : self.distractors], True, axis=1)
                others &= kept
            (rows,) = np.nonzero((owners >= start) & (owners < start + _CHUNK))
            yield rows, others[owners[rows] - start]
