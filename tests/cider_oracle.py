"""CIDEr-D of one caption after the other, from dicts, as its definition reads: what the arrays are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.ngrams import NGram, ngram_counts

Tokens = Sequence[str]


def plain_cider_d(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int = 4,
    sigma: float | None = 6.0,
) -> list[float]:
    """CIDEr-D of N tokenised candidates; with ``sigma`` None the original CIDEr, unclipped and without a penalty."""
    return [_score(candidate, own, df, n, sigma) for candidate, own in zip(candidates, references, strict=True)]


def _vector(tokens: Tokens, df: DocumentFrequencies, n: int) -> tuple[dict[NGram, float], list[float]]:
    """tf-idf weights, and the norm of each order's vector."""
    weights = {ngram: float(count) * df.inverse(ngram) for ngram, count in ngram_counts(tokens, n).items()}
    squares = [0.0] * n
    for ngram, weight in weights.items():
        squares[len(ngram) - 1] += weight**2
    return weights, [math.sqrt(square) for square in squares]


def _score(
    candidate: Tokens, references: Sequence[Tokens], df: DocumentFrequencies, n: int, sigma: float | None
) -> float:
    weights, norms = _vector(candidate, df, n)
    sums = [0.0] * n
    for reference in references:
        others, other_norms = _vector(reference, df, n)
        difference = max(0, len(candidate) - 1) - max(0, len(reference) - 1)
        penalty = 1.0 if sigma is None else math.e ** (-(float(difference) ** 2) / (2 * sigma**2))
        for order in range(1, n + 1):
            value = 0.0
            for ngram, weight in weights.items():
                if len(ngram) == order and ngram in others:
                    value += (weight if sigma is None else min(weight, others[ngram])) * others[ngram]
            if norms[order - 1] != 0 and other_norms[order - 1] != 0:
                value /= norms[order - 1] * other_norms[order - 1]
            sums[order - 1] += value * penalty
    total = 0.0
    for value in sums:  # not sum(), which compensates
        total += value
    return total / n / len(references) * 10.0
