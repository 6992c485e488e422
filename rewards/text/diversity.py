"""Diversity of the captions of one image: Self-CIDEr, Div-n, and rewards for difference
and for similarity.

Sources: Wang and Chan, "Describing like Humans: on Diversity in Image Captioning", CVPR
2019 (Self-CIDEr); Shetty et al., "Speaking the Same Language: Matching Machine to Human
Captions by Adversarial Training", ICCV 2017 (Div-n). Similarities are CIDEr-D
(``rewards.text.cider``), where Wang and Chan take CIDEr: captions of different lengths
count as more different here.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.base import as_texts, checked_scores, eos_captions, required_column
from rewards.text.cider import CiderD, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.ngrams import Tokens, ngram_counts
from rewards.text.tokenize import TOKENIZER, tokenizer_of


def similarities(
    captions: Sequence[Tokens], df: DocumentFrequencies
) -> NDArray[np.float64]:
    """Return [K, K] CIDEr-D between K tokenised captions, divided by 10, mean of both
    directions; in [0, 1].
    """
    count = len(captions)
    scores = cider_d(
        [one for one in captions for _ in captions],
        [[other] for other in captions] * count,
        df,
    )
    matrix = np.array(scores).reshape(count, count) / 10
    return (matrix + matrix.T) / 2


def self_cider(matrix: NDArray[np.float64]) -> float:
    """Self-CIDEr of K >= 2 captions with similarities [K, K]: -ln(√λ_1 / Σ_i √λ_i) / ln
    K, in [0, 1].

    λ_1 is the largest eigenvalue; negative ones, which a similarity that is no inner
    product may have, count as 0. Equal captions give 0; captions without a common
    n-gram (and of equal norms) give 1; all-zero similarities (captions without a token)
    give 0.
    """
    roots = np.sqrt(np.clip(np.linalg.eigvalsh(matrix), 0.0, None))
    total = roots.sum()
    if not total:
        return 0.0
    return max(0.0, -math.log(roots[-1] / total) / math.log(len(roots)))


def distinct_ngrams(captions: Sequence[Tokens], n: int) -> float:
    """Div-n: number of distinct n-grams of order ``n`` in an image's captions over
    their number of words, in [0, 1].
    """
    words = sum(map(len, captions))
    ngrams = {ngram for one in captions for ngram in ngram_counts(one, n)}
    return sum(len(ngram) == n for ngram in ngrams) / max(words, 1)


def _weights(
    df: DocumentFrequencies | str | Path | None, eos: bool, tokenizer: str
) -> tuple[DocumentFrequencies, str]:
    """The document frequencies of a CIDEr-D, read and checked, and its signature."""
    cider = CiderD(df, eos, tokenizer=tokenizer)
    # Without document frequencies, no n-gram is in a document, and ln D is 1: every n-gram has the
    # weight 1.
    same = DocumentFrequencies.from_counts({}, 1.0, eos=eos)
    return (same if cider.df is None else cider.df), cider.signature


def _rows_by_image(ids: Sequence[Any]) -> list[list[int]]:
    """Rows of each image that has several captions."""
    groups: dict[Any, list[int]] = {}
    for row, image_id in enumerate(ids):
        groups.setdefault(image_id, []).append(row)
    return [rows for rows in groups.values() if len(rows) > 1]


class Diversity:
    """Difference of a caption from the other captions of its image in the call: 1 -
    CIDEr-D to them, in [0, 1].

    The CIDEr-D of a caption with the others as references is divided by its CIDEr-D
    with itself as reference, which is 10, and less for captions of under four tokens.
    So a caption that equals all others scores 0, however short it is. A caption without
    a token, or the only caption of its image in the call, scores 0. The corresponding
    measure of a whole set of captions is ``self_cider``.

    Args:
        df: document frequencies of the training split, or a file of them, as for
            ``CiderD``; None gives all n-grams the same weight.
        eos: append EOS as a token to captions whose column ``finished`` is true, or to
            all if there is no such column.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``.

    Raises:
        ValueError: ``df`` was counted with another EOS setting or tokenizer, or cannot be read.
    """

    __name__ = "diversity"
    columns = frozenset({"image_id"})
    bounds = (0.0, 1.0)

    def __init__(
        self,
        df: DocumentFrequencies | str | Path | None = None,
        eos: bool = True,
        tokenizer: str = TOKENIZER,
    ) -> None:
        self.df, cider = _weights(df, eos, tokenizer)
        self.tokenizer = tokenizer
        self._tokenize = tokenizer_of(tokenizer)
        self.eos = eos
        self.signature = f"diversity[{cider}]+{tokenizer}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``image_id``. Raises ``RewardError`` as
        ``required_column``.
        """
        texts = as_texts(completions)
        ids = required_column(columns, "image_id", self.__name__, len(texts))
        captions = [self._tokenize(text) for text in texts]
        ended = eos_captions(self, columns, len(texts))
        for tokens, finished in zip(captions, ended, strict=True):
            if finished:
                tokens.append(EOS)
        rows = []
        others = []
        for group in _rows_by_image(ids):
            rows += group
            for row in group:
                others.append([captions[other] for other in group if other != row])
        chosen = [captions[row] for row in rows]
        near = cider_d(chosen, others, self.df)
        equal = cider_d(chosen, [[caption] for caption in chosen], self.df)
        scores = [0.0] * len(texts)
        for row, score, most in zip(rows, near, equal, strict=True):
            scores[row] = max(0.0, 1 - score / most) if most else 0.0
        return checked_scores(self, scores, len(texts))


class Consensus:
    """Similarity of a caption to the other captions of its image in the call: mean
    CIDEr-D, in [0, 10].

    For each of the others, the CIDEr-D of the pair is averaged over both directions.
    The caption with the highest score is the consensus caption of Devlin et al.,
    "Exploring Nearest Neighbor Approaches for Image Captioning", 2015, taken among the
    candidates themselves. The only caption of an image scores 0. No references are
    used; EOS is not a token.

    Args:
        df: document frequencies without EOS, or a file of them, as for ``CiderD``; None
            gives all n-grams the same weight.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``.

    Raises:
        ValueError: ``df`` was counted with EOS or by another tokenizer, or cannot be read.
    """

    __name__ = "consensus"
    columns = frozenset({"image_id"})
    bounds = (0.0, 10.0)

    def __init__(
        self,
        df: DocumentFrequencies | str | Path | None = None,
        tokenizer: str = TOKENIZER,
    ) -> None:
        self.df, cider = _weights(df, False, tokenizer)
        self.tokenizer = tokenizer
        self._tokenize = tokenizer_of(tokenizer)
        self.signature = f"consensus[{cider}]+{tokenizer}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``image_id``. Raises ``RewardError`` as
        ``required_column``.
        """
        texts = as_texts(completions)
        scores = [0.0] * len(texts)
        ids = required_column(columns, "image_id", self.__name__, len(texts))
        for rows in _rows_by_image(ids):
            captions = [self._tokenize(texts[row]) for row in rows]
            near = 10 * similarities(captions, self.df)
            # not subtracted from the sum, which would cost the digits of small ones
            np.fill_diagonal(near, 0.0)
            for row, others in zip(rows, near.tolist(), strict=True):
                mean = math.fsum(others) / (len(rows) - 1)
                scores[row] = min(mean, self.bounds[1])  # rounding may pass the bound
        return checked_scores(self, scores, len(texts))
