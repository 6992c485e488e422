"""Accuracy on pairs: how often a metric scores the correct caption above the wrong one."""

from __future__ import annotations

import math
from collections.abc import Sequence

ALL = "all"
"""Key of the accuracy over all pairs together."""


def pairwise_accuracy(correct: Sequence[float], wrong: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """Compute the share of pairs with correct > wrong, strictly: a tie is a failure.

    Strict as in FOIL (Shekhar et al., ACL 2017) and SugarCrepe (Hsieh et al., NeurIPS 2023). A metric that ties by
    design, such as sentence BLEU-4 at 0, loses those pairs; one that guesses wins half of them.

    Args:
        correct: [P] scores of the correct captions.
        wrong: [P] scores of their wrong partners.
        kinds: [P] kind of each pair, such as ``swap_object``.

    Returns:
        Kind -> accuracy in [0, 1], in the order in which kinds first occur, then ``all`` over all pairs, so that kinds
        weigh by their numbers.

    Raises:
        ValueError: no pairs, lists of different lengths, a kind named ``all``, or a score that is not finite.
    """
    if not correct or not len(correct) == len(wrong) == len(kinds):
        raise ValueError(
            f"{len(correct)} correct, {len(wrong)} wrong scores and {len(kinds)} kinds: expected as many, at least 1"
        )
    wins: dict[str, list[bool]] = {}
    for index, (good, bad, kind) in enumerate(zip(correct, wrong, kinds, strict=True)):
        if kind == ALL:
            raise ValueError(f"pair {index} is of the kind {ALL!r}, which stands for all pairs: give it another name")
        if not (math.isfinite(good) and math.isfinite(bad)):
            raise ValueError(f"pair {index} has the scores {good!r} and {bad!r}: expected finite numbers")
        wins.setdefault(kind, []).append(good > bad)
    every = [won for own in wins.values() for won in own]
    return {kind: sum(own) / len(own) for kind, own in wins.items()} | {ALL: sum(every) / len(every)}
