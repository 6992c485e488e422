"""Counting n-grams: of one caption in a dict, of many captions and of whole corpora in arrays.

In arrays an n-gram is an integer. The n-grams of a corpus form a prefix tree (trie): the key of an n-gram of k words is
the id of its first k - 1 words and the id of its last word, together 64 bits. So neither the length of n-grams nor the
number of words is bounded by the key, and sorting the keys sorts the n-grams word by word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
NGram = tuple[str, ...]

WORD_BITS = 32
CHUNK_TOKENS = 1 << 20
"""Tokens that are counted at once; they and their n-grams take about 100 MB."""


def ngram_counts(tokens: Sequence[str], n: int = 4) -> dict[NGram, int]:
    """Count the n-grams of orders 1 to ``n`` of one caption: all unigrams from left to right, then all bigrams, ..."""
    counts: dict[NGram, int] = {}
    for order in range(1, n + 1):
        for ngram in zip(*(tokens[start:] for start in range(order)), strict=False):
            counts[ngram] = counts.get(ngram, 0) + 1
    return counts


class Occurrences(NamedTuple):
    """All P occurrences of the G different n-grams of one order in a ragged batch of captions, T words in all."""

    positions: Array
    """[P] where each one begins among the T words, ascending."""
    numbers: Array
    """[P] number of its n-gram, 0 to G - 1; numbers hold within this batch and order only."""
    prefixes: Array
    """[G] number of an n-gram's first words among the n-grams one word shorter; 0 for single words."""
    words: Array
    """[G] id of its last word."""


def ngram_occurrences(words: Array, lengths: Array, n: int) -> Iterator[Occurrences]:
    """Find the n-grams of captions, order by order from 1 to ``n``.

    Args:
        words: [T] word ids of all captions, one after the other.
        lengths: [M] words of each caption.
        n: longest n-grams.
    """
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))  # words to the caption's end, own included
    vocabulary = int(words.max(initial=0)) + 1
    positions, keys = np.arange(len(words)), words
    for order in range(1, n + 1):
        numbers, unique = numbered(keys)
        prefixes, last = np.divmod(unique, vocabulary)
        yield Occurrences(positions, numbers, prefixes, last)
        if order == n:
            return
        goes_on = left[positions] > order
        positions = positions[goes_on]
        keys = numbers[goes_on] * vocabulary + words[positions + order]


@dataclass(frozen=True, eq=False)
class NGramTable:
    """The n-grams of up to ``n`` words of a corpus, ascending by length, then by words. V words, G longer n-grams.

    Attributes:
        words: V different words, ascending; a word's index is its id.
        keys: [G] ascending int64: id of the first words * 2^32 + id of the last word. The n-gram of ``keys[g]`` has the
            id V + g.
        counts: [V + G] by id; -1 for n-grams that are there only because a counted one begins with them.
        starts: n + 1 ids: n-grams of k words have the ids from ``starts[k - 1]`` up to, not including, ``starts[k]``.
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
        """Word ids [M, order] int32 of the counted n-grams of ``order`` words, ascending, and their counts [M]."""
        ids = np.arange(self.starts[order - 1], self.starts[order])
        counts = self.counts[ids]
        ids, counts = ids[counts >= 0], counts[counts >= 0]
        rows = np.empty((len(ids), order), np.int32)
        for column in range(order - 1, 0, -1):
            keys = self.keys[ids - len(self.words)]
            rows[:, column] = keys & ((1 << WORD_BITS) - 1)
            ids = keys >> WORD_BITS
        rows[:, 0] = ids
        return rows, counts

    def extended(self, ids: Array, words: Array) -> Array:
        """Ids [M] of the n-grams that are those of ``ids`` [M] and one word of ``words`` [M]; -1 for unknown ones."""
        found = find(self.keys, ids << WORD_BITS | words)  # negative for an unknown beginning
        return np.where(found < 0, -1, found + len(self.words))

    def most_frequent(self) -> tuple[NGram, float]:
        """The n-gram with the highest count, and that."""
        most = int(np.argmax(self.counts))
        order = next(order for order in range(1, self.n + 1) if most < self.starts[order])
        rows, counts = self.rows(order)
        first = int(np.argmax(counts))
        return tuple(self.words[number] for number in rows[first]), counts[first].item()

    def ngrams(self, order: int) -> list[NGram]:
        """The counted n-grams of ``order`` words, ascending."""
        words = self.words
        return [tuple([words[number] for number in row]) for row in self.rows(order)[0].tolist()]


def find(keys: Array, wanted: Array) -> Array:
    """Index of each of ``wanted`` [M] in the ascending ``keys``, -1 where it is not among them."""
    if not len(keys):
        return np.full(len(wanted), -1)
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[found] == wanted, found, -1)


def table_of_rows(words: Sequence[str], rows: Sequence[Array], counts: Sequence[Array]) -> NGramTable:
    """Make a table.

    Args:
        words: V words, ascending.
        rows: for each length k from 1 on, [M, k] word ids, rows in ascending order.
        counts: for each k, [M] counts.

    Raises:
        ValueError: rows are not ascending, or a word id is out of range.
    """
    for row in rows:
        if row.size and not (row.min() >= 0 and row.max() < len(words)):
            wrong = row.min() if row.min() < 0 else row.max()
            raise ValueError(f"an n-gram has the word id {wrong}: expected 0 to {len(words) - 1}")
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
        ids = row[:, 0].astype(np.int64)
        for column in range(1, row.shape[1] - 1):
            found = find(keys, ids << WORD_BITS | row[:, column])
            if (found < 0).any():
                return None
            ids = found + size
        new = ids << WORD_BITS | row[:, -1]
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
    """[M] number of their first words among the part's n-grams one word shorter; unused for single words."""
    words: Array
    """[M] ids of their last words."""
    counts: Array
    """[M] documents of the part."""


