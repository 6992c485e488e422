"""N-grams: of one caption in a dict, of packed captions and of corpora in NumPy arrays.

In arrays an n-gram is an integer id. The n-grams of a corpus form a trie: the int64 key
of an n-gram of k >= 2 words is ``id of its first k - 1 words << 32 | id of its last
word``. So the key bounds neither the length of n-grams nor the number of words, and
ascending keys are n-grams in lexicographic order of their words.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
NGram = tuple[str, ...]
Tokens = Sequence[str]

WORD_BITS = 32


def ngram_counts(tokens: Sequence[str], n: int = 4) -> dict[NGram, int]:
    """Count the n-grams of orders 1 to ``n`` of one caption: all unigrams from left to
    right, then all bigrams, ...
    """
    counts: dict[NGram, int] = {}
    for order in range(1, n + 1):
        for ngram in zip(*(tokens[start:] for start in range(order)), strict=False):
            counts[ngram] = counts.get(ngram, 0) + 1
    return counts


class Occurrences(NamedTuple):
    """The P occurrences of the G distinct n-grams of one order in packed captions of T
    words in all; int64 arrays.
    """

    positions: Array  # [P] first word of each occurrence, 0 to T - 1, ascending
    numbers: Array  # [P] its n-gram, 0 to G - 1, valid for this order of this batch
    # [G] number of an n-gram's first k - 1 words among the n-grams of that order; 0 for single
    # words
    prefixes: Array
    words: Array  # [G] id of its last word


def ngram_occurrences(words: Array, lengths: Array, n: int) -> Iterator[Occurrences]:
    """Yield the n-grams of M packed captions for each order from 1 to ``n``.

    ``words`` [T] are the int64 word ids of all captions, concatenated, ``lengths`` [M]
    the words of each caption.
    """
    # Words up to the caption's end, own included.
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))
    vocabulary = int(words.max(initial=0)) + 1
    positions = np.arange(len(words))
    keys = words
    for order in range(1, n + 1):
        unique, numbers = np.unique(keys, return_inverse=True)
        prefixes, last = np.divmod(unique, vocabulary)
        yield Occurrences(positions, numbers, prefixes, last)
        if order == n:
            return
        goes_on = left[positions] > order
        positions = positions[goes_on]
        keys = numbers[goes_on] * vocabulary + words[positions + order]


@dataclass(frozen=True, eq=False)
class NGramTable:
    """The n-grams of a corpus and their counts: V words with the ids 0 to V - 1, then G
    longer n-grams.

    Attributes:
        words: V distinct words in ascending order.
        keys: int64 [G], ascending within each order; the n-gram of ``keys[g]`` has the id V + g.
        counts: int32 or float64 [V + G] by id; -1 for n-grams that are only prefixes of
            counted ones.
        starts: n + 1 offsets; the n-grams of k words have the ids ``starts[k - 1]`` to
            ``starts[k]`` - 1.
    """

    words: tuple[str, ...]
    keys: Array
    counts: Array
    starts: tuple[int, ...]

    @property
    def n(self) -> int:
        """Length of the longest n-grams."""
        return len(self.starts) - 1

    def rows(self, order: int) -> tuple[Array, Array]:
        """Word ids [M, order] int32 of the counted n-grams of ``order`` words,
        ascending, and their counts [M].
        """
        ids = np.arange(self.starts[order - 1], self.starts[order])
        counts = self.counts[ids]
        ids = ids[counts >= 0]
        counts = counts[counts >= 0]
        rows = np.empty((len(ids), order), np.int32)
        for column in range(order - 1, 0, -1):
            keys = self.keys[ids - len(self.words)]
            rows[:, column] = keys & ((1 << WORD_BITS) - 1)
            ids = keys >> WORD_BITS
        rows[:, 0] = ids
        return rows, counts

    def items(self) -> Iterator[tuple[NGram, float]]:
        """Every counted n-gram with its count, by order, then by words."""
        for order in range(1, self.n + 1):
            rows, counts = self.rows(order)
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
                yield tuple([self.words[word] for word in row]), count

    def extend_ngrams(self, ids: Array, words: Array) -> Array:
        """Ids [M] of the n-grams ``ids`` [M], each extended by the word ``words`` [M];
        -1 for unknown n-grams.
        """
        if not len(self.keys):
            return np.full(len(ids), -1)
        queries = ids << WORD_BITS | words  # negative after an unknown prefix, -1
        rows = np.minimum(np.searchsorted(self.keys, queries), len(self.keys) - 1)
        return np.where(self.keys[rows] == queries, rows + len(self.words), -1)


def table_of_rows(
    words: Sequence[str], rows: Sequence[Array], counts: Sequence[Array]
) -> NGramTable:
    """Build a table of V ascending ``words`` from ``rows``, word ids [M, k] for each
    order k, and ``counts``, [M] each.

    Raises:
        ValueError: the rows of an order are not ascending, or a word id is out of range.
    """
    size = len(words)
    n = len(rows)
    for row in rows:
        if row.size and not (row.min() >= 0 and row.max() < size):
            raise ValueError(f"word ids of n-grams are not all in 0 to {size - 1}")
    # Of each row's first words, one word more in each round.
    ids = [row[:, 0].astype(np.int64) for row in rows]
    keys = [np.empty(0, np.int64)]
    starts = [0, size]
    numbers = [np.full(size, -1, np.float64)]
    numbers[0][ids[0]] = counts[0]
    for order in range(2, n + 1):
        extended = [
            before << WORD_BITS | row[:, order - 1]
            for before, row in zip(ids[1:], rows[order - 1 :], strict=True)
        ]
        if (np.diff(extended[0]) <= 0).any():
            raise ValueError(f"n-grams of {order} words are not in ascending order")
        # Also of prefixes that are not counted themselves.
        unique, index = np.unique(np.concatenate(extended), return_inverse=True)
        ends = np.cumsum([0, *map(len, extended)])
        ids = [index[start:end] + starts[-1] for start, end in pairwise(ends)]
        numbers.append(np.full(len(unique), -1, np.float64))
        numbers[-1][index[: ends[1]]] = counts[order - 1]
        keys.append(unique)
        starts.append(starts[-1] + len(unique))
    every = np.concatenate(numbers)
    integral = np.array_equal(every, np.floor(every)) and every.max(initial=0) < 1 << 31
    table_counts = every.astype(np.int32) if integral else every
    return NGramTable(tuple(words), np.concatenate(keys), table_counts, tuple(starts))


def table_of_counts(counts: Mapping[NGram, float], n: int) -> NGramTable:
    """Build a table from a dict. Raises ``ValueError`` if an n-gram has no word or more than ``n``."""
    by_order: list[list[NGram]] = [[] for _ in range(n)]
    for ngram in sorted(counts):
        if not 0 < len(ngram) <= n:
            raise ValueError(
                f"n-gram {ngram!r} has {len(ngram)} words: expected 1 to n = {n}"
            )
        by_order[len(ngram) - 1].append(ngram)
    words = sorted(set(chain.from_iterable(counts)))
    number = {word: index for index, word in enumerate(words)}
    rows = []
    values = []
    for order, ngrams in enumerate(by_order, start=1):
        ids = [number[word] for word in chain.from_iterable(ngrams)]
        rows.append(np.array(ids, np.int32).reshape(-1, order))
        values.append(np.array([counts[ngram] for ngram in ngrams], np.float64))
    return table_of_rows(words, rows, values)


def count_documents(
    documents: Iterable[Sequence[Sequence[str]]], n: int, end: Sequence[str] = ()
) -> tuple[NGramTable, int]:
    """Count in how many documents each n-gram of orders 1 to ``n`` occurs; also return
    the number of documents.

    A document is a list of captions, each a list of tokens, to which the tokens ``end``
    are appended. Takes about 100 bytes a token.
    """
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    tokens = array("q")
    lengths = array("q")
    sizes = array("q")
    for captions in documents:
        sizes.append(len(captions))
        for caption in captions:
            words = [*caption, *end]
            tokens.extend(map(numbers.__getitem__, words))
            lengths.append(len(words))
    vocabulary = sorted(numbers)
    rank = np.empty(
        len(vocabulary), np.int64
    )  # by the order of words, not of first occurrence
    rank[[numbers[word] for word in vocabulary]] = np.arange(len(vocabulary))
    ids = rank[np.array(tokens, np.int64)]
    document = np.repeat(np.repeat(np.arange(len(sizes)), sizes), lengths)  # [T]
    keys: list[Array] = [np.empty(0, np.int64)]
    counts: list[Array] = [np.empty(0, np.int32)]
    starts = [0]
    for order in ngram_occurrences(ids, np.array(lengths), n):
        pairs = np.sort(order.numbers * len(sizes) + document[order.positions])
        pairs = pairs[is_new(pairs)] // len(
            sizes
        )  # the n-gram of each distinct (n-gram, document)
        counts.append(np.bincount(pairs, minlength=len(order.words)).astype(np.int32))
        if len(starts) > 1:
            keys.append((order.prefixes + starts[-2]) << WORD_BITS | order.words)
        starts.append(starts[-1] + len(order.words))
    table = NGramTable(
        tuple(vocabulary), np.concatenate(keys), np.concatenate(counts), tuple(starts)
    )
    return table, len(sizes)


def is_new(ordered: Array) -> Array:
    """Bool [M]: whether a key of an ascending array differs from the one before it."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new
