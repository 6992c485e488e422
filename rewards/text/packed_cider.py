"""CIDEr-D of many captions at once, with n-grams as 64-bit integers.

A word is a number below 2^16 and an n-gram of up to four words one integer, so that document frequencies and the
references of a batch are found by binary search and no n-gram is ever a Python object. Scores equal those of
``cider.similarity`` to the bit: sums over n-grams and references are taken one after the other, logarithms and length
penalties are the same numbers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rewards.text.document_frequency import DocumentFrequencies

Array = np.ndarray[Any, np.dtype[Any]]

WORD_BITS = 16
LONGEST = 64 // WORD_BITS
"""Words of an n-gram that fit one integer."""


@dataclass(frozen=True)
class PackedReferences:
    """The tf-idf vectors of one image's R references, by n-gram.

    Attributes:
        ngrams: [G] ascending places of their n-grams among the document frequencies.
        weights: [G, R] tf times idf, 0 where a reference does not have the n-gram.
        norms: [R, n] Euclidean norms of each order's vector.
        lengths: [R] number of bigrams: tokens - 1.
    """

    ngrams: Array
    weights: Array
    norms: Array
    lengths: Array


class PackedCiderD:
    """CIDEr-D against fixed document frequencies.

    Args:
        df: document frequencies of n-grams of up to four words, of fewer than 2^16 different words.
        n: longest n-grams.
        sigma: width of the length penalty, in tokens.
        cache_images: images whose weighted references are kept, least recently used out first.
    """

    def __init__(self, df: DocumentFrequencies, n: int = 4, sigma: float = 6.0, cache_images: int = 4096) -> None:
        if not can_pack(df, n):
            raise ValueError(
                f"n = {n} with {len(df.words())} words: expected n of at most {LONGEST}, fewer than 2^{WORD_BITS} words"
            )
        self.n, self.sigma, self.cache_images = n, sigma, cache_images
        self.words = _Words(df.words())
        keys, inverse = _packed_frequencies(df, self.words, n)
        self.ngrams = _Places(keys)
        self.inverse = np.append(inverse, df.log_documents)  # at -1: of an n-gram that is not there
        self._cache: OrderedDict[Any, PackedReferences] = OrderedDict()
        self._penalties: dict[int, float] = {}

    def cached(self, key: Any) -> PackedReferences | None:
        """The references that were kept under ``key``, if they still are."""
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
        return found

    def references(self, key: Any, captions: Sequence[Sequence[str]]) -> PackedReferences | None:
        """Weigh the tokenised references of one image and keep them; None where ``df`` lacks an n-gram of theirs."""
        found = self._weigh_references(captions)
        if found is not None:
            self._cache[key] = found
            if len(self._cache) > self.cache_images:
                self._cache.popitem(last=False)
        return found

    def scores(self, candidates: Sequence[Sequence[str]], references: Sequence[PackedReferences]) -> list[float] | None:
        """Score N tokenised candidates, each against its image's references (the same object for the same image).

        Returns:
            N scores in [0, 10]; None where the words of the candidates do not fit 16 bits beside those of ``df``.
        """
        ids = self._numbers(candidates)
        if ids is None:
            return None
        grams = self._weigh(ids)
        images = {id(own): own for own in references}
        of_image = {identity: number for number, identity in enumerate(images)}
        owner = np.fromiter((of_image[id(own)] for own in references), np.int64, len(references))
        bank = _Bank.of(list(images.values()), self.n)
        shape = (self.n, len(candidates))
        values = bank.products(grams, owner, shape)  # [n, N, R]
        scale = grams.norms[..., None] * bank.norms[:, owner]
        values = np.divide(values, scale, out=values, where=scale != 0)
        lengths = np.maximum(np.count_nonzero(ids, axis=0) - 1, 0)
        values *= self._penalty(lengths[:, None] - bank.lengths[owner])
        total = np.zeros(len(candidates))
        for order in _one_after_the_other(values):
            total += order
        return list((total / self.n / bank.counts[owner] * 10.0).tolist())

    def _numbers(self, captions: Sequence[Sequence[str]]) -> Array | None:
        """Word numbers [L, N], 0 after the end; words that ``df`` does not know get numbers above all others."""
        lengths = np.fromiter(map(len, captions), np.int64, len(captions))
        self.words.new.clear()
        flat = np.fromiter(map(self.words.__getitem__, chain.from_iterable(captions)), np.int64, lengths.sum())
        if len(self.words) + len(self.words.new) >= 1 << WORD_BITS:
            return None
        width = max(self.n, lengths.max())
        ids = np.zeros((len(captions), width), np.int64)
        ids[np.arange(width) < lengths[:, None]] = flat
        return np.ascontiguousarray(ids.T)

    def _weigh(self, ids: Array) -> _Weighed:
        length, count = ids.shape
        same = ids[:, None] == ids[None]  # [q, p, N]: position q holds the word of position p
        equal, keys = same, ids
        every_key, frequencies, bins = [], [], []
        earlier = np.triu(np.ones((length, length), bool), k=1)[..., None]
        for order in range(self.n):
            positions = length - order
            if order:
                equal = equal[:-1, :-1] & same[order:, order:]
                keys = keys[:-1] | (ids[order:] << (WORD_BITS * order))
            frequency = np.add.reduce(equal.view(np.uint8), axis=0, dtype=np.uint8 if length < 256 else np.int64)
            repeated = np.logical_or.reduce(equal & earlier[:positions, :positions], axis=0)
            position, caption = np.nonzero(~repeated & (ids[order:] != 0))
            every_key.append(keys[position, caption])
            frequencies.append(frequency[position, caption])
            bins.append(order * count + caption)
        places = self.ngrams.places(np.concatenate(every_key))
        weights = np.concatenate(frequencies) * self.inverse[places]
        bin_of = np.concatenate(bins)
        squares = np.bincount(bin_of, weights**2, self.n * count)  # adds in the order of positions
        return _Weighed(places, weights, bin_of, np.sqrt(squares.astype(np.float64, copy=False)).reshape(self.n, count))

    def _weigh_references(self, captions: Sequence[Sequence[str]]) -> PackedReferences | None:
        ids = self._numbers(captions)
        if ids is None:
            return None
        grams = self._weigh(ids)
        if (grams.places < 0).any():
            return None
        ngrams, rows = np.unique(grams.places, return_inverse=True)
        weights = np.zeros((len(ngrams), len(captions)))
        weights[rows, grams.bins % len(captions)] = grams.weights
        lengths = np.array([max(0, len(caption) - 1) for caption in captions])
        return PackedReferences(ngrams, weights, grams.norms.T, lengths)

    def _penalty(self, difference: Array) -> Array:
        """The length penalty; Python's power, whose last digit NumPy's need not have."""
        unique, inverse = np.unique(difference, return_inverse=True)
        for value in unique.tolist():
            if value not in self._penalties:
                self._penalties[value] = math.e ** (-(float(value) ** 2) / (2 * self.sigma**2))
        table = np.array([self._penalties[value] for value in unique.tolist()])
        return table[inverse.reshape(difference.shape)]


@dataclass(frozen=True)
class _Weighed:
    """The different n-grams of N captions, by order, then by the position where they stand first, then by caption."""

    places: Array
    """[M] places among the document frequencies; -1 for an unknown one."""
    weights: Array
    """[M] tf times idf."""
    bins: Array
    """[M] order * N + caption."""
    norms: Array
    """[n, N] Euclidean norms."""


class _Words(dict[str, int]):
    """Words of the document frequencies, numbered from 1; others are numbered on for as long as ``new`` is kept."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__((word, number) for number, word in enumerate(words, start=1))
        self.new: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        return self.new.setdefault(word, len(self) + 1 + len(self.new))