def _count_chunk(words: Array, lengths: Array, sizes: Array, n: int) -> list[_Counted]:
    """Count the n-grams of each length.

    Args:
        words: [T] word ids of all captions, one after the other.
        lengths: [C] tokens of each caption.
        sizes: [D] captions of each document.
        n: longest n-grams.
    """
    documents = np.repeat(np.repeat(np.arange(len(sizes)), sizes), lengths)
    span = len(sizes)
    found = []
    for order in ngram_occurrences(words, lengths, n):
        pairs = np.sort(order.numbers * span + documents[order.positions])  # one for each n-gram of each document
        pairs = pairs[is_new(pairs)] // span
        counts = np.bincount(pairs, minlength=len(order.words))
        found.append(_Counted(order.prefixes.astype(np.int32), order.words.astype(np.int32), counts.astype(np.int32)))
    return found


def numbered(keys: Array) -> tuple[Array, Array]:
    """``np.unique`` with ``return_inverse``, faster because it sorts: inverse [M], unique keys [G]."""
    ranks = np.argsort(keys)
    ordered = keys[ranks]
    new = is_new(ordered)
    index = np.empty(len(keys), np.int64)
    index[ranks] = np.cumsum(new) - 1
    return index, ordered[new]


def compact(counts: Array) -> Array:
    """Counts as int32 where they are whole, else as float64."""
    whole = np.array_equal(counts, np.floor(counts)) and counts.max(initial=0) < 1 << 31
    return counts.astype(np.int32 if whole else np.float64)


def is_new(ordered: Array) -> Array:
    """[M] whether a key of an ascending array differs from the one before it."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new


def _merged(numbers: Mapping[str, int], parts: list[list[_Counted]], n: int) -> NGramTable:
    """One table of all parts; ``parts`` is used up."""
    words = sorted(numbers)
    rank = np.empty(len(words), np.int64)
    rank[np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))] = np.arange(len(words))
    counts = [np.zeros(len(words), np.int64)]
    ids = []  # of the n-grams of every part
    for part in parts:
        own = part[0]
        ids.append(rank[own.words])
        counts[0][ids[-1]] += own.counts
    keys, starts = [np.empty(0, np.int64)], [0, len(words)]
    for order in range(1, n):
        every = [before[part[order].prefixes] << WORD_BITS | rank[part[order].words]
                 for before, part in zip(ids, parts, strict=True)]  # fmt: skip
        ends = np.cumsum([0, *map(len, every)])
        found, unique = numbered(np.concatenate(every) if every else keys[0])
        del every
        total = np.zeros(len(unique), np.int64)
        for part, (start, end) in zip(parts, pairwise(ends), strict=True):
            total[found[start:end]] += part[order].counts  # different ones within a part
            part[order - 1] = part[order]
        ids = [found[start:end] + starts[-1] for start, end in pairwise(ends)]
        keys.append(unique)
        counts.append(total)
        starts.append(starts[-1] + len(unique))
    return NGramTable(tuple(words), np.concatenate(keys), np.concatenate(counts).astype(np.int32), tuple(starts))
