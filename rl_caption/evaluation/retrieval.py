"""Image-text retrieval by cosine: ranks and recall, both ways, with ties by their expectation.

Protocol: Karpathy and Fei-Fei, "Deep Visual-Semantic Alignments for Generating Image
Descriptions", CVPR 2015, section 4.1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
KS = (1, 5, 10)
TIE = 1e-6
"""Cosines nearer than this are tied."""


def retrieval_recall(
    images: ArrayLike, texts: ArrayLike, owners: ArrayLike, ks: Sequence[int] = KS
) -> dict[str, float]:
    """Recall at k of retrieval by cosine in both directions: ``i2t_r1``, ... and
    ``t2i_r1``, ..., each in [0, 1].

    Arguments and errors as for ``both_ways``.
    """
    recalls = both_ways(images, texts, owners, ks)
    return {
        f"{way}_r{k}": float(recalls[way][:, n].mean())
        for way in recalls
        for n, k in enumerate(ks, start=1)
    }


def both_ways(
    images: ArrayLike, texts: ArrayLike, owners: ArrayLike, ks: Sequence[int] = KS
) -> dict[str, Floats]:
    """Rank images among texts and texts among images: rank, and hits at each of the K
    ``ks``, of every query.

    Image to text (``i2t``, [N, 1 + K]): the best rank of an image's own texts among all
    texts, and whether at least one of them is among the k nearest. Text to image
    (``t2i``, [M, 1 + K]): the same for the text's image. Ties count by their
    expectation (``retrieval_ranks``), so that an encoder with one vector for everything
    gets chance level. A k above the number of candidates gives 1.

    Args:
        images: [N, D] embeddings; of any length above 0, since they are normalised here.
        texts: [M, D] embeddings.
        owners: [M] integers: row in ``images`` that each text belongs to. Every image needs a text.
        ks: numbers of candidates.

    Raises:
        ValueError: owners of another number or out of range, an image without a text,
            or an embedding that is not finite or of length 0.
    """
    owner_of_text, rows = np.asarray(owners), np.arange(len(np.asarray(images)))
    has_owners = len(owner_of_text) == len(np.asarray(texts))
    if not (has_owners and np.array_equal(np.unique(owner_of_text), rows)):
        raise ValueError(
            "owners: expected an image for each text, and a text for each image"
        )
    normalised = []
    for embeddings in (images, texts):
        vectors = np.asarray(embeddings, np.float32)
        with np.errstate(invalid="ignore"):
            normalised.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
        if not np.isfinite(normalised[-1]).all():
            raise ValueError("an embedding is not finite or of length 0")
    of_image, of_text = normalised
    return {
        "i2t": retrieval_ranks(of_image, of_text, rows, owner_of_text, ks),
        "t2i": retrieval_ranks(of_text, of_image, owner_of_text, rows, ks),
    }


def retrieval_ranks(
    queries: NDArray[np.float32],
    candidates: NDArray[np.float32],
    query_ids: ArrayLike,
    candidate_ids: ArrayLike,
    ks: Sequence[int] = KS,
    chunk_size: int = 512,
) -> Floats:
    """Rank of the first matching candidate, and hits at ``ks``, of each of Q queries: [Q, 1 + K].

    ``queries`` [Q, D] and ``candidates`` [C, D] are of length 1. A candidate matches
    where its id ([C]) is the query's ([Q]); each query needs one. Candidates whose
    cosines are within ``TIE`` are tied. With G candidates ahead of the best matching
    one, and E others and O matching ones tied with it, the rank is the expected one in
    a random order, 1 + G + E / (O + 1), and a hit at k is ``hit_probability``.
    ``chunk_size`` is the number of queries in one product; 512 of them against 25,000
    candidates take 51 MB.
    """
    targets, names, ranks = np.asarray(query_ids), np.asarray(candidate_ids), []
    for start in range(0, len(queries), chunk_size):
        cosines = queries[start : start + chunk_size] @ candidates.T
        is_own = targets[start : start + chunk_size, None] == names[None]
        best = np.where(is_own, cosines, -np.inf).max(axis=1, keepdims=True)
        tied = np.abs(cosines - best) <= TIE
        better = ((cosines > best) & ~tied).sum(axis=1)
        others, tied_own = (tied & ~is_own).sum(axis=1), (tied & is_own).sum(axis=1)
        hits = [hit_probability(better, others, tied_own, k) for k in ks]
        ranks.append(np.stack([1 + better + others / (tied_own + 1), *hits], axis=1))
    return np.concatenate(ranks)


def hit_probability(
    better: Integers, others: Integers, tied_own: Integers, k: int
) -> Floats:
    """Probability that at least one matching candidate is among the first k, ties being
    in random order; [Q].

    Of a tied group with O >= 1 matching candidates (``tied_own`` [Q]) and E ``others``
    [Q], behind G ``better`` [Q]: 1 - C(E, m) / C(E + O, m) with m = max(0, k - G) ranks
    left to the group; 1 where m > E.
    """
    ranks, miss = np.maximum(k - better, 0), np.ones(np.shape(better))
    for before in range(int(ranks.max(initial=0))):
        factor = np.maximum(others - before, 0) / np.maximum(
            others + tied_own - before, 1
        )
        miss = np.where(before < ranks, miss * factor, miss)
    return 1 - miss
