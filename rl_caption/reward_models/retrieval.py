"""Image-text retrieval: recall among the k nearest, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

TIE = 1e-6
"""Cosines nearer than this are tied. Equal captions get equal embeddings only up to the rounding of a batch."""


@torch.no_grad()
def retrieval_recall(
    images: Tensor, texts: Tensor, owners: Tensor, ks: Sequence[int] = (1, 5, 10), chunk_size: int = 512
) -> dict[str, float]:
    """Recall at k of retrieval by cosine, both ways (the protocol of Karpathy and Fei-Fei, CVPR 2015, section 4.1).

    Image to text: the fraction of images with at least one of their texts among the k nearest texts. Text to image: the
    fraction of texts whose image is among the k nearest images.

    Ties (cosines within ``TIE``) count by their expectation when they are put in a random order: a text whose image is
    beaten by G others and equalled by E is a hit at k with probability min(1, max(0, k - G) / (E + 1)). So an encoder
    that returns one vector for everything gets chance level, and a caption that many images have costs no more than
    it must. With several matching texts at the best matching cosine the probability of a miss is hypergeometric. Where
    nothing is tied, this is plain recall.

    Args:
        images: [N, D] embeddings; of any length above 0, since they are normalised here.
        texts: [M, D] embeddings of the same device.
        owners: [M] integers: row in ``images`` that each text belongs to. Every image needs a text.
        ks: numbers of candidates; a k above the number of candidates gives 1.
        chunk_size: queries in one product; 512 of them against 25,000 candidates take 51 MB.

    Returns:
        ``i2t_r1``, ... and ``t2i_r1``, ... for every k, each in [0, 1].

    Raises:
        ValueError: shapes that do not fit, an owner out of range, an image without a text, a k below 1, or an
            embedding that is not finite or of length 0.
    """
    _check(images, texts, owners, ks)
    owners = owners.to(texts.device).long()
    images, texts = normalize(images.float(), dim=1), normalize(texts.float(), dim=1)
    rows = torch.arange(len(images), device=texts.device)
    i2t = _recall(images, texts, rows, owners, ks, chunk_size)
    t2i = _recall(texts, images, owners, rows, ks, chunk_size)
    return {f"i2t_r{k}": rate for k, rate in i2t.items()} | {f"t2i_r{k}": rate for k, rate in t2i.items()}


def _recall(
    queries: Tensor, candidates: Tensor, query_ids: Tensor, candidate_ids: Tensor, ks: Sequence[int], chunk_size: int
) -> dict[int, float]:
    """Average the probability of a hit over [Q, D] queries; a candidate matches a query where their ids are equal."""
    hits = dict.fromkeys(ks, 0.0)
    for start in range(0, len(queries), chunk_size):
        cosines = queries[start : start + chunk_size] @ candidates.T
        own = query_ids[start : start + chunk_size, None] == candidate_ids[None]
        best = cosines.masked_fill(~own, -torch.inf).amax(dim=1, keepdim=True)
        tied = (cosines - best).abs() <= TIE
        better = ((cosines > best) & ~tied).sum(dim=1)
        others, own_tied = (tied & ~own).sum(dim=1), (tied & own).sum(dim=1)
        for k in ks:
            hits[k] += float(hit_probability(better, others, own_tied, k).sum())
    return {k: total / len(queries) for k, total in hits.items()}


def hit_probability(better: Tensor, others: Tensor, own: Tensor, k: int) -> Tensor:
    """Probability that at least one matching candidate is among the first k, ties being in random order; [Q] float64.

    1 - C(E, m) / C(E + O, m) with m = max(0, k - G) ranks left to the tied group; 1 where m > E.

    Args:
        better: [Q] G, candidates ahead of the tied group.
        others: [Q] E, candidates of others in the tied group.
        own: [Q] O >= 1, matching candidates in the tied group.
        k: number of ranks.
    """
    ranks = (k - better).clamp(min=0)
    miss = torch.ones(better.shape, dtype=torch.float64, device=better.device)
    for taken in range(int(ranks.max()) if len(ranks) else 0):
        factor = (others - taken).clamp(min=0).double() / (others + own - taken).clamp(min=1)
        miss = torch.where(taken < ranks, miss * factor, miss)
    return 1 - miss


def _check(images: Tensor, texts: Tensor, owners: Tensor, ks: Sequence[int]) -> None:
    if images.ndim != 2 or texts.ndim != 2 or images.shape[1] != texts.shape[1] or not images.numel():
        raise ValueError(
            f"images {tuple(images.shape)} and texts {tuple(texts.shape)}: expected [N, D] and [M, D], none empty"
        )
    if owners.shape != texts.shape[:1] or owners.is_floating_point():
        raise ValueError(
            f"owners {tuple(owners.shape)} of {owners.dtype}: expected {len(texts)} integers, one for each text"
        )
    for index in owners.tolist():
        if not 0 <= index < len(images):
            raise ValueError(f"owner {index}: expected the row of an image, 0 to {len(images) - 1}")
    without = torch.bincount(owners.cpu().long(), minlength=len(images)).eq(0).nonzero().flatten().tolist()
    if without:
        raise ValueError(f"{len(without)} images have no text, the first is row {without[0]}: leave them out")
    if not ks or min(ks) < 1:
        raise ValueError(f"ks = {list(ks)}: expected numbers of at least 1")
    for name, rows in (("images", images), ("texts", texts)):
        lengths = rows.float().norm(dim=1)
        bad = (~torch.isfinite(lengths) | (lengths == 0)).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"{name}: row {bad[0]} has the length {float(lengths[bad[0]]):g}: expected a finite one above 0"
            )
