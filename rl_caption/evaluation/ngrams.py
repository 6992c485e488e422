"""BLEU's counts and CIDEr-D of a whole split at once: the toolkit's numbers to the last bit, in arrays.

The toolkit adds up floating-point numbers in the order in which a caption's n-grams first occur. ``numpy.bincount``
adds in the order of its input, so the arrays here are in that order; logarithms and powers are taken one number at a
time, because their vectorised versions may differ in the last bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewards.text.bleu import Matches, bleu_of
from rewards.text.packed_cider import squared

Tokens = Sequence[str]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ORDERS = 4


class Entries(NamedTuple):
    """The distinct n-grams of one order of every caption: by caption, and within it by first occurrence."""

    caption: Ints
    """[E] row of the caption, candidates first."""
    gram: Ints
    """[E] number of the n-gram, below ``grams``."""
    times: Ints
    """[E] how often the caption has it."""
    grams: int


class Matched(NamedTuple):
    """Candidate n-grams of one order beside the same n-grams of a reference of the image."""

    candidate: Ints
    """[M] row in ``Entries`` of the candidate's n-gram; by image, reference, first occurrence in the candidate."""
    reference: Ints
    """[M] row in ``Entries`` of the reference's."""


class Captions(NamedTuple):
    """N candidates and their R references, counted."""

    images: int
    """N."""
    owner: Ints
    """[N + R] image of each caption; candidates first, then references by image."""
    lengths: Ints
    """[N + R] tokens of each caption."""
    orders: list[tuple[Entries, Matched]]
    """One for each order of n-grams, 1 to 4."""


