"""CIDEr-D of many captions at once: n-grams are places in the table of the document frequencies, captions one array.

No n-gram is a Python object. Scores equal those of ``cider.similarity`` to the bit: sums over n-grams and references
are taken one after the other, logarithms and length penalties are the same numbers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.ngram_table import WORD_BITS, Array, numbered
from rewards.text.places import Places

MOST_TOKENS = 1 << 18
"""Tokens that are scored, or weighed, at once."""
MOST_IMAGES = 256
"""Images whose references are weighed at once."""
MOST_EXTRA = 1 << 18
"""N-grams of references that the document frequencies lack; when there are more, all references are forgotten."""
IMAGE_BITS = 40
"""In keys of an image's n-grams, the place has so many bits and the number of the image those above."""


@dataclass(frozen=True, eq=False)
class PackedReferences:
    """The n-grams of one image's R references.

    Attributes:
        places: [G] ascending places of their n-grams.
        counts: [G, R] how often each reference has them, in the smallest type that holds it.
        norms: [R, n] Euclidean norms of each order's tf-idf vector.
        lengths: [R] number of bigrams: tokens - 1.
    """

    places: Array
    counts: Array
    norms: Array
    lengths: Array


@dataclass(frozen=True, eq=False)
class Captions:
    """N captions as word numbers.

    Attributes:
        words: [T] of all captions, one after the other.
        lengths: [N] tokens of each.
    """

    words: Array
    lengths: Array

    def parts(self) -> Iterator[tuple[slice, Captions]]:
        """Runs of captions of at most ``MOST_TOKENS`` tokens, or of one."""
        ends = np.cumsum(self.lengths)
        start = 0
        while start < len(self.lengths):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + MOST_TOKENS, side="right")))
            yield slice(start, stop), Captions(self.words[before : ends[stop - 1]], self.lengths[start:stop])
            start = stop


