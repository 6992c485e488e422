"""Very many different n-grams and a count of each, as three arrays, with a number (its place) for every n-gram.

The n-grams form a tree: one of k words is the place of its first k - 1 words and the number of its last word, together
one 64-bit key. So neither the length of n-grams nor the number of words is bounded by the key, no n-gram is a Python
object, and sorting the keys sorts the n-grams word by word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
NGram = tuple[str, ...]

WORD_BITS = 32
CHUNK_TOKENS = 1 << 20
"""Tokens that are counted at once; they and their n-grams take about 100 MB."""


@dataclass(frozen=True, eq=False)
class NGramTable:
    """The n-grams of up to ``n`` words of a corpus, ascending by length, then by words. V words, G longer n-grams.

    Attributes:
        words: V different words, ascending; a word's index is its place.
        keys: [G] ascending int64: place of the first words * 2^32 + number of the last one. Entry g has place V + g.
        counts: [V + G] by place; -1 for what is there only because a counted n-gram begins with it.
        starts: n + 1 places: n-grams of k words have the places from ``starts[k - 1]`` to ``starts[k]``.
    """

    words: tuple[str, ...]
    keys: Array
    counts: Array
    starts: tuple[int, ...]

    @property
    def n(self) -> int:
        """Length of the longest n-grams."""
        return len(self.starts) - 1

    def __len__(self) -> int:
        """Return the number of counted n-grams."""
        return int(np.count_nonzero(self.counts >= 0))

    def rows(self, order: int) -> tuple[Array, Array]:
        """Word numbers [M, order] int32 of the counted n-grams of ``order`` words, ascending, and their counts [M]."""
        places = np.arange(self.starts[order - 1], self.starts[order])
        counts = self.counts[places]
        places, counts = places[counts >= 0], counts[counts >= 0]
        rows = np.empty((len(places), order), np.int32)
        for column in range(order - 1, 0, -1):
            keys = self.keys[places - len(self.words)]
            rows[:, column] = keys & ((1 << WORD_BITS) - 1)
            places = keys >> WORD_BITS
        rows[:, 0] = places
        return rows, counts

    def most_frequent(self) -> tuple[NGram, float]:
        """The n-gram with the highest count, and that."""
        place = int(np.argmax(self.counts))
        order = next(order for order in range(1, self.n + 1) if place < self.starts[order])
        rows, counts = self.rows(order)
        first = int(np.argmax(counts))
        return tuple(self.words[number] for number in rows[first]), counts[first].item()

    def ngrams(self, order: int) -> list[NGram]:
        """The counted n-grams of ``order`` words, ascending."""
        words = self.words
        return [tuple([words[number] for number in row]) for row in self.rows(order)[0].tolist()]


def find(keys: Array, wanted: Array) -> Array:
    """Index of each of ``wanted`` [M] in the ascending ``keys``, -1 for what is not there."""
    if not len(keys):
        return np.full(len(wanted), -1)
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[found] == wanted, found, -1)


def table_of_rows(words: Sequence[str], rows: Sequence[Array], counts: Sequence[Array]) -> NGramTable:
    """Make a table.

    Args:
        words: V words, ascending.
        rows: for each length k from 1 on, [M, k] word numbers, ascending by rows.
        counts: for each k, [M] counts.

    Raises:
        ValueError: rows are not ascending, or name a word that is not there.
    """
    for row in rows:
        if row.size and not (row.min() >= 0 and row.max() < len(words)):
            wrong = row.min() if row.min() < 0 else row.max()
            raise ValueError(f"an n-gram has the word number {wrong}: expected 0 to {len(words) - 1}")
    made = _table_of_closed_rows(words, rows, counts)
    if made is None:
        made = _table_of_closed_rows(words, *_with_beginnings(rows, counts))
    assert made is not None
    return made


def _table_of_closed_rows(words: Sequence[str], rows: Sequence[Array], counts: Sequence[Array]) -> NGramTable | None:
    """The table, or None where an n-gram begins with one that is not among ``rows`` (a single word may be missing)."""
    size = len(words)
    keys = np.empty(0, np.int64)
    own = np.full(size, -1, counts[0].dtype)
    own[rows[0][:, 0]] = counts[0]
    starts = [0, size]
    for row in rows[1:]:
        places = row[:, 0].astype(np.int64)
        for column in range(1, row.shape[1] - 1):
            found = find(keys, places << WORD_BITS | row[:, column])
            if (found < 0).any():
                return None
            places = found + size
        new = places << WORD_BITS | row[:, -1]
        if (new[1:] <= new[:-1]).any():
            raise ValueError(f"n-grams of {row.shape[1]} words are not in ascending order")
        keys = np.concatenate([keys, new])
        starts.append(starts[-1] + len(new))
    return NGramTable(tuple(words), keys, compact(np.concatenate([own, *counts[1:]])), tuple(starts))


def _with_beginnings(rows: Sequence[Array], counts: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Rows with those added that others begin with; these get the count -1."""
    every, numbers = list(rows), list(counts)
    for order in range(len(every) - 1, 0, -1):
        both = np.concatenate([every[order - 1], every[order][:, :-1]])
        unique, first = np.unique(both, axis=0, return_index=True)
        added = np.full(len(every[order]), -1, numbers[order - 1].dtype)
        every[order - 1], numbers[order - 1] = unique, np.concatenate([numbers[order - 1], added])[first]
    return every, numbers


