"""Hubness: a few candidates are near to everything, and retrieval returns them for every query."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize


class Hubness(NamedTuple):
    """How unevenly candidates occur among the k nearest of all queries."""

    skewness: float
    """Of the numbers of occurrences N_k (Radovanovic et al., JMLR 2010); 0 is even, above 1 is hubs."""
    never: float
    """Share of candidates that occur nowhere, in [0, 1]."""
    largest: float
    """Share of queries that have the most frequent candidate among their k nearest, in [0, 1]."""


@torch.no_grad()
def hubness(queries: Tensor, candidates: Tensor, k: int = 10, chunk_size: int = 512) -> Hubness:
    """Count how often each of M candidates is among the k nearest, by cosine, of N queries.

    Args:
        queries: [N, D] embeddings of any length above 0.
        candidates: [M, D] embeddings, M > k; leave out repetitions, which share their occurrences by chance.
        k: neighbours.
        chunk_size: queries at a time.

    Raises:
        ValueError: wrong shapes, or not more candidates than k.
    """
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1] or not queries.numel():
        raise ValueError(
            f"queries {tuple(queries.shape)} and candidates {tuple(candidates.shape)}: expected [N, D] and [M, D]"
        )
    if not 1 <= k < len(candidates):
        raise ValueError(f"k = {k} with {len(candidates)} candidates: expected 1 to {len(candidates) - 1}")
    queries, candidates = normalize(queries.float(), dim=1), normalize(candidates.float(), dim=1)
    occurrences = torch.zeros(len(candidates), dtype=torch.long, device=candidates.device)
    for start in range(0, len(queries), chunk_size):
        nearest = (queries[start : start + chunk_size] @ candidates.T).topk(k, dim=1).indices
        occurrences += torch.bincount(nearest.flatten(), minlength=len(candidates))
    counts = occurrences.double()
    deviations = counts - counts.mean()
    spread = deviations.pow(2).mean()
    skewness = float(deviations.pow(3).mean() / spread.pow(1.5)) if spread > 0 else 0.0
    return Hubness(skewness, float((counts == 0).double().mean()), float(counts.max()) / len(queries))
