"""Evaluation of K captions for each image: how diverse they are, and how good the best of k is.

Tokens are without EOS; CIDEr-D's document frequencies are of all given references,
one document an image, as in ``validation_cider``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewards.text.bleu import bleu_counts, bleu_of_counts
from rewards.text.cider import cider_d
from rewards.text.diversity import distinct_ngrams, self_cider, similarities
from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.evaluation.metrics import (
    EvaluationError,
    check_referenced,
    tokenize_references,
)


class BestOf(NamedTuple):
    """CIDEr-D of the first k captions of each image, averaged over images, in [0, 10].

    ``mean`` averages all k captions. ``best`` takes the caption with the highest score:
    the oracle, an upper bound of any choice. ``consensus`` takes the caption most
    similar to the other k - 1 by CIDEr-D, the first of equally similar captions.
    """

    mean: float
    best: float
    consensus: float


class SampleEvaluation(NamedTuple):
    """Result of ``evaluate_samples``."""

    metrics: dict[str, float]
    """``self-CIDEr``, ``mBLEU-4``, ``Div-1`` and ``Div-2``, each in [0, 1]."""
    best_of: list[BestOf]
    """For k = 1 to K."""


def evaluate_samples(
    samples: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[str]],
    tokenizer: str = TOKENIZER,
) -> SampleEvaluation:
    """Evaluate K >= 2 captions of each image.

    - ``self-CIDEr``, ``Div-n`` (``rewards.text.diversity``): means over images. Higher
      is more diverse.
    - ``mBLEU-4``: corpus BLEU-4 of the i-th captions with the others of their images as references,
      mean over i (Shetty et al. 2017). Lower is more diverse.
    - ``best_of``: the choice by consensus follows Devlin et al., "Exploring Nearest
      Neighbor Approaches for Image Captioning", 2015, but among the samples themselves.

    ``samples`` is image id -> K captions, as the model wrote them, in the order in
    which they were sampled; ``references`` image id -> captions that people wrote,
    where images without samples count in document frequencies; ``tokenizer`` is one of
    ``rewards.text.tokenize.TOKENIZERS``. ``EvaluationError`` where an image has another
    number of captions than the first or fewer than two, or no reference, or fewer than
    two images have references.
    """
    check_referenced(samples, references)
    count = len(next(iter(samples.values()), ()))
    for image_id, texts in samples.items():
        if isinstance(texts, str) or len(texts) != count or count < 2:
            raise EvaluationError(
                f"the samples of image {image_id!r} are {texts!r:.80}: expected a list of at least "
                f"two captions, as many for every image ({count} for the first)"
            )
    written, df = tokenize_references(references, tokenizer)
    split = tokenizer_of(tokenizer)
    scores, diversity, matches, matrices = [], [], [], []
    for image_id, texts in samples.items():
        captions = list(map(split, texts))
        scores.append(cider_d(captions, [written[image_id]] * count, df))
        matrices.append(similarities(captions, df))
        distinct = distinct_ngrams(captions, 1), distinct_ngrams(captions, 2)
        diversity.append((self_cider(matrices[-1]), *distinct))
        others = [captions[:i] + captions[i + 1 :] for i in range(count)]
        matches.append(list(map(bleu_counts, captions, others)))
    names = "self-CIDEr", "Div-1", "Div-2"
    means = np.mean(diversity, axis=0).tolist()
    metrics = dict(zip(names, means, strict=True))
    bleu = [bleu_of_counts(row)[-1] for row in np.array(matches).sum(axis=0).tolist()]
    metrics["mBLEU-4"] = math.fsum(bleu) / count
    return SampleEvaluation(metrics, best_of(np.array(scores), np.stack(matrices)))


def best_of(
    scores: NDArray[np.float64], similarity: NDArray[np.float64]
) -> list[BestOf]:
    """``BestOf`` for k = 1 to K, of scores [N, K] of K captions of N images and their
    similarities [N, K, K].
    """
    means = []
    for k in range(1, scores.shape[1] + 1):
        first_scores, near = scores[:, :k], similarity[:, :k, :k]
        # Similarities to the others alone, sorted: in another order, rounding would tell equally
        # similar captions apart.
        others = np.sort(np.where(np.eye(k, dtype=bool), 0.0, near), axis=2)
        choice = others.sum(axis=2).argmax(axis=1)[:, None]
        chosen = np.take_along_axis(first_scores, choice, axis=1)
        of_k = (first_scores, first_scores.max(axis=1), chosen)
        means.append(BestOf(*(float(scores_of.mean()) for scores_of in of_k)))
    return means
