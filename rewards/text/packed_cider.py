"""CIDEr-D of many captions at once: n-grams are places in the table of the document frequencies, captions one array.

No n-gram is a Python object. Scores equal those of ``cider.similarity`` to the bit: sums over n-grams and references
are taken one after the other, logarithms and length penalties are the same numbers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.key_index import KeyIndex
from rewards.text.ngram_table import WORD_BITS, Array, numbered
from rewards.text.reference_bank import IMAGE_BITS, Bank, PackedReferences
from rewards.text.tokenize import is_plain

TokensOf = Callable[[Sequence[int]], Sequence[Sequence[str]]]
"""From rows of a call to the tokens of their captions."""
MOST_TOKENS = 1 << 18
"""Tokens that are scored, or weighed, at once."""
MOST_IMAGES = 256
"""Images whose references are weighed at once."""
MOST_EXTRA = 1 << 18
"""N-grams of references that the document frequencies lack; when there are more, all references are forgotten."""


@dataclass(frozen=True, eq=False)
class Captions:
    """Captions as word numbers.

    Attributes:
        words: [T] of all captions, one after the other.
        lengths: [M] tokens of each.
        rows: [M] the row of each among the N that are scored, of several the last one counts; None: M = N.
    """

    words: Array
    lengths: Array
    rows: Array | None = None

    def replaced(self, rows: Array, others: Captions) -> Captions:
        """These N captions, but in ``rows`` the ``others``."""
        return Captions(
            np.concatenate([self.words, others.words]),
            np.concatenate([self.lengths, others.lengths]),
            np.concatenate([np.arange(len(self.lengths)), rows]),
        )

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
        self._key_index = KeyIndex(self.keys)
        kinds, inverses = df.inverses()
        self.kinds = np.append(kinds[: self.size], np.int32(len(inverses)))  # last: of an n-gram that is not there
        self.inverses = np.append(inverses, df.log_documents)
        self.squares = squared(self.inverses)
        self._extra: dict[tuple[int, ...], int] = {}
        self._cache: OrderedDict[Hashable, PackedReferences] = OrderedDict()
        self._penalties = np.empty(0)

    def references(
        self, keys: Sequence[Hashable], tokens_of: Callable[[Any], Sequence[Sequence[str]]]
    ) -> list[PackedReferences]:
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
        return [own for key in keys if (own := found[key]) is not None]

    def numbers(self, captions: Sequence[Sequence[str]]) -> Captions:
        """Tokens to word numbers, for ``scores``; words that are not known get numbers above all others."""
        self.words.new = {}
        return self._numbers(captions)

    def _numbers(self, captions: Sequence[Sequence[str]]) -> Captions:
        lengths = np.fromiter(map(len, captions), np.int64, len(captions))
        flat = map(self.words.__getitem__, chain.from_iterable(captions))
        return Captions(np.fromiter(flat, np.int64, lengths.sum()), lengths)

    def scores(self, captions: Captions, owner: Array, bank: Bank) -> Array:
        """Scores [N] of captions against the references of image ``owner`` [N], in [0, 10] but for rounding."""
        rows = captions.rows
        owners = owner if rows is None else owner[rows]
        parts = [self._scores(part, owners[some], bank) for some, part in captions.parts()]
        scores = np.concatenate(parts) if parts else np.empty(0)
        if rows is None:
            return scores
        found = np.empty(len(owner))
        found[rows] = scores
        return found

    def _scores(self, captions: Captions, owner: Array, bank: Bank) -> Array:
        count = len(owner)
        grams = self._ngrams(captions)
        inverse, weights, norms = self._weighed(grams, count)
        values = _products(grams, inverse, weights, owner, bank, self.n)  # [n, N, R]
        scale = norms[..., None] * bank.norms[:, owner]
        values = np.divide(values, scale, out=values, where=scale != 0)
        lengths = np.maximum(captions.lengths - 1, 0)
        values *= self.penalties(np.abs(lengths[:, None] - bank.lengths[owner]))
        return one_after_the_other(one_after_the_other(values).T) / self.n / bank.references[owner] * 10.0

    def _weigh_references(self, images: Sequence[Sequence[Sequence[str]]]) -> list[PackedReferences]:
        sizes = np.fromiter(map(len, images), np.int64, len(images))
        captions = self._numbers([tokens for own in images for tokens in own])
        count = len(captions.lengths)
        grams = self._ngrams(captions, keep=True)
        norms = np.ascontiguousarray(self._weighed(grams, count)[2].T)
        caption, image = grams.captions, np.repeat(np.arange(len(images)), sizes)
        starts = np.cumsum(sizes) - sizes
        index, unique = numbered(image[caption] << IMAGE_BITS | grams.places)
        small = grams.counts.max(initial=0) < 256
        counts = np.zeros((len(unique), sizes.max()), np.uint8 if small else np.int32)
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

    def _weighed(self, grams: _NGrams, count: int) -> tuple[Array, Array, Array]:
        """Inverse document frequencies [M], tf-idf weights [M], and the norms [n, count] of the captions' vectors."""
        kinds = self.kinds.take(np.minimum(grams.places, self.size))
        inverse, squares = self.inverses.take(kinds), self.squares.take(kinds)
        weights = grams.counts * inverse
        (repeated,) = np.nonzero(grams.counts > 1)
        squares[repeated] = [weight**2 for weight in weights.take(repeated).tolist()]
        sums = np.bincount(grams.bins, squares, self.n * count)  # each in the order of n-grams
        return inverse, weights, np.sqrt(sums.astype(np.float64, copy=False)).reshape(self.n, count)

    def _ngrams(self, captions: Captions, keep: bool = False) -> _NGrams:
        """The different n-grams of every caption. With ``keep``, those that have no place get one."""
        words, lengths = captions.words, captions.lengths
        total, most, count = len(words), int(words.max(initial=0)) + 1, len(lengths)
        row = np.repeat(np.arange(count), lengths)
        left = np.repeat(np.cumsum(lengths), lengths) - np.arange(total)  # tokens to the caption's end, own included
        positions = again = np.arange(total)  # where n-grams begin, and which of them may stand there again
        keys = row * most + words
        places = np.where(words < self.known_words, words, -1)
        every = []
        for order in range(1, self.n + 1):
            repeats = _repeats(keys, again, total)
            first = positions[repeats.counts.take(positions) > 0]
            own = places.take(first)
            if keep or self._extra:
                self._place_extra(own, words, first, order, keep)
            caption = row.take(first)
            every.append((own, repeats.counts.take(first), caption, (order - 1) * count + caption))
            if order == self.n:
                break
            positions = positions[left.take(positions) > order]
            places = self._longer(places, positions, words.take(positions + order), total)
            again = repeats.positions[left.take(repeats.positions) > order]
            keys = repeats.numbers.take(again) * most + words.take(again + order)
        found, counts, rows, bins = (np.concatenate(parts) for parts in zip(*every, strict=True))
        return _NGrams(found, counts, rows, bins)

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
        (known,) = np.nonzero(places.take(positions) >= 0)
        at = positions.take(known)
        found = self._key_index.find(places.take(at) << WORD_BITS | last.take(known))
        longer = np.full(total, -1)
        longer[at] = np.where(found >= 0, found + self.known_words, -1)
        return longer

    @cached_property
    def plain_words(self) -> dict[str | None, int]:
        """Numbers of the words that need no tokeniser; that of EOS is under None, as no text has it."""
        plain: dict[str | None, int] = {
            word: number for word, number in self.words.items() if number < self.known_words and is_plain(word)
        }
        return plain | {None: min(self.words.get(EOS, self.known_words), self.known_words)}

    def penalties(self, difference: Array) -> Array:
        """The length penalty by the difference in tokens; Python's power, whose last digit NumPy's need not have."""
        table = self.penalty_table(int(difference.max(initial=0)))
        return table[difference]

    def square_table(self, most: int) -> Array:
        """[D, most + 1] squared weights of an n-gram by the index of its inverse document frequency, and its count."""
        return np.array(
            [[(float(count) * inverse) ** 2 for count in range(most + 1)] for inverse in self.inverses.tolist()]
        )

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
    captions: Array
    """[M] the caption."""
    bins: Array
    """[M] (order - 1) * N + caption."""