def table_of_counts(counts: Mapping[NGram, float], n: int) -> NGramTable:
    """A table of n-grams that were counted before.

    Raises:
        ValueError: an n-gram has no word or more than ``n``.
    """
    by_order: list[list[NGram]] = [[] for _ in range(n + 1)]
    for ngram in counts:
        if not 0 < len(ngram) <= n:
            raise ValueError(f"n-gram {ngram!r} has {len(ngram)} words: expected 1 to n = {n}")
        by_order[len(ngram)].append(ngram)
    words = sorted(set(chain.from_iterable(counts)))
    number = {word: index for index, word in enumerate(words)}
    rows, numbers = [], []
    for order, ngrams in enumerate(by_order[1:], start=1):
        flat = np.fromiter(map(number.__getitem__, chain.from_iterable(ngrams)), np.int32, order * len(ngrams))
        row = flat.reshape(-1, order)
        count = np.fromiter((counts[ngram] for ngram in ngrams), np.float64, len(ngrams))
        ranks = np.lexsort(row.T[::-1])
        rows.append(row[ranks])
        numbers.append(count[ranks])
    return table_of_rows(words, rows, numbers)


def count_documents(
    documents: Iterable[Sequence[Sequence[str]]], n: int, end: Sequence[str] = ()
) -> tuple[NGramTable, int]:
    """Count in how many documents each n-gram occurs; memory grows with the different n-grams, not with the corpus.

    Args:
        documents: for each document the tokens of each of its captions.
        n: longest n-grams, at least 1.
        end: tokens to be added to every caption.

    Returns:
        The table and the number of documents.
    """
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    parts: list[list[_Counted]] = []
    texts: list[str] = []
    lengths: list[int] = []
    sizes: list[int] = []
    total = 0

    def close() -> None:
        if texts:
            words = np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
            parts.append(_count_chunk(words, np.array(lengths), np.array(sizes), n))
        for part in (texts, lengths, sizes):
            part.clear()

    for captions in documents:
        total += 1
        sizes.append(len(captions))
        for tokens in captions:
            texts.extend(tokens)
            texts.extend(end)
            lengths.append(len(tokens) + len(end))
        if len(texts) >= CHUNK_TOKENS:
            close()
    close()
    return _merged(numbers, parts, n), total


@dataclass(frozen=True, eq=False)
class _Counted:
    """Different n-grams of one length of a part of the corpus, in the order of their keys."""

    prefixes: Array
    """[M] places of their first words among the n-grams of the part that are one word shorter; unused for words."""
    words: Array
    """[M] numbers of their last words."""
    counts: Array
    """[M] documents of the part."""


def _count_chunk(words: Array, lengths: Array, sizes: Array, n: int) -> list[_Counted]:
    """Count the n-grams of each length.

    Args:
        words: [T] word numbers of all captions, one after the other.
        lengths: [C] tokens of each caption.
        sizes: [D] captions of each document.
        n: longest n-grams.
    """
    documents = np.repeat(np.repeat(np.arange(len(sizes)), sizes), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # tokens to the caption's end, own included
    most, span = int(words.max()) + 1, len(sizes)
    positions, keys = np.arange(len(words)), words
    found = []
    for order in range(1, n + 1):
        places, unique = numbered(keys)
        pairs = np.sort(places * span + documents[positions])  # one for each n-gram of each document
        pairs = pairs[_new(pairs)] // span
        counts = np.bincount(pairs, minlength=len(unique))
        prefixes, last = np.divmod(unique, most)
        found.append(_Counted(prefixes.astype(np.int32), last.astype(np.int32), counts.astype(np.int32)))
        goes_on = left[positions] > order
        positions = positions[goes_on]
        keys = places[goes_on] * most + words[positions + order]
    return found


def numbered(keys: Array) -> tuple[Array, Array]:
    """Index [M] of each key among the different ones, and those, ascending. (``np.unique`` hashes: it takes longer.)"""
    ranks = np.argsort(keys)
    ordered = keys[ranks]
    new = _new(ordered)
    places = np.empty(len(keys), np.int64)
    places[ranks] = np.cumsum(new) - 1
    return places, ordered[new]


def compact(counts: Array) -> Array:
    """Counts as int32 where they are whole, else as float64."""
    whole = np.array_equal(counts, np.floor(counts)) and counts.max(initial=0) < 1 << 31
    return counts.astype(np.int32 if whole else np.float64)


def _new(ordered: Array) -> Array:
    """[M] whether an ascending key differs from the one before it."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new


def _merged(numbers: Mapping[str, int], parts: list[list[_Counted]], n: int) -> NGramTable:
    """One table of all parts; ``parts`` is used up."""
    words = sorted(numbers)
    rank = np.empty(len(words), np.int64)
    rank[np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))] = np.arange(len(words))
    counts = [np.zeros(len(words), np.int64)]
    places = []  # of the n-grams of every part
    for part in parts:
        own = part[0]
        places.append(rank[own.words])
        counts[0][places[-1]] += own.counts
    keys, starts = [np.empty(0, np.int64)], [0, len(words)]
    for order in range(1, n):
        every = [before[part[order].prefixes] << WORD_BITS | rank[part[order].words]
                 for before, part in zip(places, parts, strict=True)]  # fmt: skip
        ends = np.cumsum([0, *map(len, every)])
        found, unique = numbered(np.concatenate(every) if every else keys[0])
        del every
        total = np.zeros(len(unique), np.int64)
        for part, (start, end) in zip(parts, pairwise(ends), strict=True):
            total[found[start:end]] += part[order].counts  # different ones within a part
            part[order - 1] = part[order]
        places = [found[start:end] + starts[-1] for start, end in pairwise(ends)]
        keys.append(unique)
        counts.append(total)
        starts.append(starts[-1] + len(unique))
    return NGramTable(tuple(words), np.concatenate(keys), np.concatenate(counts).astype(np.int32), tuple(starts))