def count_captions(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> Captions:
    """Count the n-grams of N tokenised candidates and of the references of each, at least one per candidate."""
    images = len(candidates)
    captions = [*candidates, *itertools.chain.from_iterable(references)]
    owner = np.concatenate([np.arange(images), np.repeat(np.arange(images), [len(texts) for texts in references])])
    lengths = np.array([len(tokens) for tokens in captions], dtype=np.int64)
    numbers: dict[str, int] = {}
    words = np.array([numbers.setdefault(token, len(numbers)) for tokens in captions for token in tokens], np.int64)
    ends = np.cumsum(lengths)
    caption = np.repeat(np.arange(len(captions)), lengths)
    left = ends[caption] - np.arange(len(words))  # tokens from here to the end of the caption
    grams, known, orders = words, max(len(numbers), 1), []
    for order in range(1, ORDERS + 1):
        if order > 1:
            # An n-gram is the pair of its first n-1 words and its last one.
            joined = grams[:-1] * len(numbers) + words[order - 1 :]
            grams = np.unique(joined, return_inverse=True)[1] if len(joined) else joined
            known = int(grams.max(initial=0)) + 1
        starts = np.flatnonzero(left[: len(grams)] >= order)
        entries = _entries(caption[starts], grams[starts], known)
        orders.append((entries, _matched(entries, owner, images)))
    return Captions(images, owner, lengths, orders)


def _entries(caption: Ints, gram: Ints, known: int) -> Entries:
    _, first, count = np.unique(caption * known + gram, return_index=True, return_counts=True)
    by_occurrence = np.argsort(first, kind="stable")
    first = first[by_occurrence]
    return Entries(caption[first], gram[first], count[by_occurrence], known)


def _matched(entries: Entries, owner: Ints, images: int) -> Matched:
    """Pair the n-grams of each candidate with those of its references."""
    split = int(np.searchsorted(entries.caption, images))
    # An n-gram of the candidate is found by (image, n-gram); whatever a reference shares with it is a pair.
    key = owner[entries.caption] * entries.grams + entries.gram
    order = np.argsort(key[:split])
    wanted = key[:split][order]
    place = np.minimum(np.searchsorted(wanted, key[split:]), max(split - 1, 0))
    found = np.flatnonzero(wanted[place] == key[split:]) if split else np.empty(0, np.int64)
    candidate, reference = order[place[found]] if split else found, found + split
    by_candidate = np.lexsort((candidate, entries.caption[reference]))
    return Matched(candidate[by_candidate], reference[by_candidate])


def bleu_counts(captions: Captions) -> Ints:
    """What BLEU adds up: [N, 10], of each image the n-grams of order 1 to 4 that a reference has, those of the
    candidate, its length, and the closest reference length (the shorter of two)."""
    images = captions.images
    counts = np.zeros((images, 2 * ORDERS + 2), dtype=np.int64)
    lengths = captions.lengths[:images]
    for order, (entries, matched) in enumerate(captions.orders):
        most = np.zeros(len(entries.caption), dtype=np.int64)
        np.maximum.at(most, matched.candidate, entries.times[matched.reference])
        clipped = np.minimum(most, entries.times)
        own = entries.caption < images
        np.add.at(counts[:, order], entries.caption[own], clipped[own])
        counts[:, ORDERS + order] = np.maximum(0, lengths - order)
    counts[:, 2 * ORDERS] = lengths
    owner, reference_lengths = captions.owner[images:], captions.lengths[images:]
    away = np.abs(reference_lengths - lengths[owner])
    best = np.lexsort((reference_lengths, away, owner))
    _, first = np.unique(owner[best], return_index=True)
    counts[:, 2 * ORDERS + 1] = reference_lengths[best[first]]
    return counts


def bleu_of_counts(counts: Sequence[int] | Ints) -> list[float]:
    """BLEU-1 to BLEU-4 in [0, 1] of ten counts: of one image, or summed over images."""
    numbers = [int(count) for count in counts]
    return bleu_of(Matches(numbers[:ORDERS], numbers[ORDERS : 2 * ORDERS], numbers[-2], numbers[-1]))


def cider_d_scores(captions: Captions, sigma: float = 6.0) -> Floats:
    """CIDEr-D of each image, [N] in [0, 10], with the document frequencies of these references (one document each).

    Equal to ``rewards.text.cider.cider_d`` (Vedantam et al. 2015, section 6) with those frequencies.
    """
    images, rows = captions.images, len(captions.owner)
    log_images = float(np.log(float(images)))
    owner = captions.owner[images:]
    lengths = np.maximum(captions.lengths - 1, 0)
    apart = lengths[owner] - lengths[images:]
    largest = int(np.abs(apart).max(initial=0))
    penalties = np.array([math.e ** (-(float(gap) ** 2) / (2 * sigma**2)) for gap in range(largest + 1)])
    total = np.zeros(images)
    for entries, matched in captions.orders:
        weights = entries.times * _inverse_frequencies(entries, captions.owner, images, log_images)[entries.gram]
        norms = np.sqrt(np.bincount(entries.caption, weights=squared(weights), minlength=rows).astype(np.float64))
        own, theirs = weights[matched.candidate], weights[matched.reference]
        value = np.bincount(
            entries.caption[matched.reference], weights=np.minimum(own, theirs) * theirs, minlength=rows
        )
        scale = norms[owner] * norms[images:]
        value = value[images:].astype(np.float64)  # numpy counts in integers where nothing matches
        value[scale != 0] /= scale[scale != 0]
        total += np.bincount(owner, weights=value * penalties[np.abs(apart)], minlength=images)
    return total / ORDERS / np.bincount(owner, minlength=images) * 10.0


def _inverse_frequencies(entries: Entries, owner: Ints, images: int, log_images: float) -> Floats:
    """ln(images) - ln(images whose references have it) of every n-gram of one order."""
    of_references = entries.caption >= images
    pairs = np.sort(owner[entries.caption[of_references]] * entries.grams + entries.gram[of_references])
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]  # numpy.unique, faster
    frequency = np.bincount(pairs % entries.grams, minlength=entries.grams)
    logarithms = np.array([float(np.log(max(1.0, float(f)))) for f in range(int(frequency.max(initial=0)) + 1)])
    return log_images - logarithms[frequency]