class _Places:
    """Where 64-bit keys stand in an ascending array of different ones; one look into a table finds most of them."""

    def __init__(self, keys: Array) -> None:
        self.keys = keys
        self.shift = 64 - max(8, (4 * len(keys)).bit_length())
        self.table = np.full(1 << (64 - self.shift), -1, np.int64)
        self.table[self._slots(keys)] = np.arange(len(keys))

    def _slots(self, keys: Array) -> Array:
        return (keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(self.shift)

    def places(self, wanted: Array) -> Array:
        """[M] places of ``wanted`` [M], -1 for what is not there."""
        places = self.table[self._slots(wanted)]
        (taken,) = np.nonzero((places >= 0) & (self.keys[places] != wanted))  # the slot is another key's
        found = np.minimum(np.searchsorted(self.keys, wanted[taken]), len(self.keys) - 1)
        places[taken] = np.where(self.keys[found] == wanted[taken], found, -1)
        return places


@dataclass(frozen=True)
class _Bank:
    """The references of B images; images with fewer than R references are padded with zeros.

    Attributes:
        places: where each image's n-grams stand in ``weights``; keys are place + image * 2^32.
        weights: [sum of G, R] tf times idf.
        norms: [n, B, R].
        lengths: [B, R] numbers of bigrams.
        counts: [B] numbers of references.
    """

    places: _Places
    weights: Array
    norms: Array
    lengths: Array
    counts: Array

    @staticmethod
    def of(images: Sequence[PackedReferences], n: int) -> _Bank:
        """Put the references of all images of a call side by side."""
        most = max(len(image.lengths) for image in images)
        sizes = np.array([len(image.ngrams) for image in images])
        weights = np.zeros((sizes.sum(), most))
        norms, lengths = np.zeros((n, len(images), most)), np.zeros((len(images), most), np.int64)
        start = 0
        for number, image in enumerate(images):
            count = len(image.lengths)
            weights[start : start + len(image.ngrams), :count] = image.weights
            norms[:, number, :count] = image.norms.T
            lengths[number, :count] = image.lengths
            start += len(image.ngrams)
        keys = np.concatenate([image.ngrams for image in images]) | (np.repeat(np.arange(len(images)), sizes) << 32)
        counts = np.array([len(image.lengths) for image in images])
        return _Bank(_Places(keys), weights, norms, lengths, counts)

    def products(self, grams: _Weighed, owner: Array, shape: tuple[int, int]) -> Array:
        """[n, N, R] clipped products of the captions' vectors with those of the references of image ``owner`` [N]."""
        (known,) = np.nonzero(grams.places >= 0)
        bins = grams.bins[known]
        rows = self.places.places(grams.places[known] | (owner[bins % shape[1]] << 32))
        (there,) = np.nonzero(rows >= 0)
        shared, bins = self.weights[rows[there]], bins[there]
        clipped = np.minimum(grams.weights[known[there], None], shared) * shared
        sums = [np.bincount(bins, clipped[:, number], shape[0] * shape[1]) for number in range(shared.shape[1])]
        return np.stack(sums, -1).astype(np.float64, copy=False).reshape(*shape, -1)  # empty ones are whole numbers


def can_pack(df: DocumentFrequencies, n: int) -> bool:
    """Whether n-grams fit 64 bits, with room for some words that ``df`` does not know."""
    return n <= LONGEST and len(df) > 0 and len(df.words()) < (1 << WORD_BITS) - 1024


def _packed_frequencies(df: DocumentFrequencies, words: dict[str, int], n: int) -> tuple[Array, Array]:
    """Ascending keys [G] of the n-grams of up to ``n`` words, and their inverse document frequencies [G]."""
    keys, inverse = [], []
    for order in range(1, n + 1):
        ngrams = df.ngrams(order)
        numbers = np.fromiter(map(words.__getitem__, chain.from_iterable(ngrams)), np.int64, order * len(ngrams))
        shifted = numbers.reshape(-1, order) << (WORD_BITS * np.arange(order))
        keys.append(np.bitwise_or.reduce(shifted, axis=1))
        inverse.append(np.fromiter(map(df.inverse, ngrams), np.float64, len(ngrams)))
    every = np.concatenate(keys)
    ranks = np.argsort(every)
    return every[ranks], np.concatenate(inverse)[ranks]


def _one_after_the_other(values: Array) -> Array:
    """Sum [n, N, R] over references in their order -> [n, N]."""
    total = np.zeros(values.shape[:-1])
    for reference in range(values.shape[-1]):
        total += values[..., reference]
    return total
