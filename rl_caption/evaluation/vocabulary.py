"""Growth of the vocabulary with the number of captions: sets of captions of different sizes compare at equal ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

SIZES = (100, 1_000, 10_000)
"""Numbers of captions that are reported, besides that of all."""


def vocabulary_growth(captions: Sequence[Sequence[str]], sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """Expected number of different words in m of N tokenised captions drawn without replacement, by m.

    sum_w (1 - C(N - f_w, m) / C(N, m)), where f_w of the captions have the word w: rarefaction (Hurlbert, "The
    nonconcept of species diversity", Ecology 52(4), 1971). It depends neither on the order of the captions nor on a
    seed, and at m = N it is the number of different words. ``sizes`` are values of m; those of N and more are left out,
    and N comes last.
    """
    total = len(captions)
    frequencies = Counter(Counter(word for tokens in captions for word in set(tokens)).values())
    found = {}
    for size in [*(size for size in sizes if size < total), total]:
        absent = ((count, _absent(total, frequency, size)) for frequency, count in frequencies.items())
        found[size] = math.fsum(count * (1 - chance) for count, chance in absent)
    return found


def _absent(total: int, frequency: int, size: int) -> float:
    """Probability that none of ``frequency`` captions is among ``size`` of ``total``: C(N - f, m) / C(N, m)."""
    if frequency > total - size:
        return 0.0
    parts = (total - frequency, total - size, total - frequency - size, total)
    first, second, third, fourth = (math.lgamma(part + 1) for part in parts)
    return math.exp(first + second - third - fourth)