@dataclass(frozen=True, eq=False)
class _Repeats:
    """Which n-grams of one length stand in their caption more than once. T positions."""

    counts: Array
    """[T] how often the n-gram that begins here occurs in its caption; 0 where it stood before."""
    numbers: Array
    """[T] equal for equal n-grams, where they are repeated."""
    positions: Array
    """Where repeated ones begin."""


def _repeats(keys: Array, positions: Array, total: int) -> _Repeats:
    """Compare n-grams by their ``keys`` [P], which begin at ``positions`` [P]; all others stand once."""
    bits = total.bit_length()
    ordered = np.sort(keys << bits | positions)  # by n-gram of a caption, then by position
    numbers, at = ordered >> bits, ordered & ((1 << bits) - 1)
    new = np.ones(len(ordered) + 1, bool)
    np.not_equal(numbers[1:], numbers[:-1], out=new[1:-1])
    (heads,) = np.nonzero(new)
    number = np.cumsum(new[:-1])
    counts, numbered = np.ones(total, np.int64), np.zeros(total, np.int64)
    counts[at] = 0
    counts[at[heads[:-1]]] = heads[1:] - heads[:-1]
    numbered[at] = number
    return _Repeats(counts, numbered, at[~(new[:-1] & new[1:])])


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


def _products(grams: _NGrams, inverse: Array, weights: Array, owner: Array, bank: Bank, n: int) -> Array:
    """[n, N, R] clipped products of the captions' vectors with those of the references of image ``owner`` [N]."""
    (known,) = np.nonzero(grams.places >= 0)
    rows = bank.rows(grams.places.take(known), owner.take(grams.captions.take(known)))
    (there,) = np.nonzero(rows >= 0)
    both = known.take(there)
    shared = bank.counts.take(rows.take(there), axis=0) * inverse.take(both)[:, None]
    clipped = np.minimum(weights.take(both)[:, None], shared) * shared
    most = shared.shape[1]
    bins = grams.bins.take(both)[:, None] * most + np.arange(most)
    sums = np.bincount(bins.ravel(), clipped.ravel(), n * len(owner) * most)  # each in the order of n-grams
    return sums.astype(np.float64, copy=False).reshape(n, len(owner), most)  # sums of nothing are whole numbers


def squared(values: Array) -> Array:
    """Squares [M] by Python's power, as the reference scorer takes them: NumPy's differ in one last digit of 1,200."""
    index, unique = numbered(values)
    return np.array([value**2 for value in unique.tolist()], np.float64)[index]


def one_after_the_other(values: Array) -> Array:
    """Sum over the last axis, in its order."""
    total = np.zeros(values.shape[:-1])
    for number in range(values.shape[-1]):
        total += values[..., number]
    return total