class PackedCiderD:
    """CIDEr-D against fixed document frequencies.

    Args:
        df: document frequencies of n-grams of ``n`` words or more.
        n: longest n-grams.
        sigma: width of the length penalty, in tokens.
        cache_images: images whose references are kept, least recently used out first.
    """

    def __init__(self, df: DocumentFrequencies, n: int = 4, sigma: float = 6.0, cache_images: int = 200_000) -> None:
        if df.n < n:
            raise ValueError(f"the document frequencies count n-grams up to {df.n}, CIDEr was asked for n = {n}")
        self.n, self.sigma, self.cache_images = n, sigma, cache_images
        self.known_words = len(df.table.words)
        self.words = _Words(df.table.words)
        self.size = df.table.starts[n]
        self.keys = df.table.keys[: self.size - self.known_words]
        self._places = Places(self.keys)
        self.inverse = np.append(df.inverses()[: self.size], df.log_documents)  # last: of an n-gram that is not there
        self._extra: dict[tuple[int, ...], int] = {}
        self._cache: OrderedDict[Hashable, PackedReferences] = OrderedDict()
        self._penalties = np.empty(0)

    def references(
        self, keys: Iterable[Hashable], tokens_of: Callable[[Any], Sequence[Sequence[str]]]
    ) -> dict[Hashable, PackedReferences]:
        """The references of images, from the cache, or made for all new ones at once.

        Args:
            keys: keys of images.
            tokens_of: gives the tokens of each reference of an image that is not in the cache.
        """
        if len(self._extra) > MOST_EXTRA:
            self._extra.clear()
            self._cache.clear()
            self.words.forget(self.known_words)
        found = {key: self._cache.get(key) for key in keys}
        missing = [key for key, own in found.items() if own is None]
        self.words.new = None
        made: list[PackedReferences] = []
        for start in range(0, len(missing), MOST_IMAGES):
            made += self._weigh_references([tokens_of(key) for key in missing[start : start + MOST_IMAGES]])
        found.update(zip(missing, made, strict=True))
        for key, own in found.items():
            assert own is not None
            self._cache[key] = own
            self._cache.move_to_end(key)
        while len(self._cache) > self.cache_images:
            self._cache.popitem(last=False)
        return found  # type: ignore[return-value]

    def numbers(self, captions: Sequence[Sequence[str]]) -> Captions:
        """Tokens to word numbers, for ``scores``; words that are not known get numbers above all others."""
        self.words.new = {}
        return self._numbers(captions)

    def _numbers(self, captions: Sequence[Sequence[str]]) -> Captions:
        lengths = np.fromiter(map(len, captions), np.int64, len(captions))
        flat = map(self.words.__getitem__, chain.from_iterable(captions))
        return Captions(np.fromiter(flat, np.int64, lengths.sum()), lengths)

    def scores(self, captions: Captions, references: Sequence[PackedReferences]) -> list[float]:
        """Score N captions, each against its image's references (the same object for the same image), in [0, 10]."""
        images = {id(own): own for own in references}
        of_image = {identity: number for number, identity in enumerate(images)}
        owner = np.fromiter((of_image[id(own)] for own in references), np.int64, len(references))
        bank = Bank.of(list(images.values()), self.inverse, self.n)
        parts = [self._scores(part, owner[rows], bank) for rows, part in captions.parts()]
        return list(np.concatenate(parts).tolist()) if parts else []

    def _scores(self, captions: Captions, owner: Array, bank: Bank) -> Array:
        count = len(owner)
        grams = self._ngrams(captions)
        weights = grams.counts * self.inverse[np.minimum(grams.places, self.size)]
        norms = _norms(weights, grams.bins, self.n * count).reshape(self.n, count)
        values = bank.products(grams, weights, owner, (self.n, count))  # [n, N, R]
        scale = norms[..., None] * bank.norms[:, owner]
        values = np.divide(values, scale, out=values, where=scale != 0)
        lengths = np.maximum(captions.lengths - 1, 0)
        values *= self.penalties(np.abs(lengths[:, None] - bank.lengths[owner]))
        return one_after_the_other(one_after_the_other(values).T) / self.n / bank.counts[owner] * 10.0

    def _weigh_references(self, images: Sequence[Sequence[Sequence[str]]]) -> list[PackedReferences]:
        sizes = np.fromiter(map(len, images), np.int64, len(images))
        captions = self._numbers([tokens for own in images for tokens in own])
        count = len(captions.lengths)
        grams = self._ngrams(captions, keep=True)
        weights = grams.counts * self.inverse[np.minimum(grams.places, self.size)]
        norms = np.ascontiguousarray(_norms(weights, grams.bins, self.n * count).reshape(self.n, count).T)
        caption, image = grams.bins % max(count, 1), np.repeat(np.arange(len(images)), sizes)
        starts = np.cumsum(sizes) - sizes
        index, unique = numbered(image[caption] << IMAGE_BITS | grams.places)
        counts = np.zeros((len(unique), sizes.max()), np.min_scalar_type(grams.counts.max(initial=1)))
        counts[index, caption - starts[image[caption]]] = grams.counts
        places = (unique & ((1 << IMAGE_BITS) - 1)).astype(np.int32)
        lengths = np.maximum(captions.lengths - 1, 0).astype(np.int32)
        ends = np.searchsorted(unique, np.arange(len(images) + 1) << IMAGE_BITS)
        return [
            PackedReferences(
                places[first:last].copy(),
                counts[first:last, :size].copy(),
                norms[start : start + size].copy(),
                lengths[start : start + size].copy(),
            )
            for first, last, start, size in zip(ends[:-1], ends[1:], starts, sizes, strict=True)
        ]

    def _ngrams(self, captions: Captions, keep: bool = False) -> _NGrams:
        """The different n-grams of every caption. With ``keep``, those that have no place get one."""
        words, lengths = captions.words, captions.lengths
        total, most, count = len(words), int(words.max(initial=0)) + 1, len(lengths)
        row = np.repeat(np.arange(count), lengths)
        left = np.repeat(np.cumsum(lengths), lengths) - np.arange(total)  # tokens to the caption's end, own included
        keys, positions = row * most + words, np.arange(total)
        places = np.where(words < self.known_words, words, -1)
        every = []
        for order in range(1, self.n + 1):
            # Sorted by n-gram of a caption, then by position: the first of each, and how many follow.
            ordered = np.sort(keys * total + positions)
            number, at = np.divmod(ordered, max(total, 1))
            new = np.ones(len(ordered), bool)
            new[1:] = number[1:] != number[:-1]
            (heads,) = np.nonzero(new)
            counts = np.zeros(total, np.int64)
            counts[at[heads]] = np.diff(heads, append=len(ordered))
            same = np.empty(total, np.int64)
            same[at] = np.cumsum(new)
            (first,) = np.nonzero(counts)
            own = places[first]
            if keep or self._extra:
                self._place_extra(own, words, first, order, keep)
            every.append((own, counts[first], (order - 1) * count + row[first]))
            if order == self.n:
                break
            positions = positions[left[positions] > order]
            last = words[positions + order]
            keys = same[positions] * most + last
            places = self._longer(places, positions, last, total)
        return _NGrams(*(np.concatenate(parts) for parts in zip(*every, strict=True)))

    def _place_extra(self, places: Array, words: Array, first: Array, order: int, keep: bool) -> None:
        """Fill in the places of n-grams that only references have; they begin at ``first``."""
        for index in np.nonzero(places < 0)[0].tolist():
            ngram = tuple(words[first[index] : first[index] + order].tolist())
            if keep:
                places[index] = self._extra.setdefault(ngram, self.size + len(self._extra))
            else:
                places[index] = self._extra.get(ngram, -1)

    def _longer(self, places: Array, positions: Array, last: Array, total: int) -> Array:
        """Places [T] of the n-grams that begin at ``positions`` and go on with the word ``last``; elsewhere -1."""
        (known,) = np.nonzero(places[positions] >= 0)
        at = positions[known]
        found = self._places.of(places[at] << WORD_BITS | last[known])
        longer = np.full(total, -1)
        longer[at] = np.where(found >= 0, found + self.known_words, -1)
        return longer

    def penalties(self, difference: Array) -> Array:
        """The length penalty by the difference in tokens; Python's power, whose last digit NumPy's need not have."""
        table = self.penalty_table(int(difference.max(initial=0)))
        return table[difference]

    def penalty_table(self, most: int) -> Array:
        """Length penalties of differences from 0 to at least ``most`` tokens."""
        if len(self._penalties) <= most:
            table = [math.e ** (-(float(value) ** 2) / (2 * self.sigma**2)) for value in range(most + 32)]
            self._penalties = np.array(table)
        return self._penalties


@dataclass(frozen=True, eq=False)
class _NGrams:
    """The different n-grams of N captions, by order, then by the position where they stand first."""

    places: Array
    """[M] -1 for an unknown one."""
    counts: Array
    """[M] how often they occur in their caption."""
    bins: Array
    """[M] (order - 1) * N + caption."""


class _Words(dict[str, int]):
    """Words and their numbers. Others are numbered on: in ``new``, or for good where that is None."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(zip(words, range(len(words)), strict=True))
        self.new: dict[str, int] | None = None

    def __missing__(self, word: str) -> int:
        if self.new is None:
            return self.setdefault(word, len(self))
        return self.new.setdefault(word, len(self) + len(self.new))

    def forget(self, known: int) -> None:
        """Keep the first ``known`` words only."""
        for word in list(self)[known:]:
            del self[word]


@dataclass(frozen=True, eq=False)
class Bank:
    """The references of B images side by side; images with fewer than R references are padded with zeros.

    Attributes:
        keys: [sum of G] ascending: image * 2^40 + place.
        weights: [sum of G, R] tf times idf.
        norms: [n, B, R].
        lengths: [B, R] numbers of bigrams.
        counts: [B] numbers of references.
    """

    keys: Array
    weights: Array
    norms: Array
    lengths: Array
    counts: Array

    @staticmethod
    def of(images: Sequence[PackedReferences], inverse: Array, n: int) -> Bank:
        """Put the references of all images of a call side by side; ``inverse`` is by place, its last of all others."""
        numbers = np.array([len(image.lengths) for image in images])
        sizes = np.array([len(image.places) for image in images])
        most = int(numbers.max())
        places = np.concatenate([image.places for image in images])
        if (numbers == most).all():
            counts = np.concatenate([image.counts for image in images])
            norms = np.stack([image.norms for image in images])
            lengths = np.stack([image.lengths for image in images])
        else:
            counts = np.zeros((len(places), most))
            norms, lengths = np.zeros((len(images), most, n)), np.zeros((len(images), most), np.int32)
            start = 0
            for row, image in enumerate(images):
                counts[start : start + sizes[row], : numbers[row]] = image.counts
                norms[row, : numbers[row]], lengths[row, : numbers[row]] = image.norms, image.lengths
                start += sizes[row]
        weights = counts * inverse[np.minimum(places, len(inverse) - 1)][:, None]
        keys = np.repeat(np.arange(len(images)) << IMAGE_BITS, sizes) | places
        return Bank(keys, weights, np.ascontiguousarray(norms.transpose(2, 0, 1)), lengths, numbers)

    def products(self, grams: _NGrams, weights: Array, owner: Array, shape: tuple[int, int]) -> Array:
        """[n, N, R] clipped products of the captions' vectors with those of the references of image ``owner`` [N]."""
        (known,) = np.nonzero(grams.places >= 0)
        bins = grams.bins[known]
        rows = Places(self.keys).of(grams.places[known] | (owner[bins % shape[1]] << IMAGE_BITS))
        (there,) = np.nonzero(rows >= 0)
        shared, bins = self.weights[rows[there]], bins[there]
        clipped = np.minimum(weights[known[there], None], shared) * shared
        sums = [np.bincount(bins, clipped[:, number], shape[0] * shape[1]) for number in range(shared.shape[1])]
        return np.stack(sums, -1).astype(np.float64, copy=False).reshape(*shape, -1)  # empty ones are whole numbers


def _norms(weights: Array, bins: Array, size: int) -> Array:
    """Euclidean norms [size] of the weights of each bin, added up in their order."""
    return np.sqrt(np.bincount(bins, weights**2, size).astype(np.float64, copy=False))


def one_after_the_other(values: Array) -> Array:
    """Sum over the last axis, in its order."""
    total = np.zeros(values.shape[:-1])
    for number in range(values.shape[-1]):
        total += values[..., number]
    return total
