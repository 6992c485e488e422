"""CIDEr-D: tf-idf weighted n-gram agreement of a caption with the captions people wrote
for its image.

Source: Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description
Evaluation", CVPR 2015, section 6. For a candidate c, the R references s_r of its image,
and n-gram orders k = 1 to n (4):

    g_k(x)        tf-idf vector of x: count of each n-gram of order k in x, times its idf
    idf           ln D - ln max(1, df), df of D documents (``DocumentFrequencies``)
    sim_k(c, s)   min(g_k(c), g_k(s)) · g_k(s) / (|g_k(c)| |g_k(s)|), min taken elementwise
    CIDEr-D(c)    10 / (n R) Σ_k Σ_r exp(-(l(c) - l(s_r))² / (2 σ²)) sim_k(c, s_r), with lengths l and σ = 6

The COCO toolkit and every paper that uses it call this "CIDEr". Scores here are in [0,
10], as the toolkit's; papers print them times 100: a corpus score of 1.30 here is the
"CIDEr 130.0" of a table.
"""

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import PositiveFloat

from rewards.base import (
    as_texts,
    checked_scores,
    eos_captions,
    reference_lists,
    required_column,
)
from rewards.options import Count, check_values
from rewards.text.document_frequency import EOS, DocumentFrequencies, load_legacy_pickle
from rewards.text.ngrams import Array, Tokens, is_new, ngram_occurrences
from rewards.text.tokenize import TOKENIZER, tokenizer_of

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 18
"""Tokens of candidates and references in one batch of the computation."""
CACHED_IMAGES = 200_000
"""Images whose tokenised references a process keeps, about 1 kB each: more than a
training split, as an epoch visits each image one time.
"""
SIGNATURE_PARTS = (
    "NO<EOS>: EOS is no token (STANDARD: it is one); w/oInit: document frequencies of "
    "the scored references (wInit: given ones); n and s: longest n-gram, sigma"
)
"""Meaning of the parts of CIDEr-D's signature."""
CIDER_DIFFERENCES = (
    "As a reward, CIDEr-D counts the end of a caption (EOS) as a token and takes "
    "document frequencies from the training split, unless set otherwise. Validation "
    "and evaluation leave EOS out and take them from the references of the captioned "
    "images, so that the same captions have other scores there."
)


def cider_d(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int = 4,
    sigma: float = 6.0,
) -> list[float]:
    """Compute CIDEr-D of N tokenised candidates: N scores in [0, 10].

    Equal to the reference scorer (pycocoevalcap) to the last bit: sums are taken in its
    order, over a candidate's n-grams as they first occur, then over references, then
    over orders, and logarithms and powers number by number. A candidate equal to its
    only reference gets 10; an image whose references have only n-grams with idf 0 gives
    0.

    Args:
        candidates: [N] token lists, ending with EOS if ``df.eos``, as ``references``
            do.
        references: [N] lists of token lists, at least one each; a list that several
            candidates share (the same object) is counted once.
        df: document frequencies.
        n: longest n-grams; all orders weigh the same.
        sigma: width of the length penalty, in tokens.

    Raises:
        ValueError: numbers of candidates and references differ, an image has no
            reference, or ``n`` is above ``df.n``.
    """
    if df.n < n:
        raise ValueError(
            f"the document frequencies count n-grams up to {df.n}, not n = {n}"
        )
    for row, captions in enumerate(references):
        if not captions:
            raise ValueError(
                f"candidate {row} has no reference: CIDEr needs at least one"
            )
    scores: list[float] = []
    start = tokens = 0
    for stop, (candidate, captions) in enumerate(
        zip(candidates, references, strict=True), start=1
    ):
        tokens += len(candidate) + sum(map(len, captions))
        if tokens >= MOST_TOKENS or stop == len(candidates):
            scores += _batch_scores(
                candidates[start:stop], references[start:stop], df, n, sigma
            ).tolist()
            start = stop
            tokens = 0
    return scores


def _batch_scores(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int,
    sigma: float,
) -> Array:
    """Scores [N], float64, of N candidates for B images.

    The M captions are packed: the N candidates, then the references of image 0, of
    image 1, ... The P pairs are each candidate with each reference of its image, by
    candidate.
    """
    images = {id(group): group for group in references}
    row = dict(zip(images, range(len(images)), strict=True))
    image = np.fromiter(
        (row[id(group)] for group in references), np.int64, len(references)
    )  # [N]
    # [B] references of each image
    sizes = np.fromiter(map(len, images.values()), np.int64, len(images))
    captions = [*candidates, *chain.from_iterable(images.values())]
    lengths = np.fromiter(map(len, captions), np.int64, len(captions))  # [M]
    image_of = np.concatenate([image, np.repeat(np.arange(len(images)), sizes)])  # [M]

    candidate = np.repeat(
        np.arange(len(candidates)), sizes[image]
    )  # [P] index among the captions
    # [N] index among the captions
    first_reference = (np.cumsum(sizes) - sizes + len(candidates))[image]
    first_pair = np.cumsum(sizes[image]) - sizes[image]  # [N]
    # [P] index among the captions
    reference = np.arange(len(candidate)) + (first_reference - first_pair)[candidate]
    penalties = _length_penalties(lengths[candidate], lengths[reference], sigma)
    total = np.zeros(len(candidates))
    for vectors in _vectors(captions, lengths, df, n):
        candidates_shared, references_shared = _match_entries(
            vectors, image_of, len(candidates)
        )
        others = vectors.weights[references_shared]
        products = np.minimum(vectors.weights[candidates_shared], others) * others
        pair = (
            vectors.captions[references_shared]
            + (first_pair - first_reference)[vectors.captions[candidates_shared]]
        )
        # bincount adds in the order of its input; of an empty one it returns integers.
        values = np.bincount(pair, products, len(candidate)).astype(
            np.float64, copy=False
        )
        scale = vectors.norms[candidate] * vectors.norms[reference]
        values = np.divide(values, scale, out=values, where=scale != 0) * penalties
        total += np.bincount(candidate, values, len(candidates))
    return total / n / sizes[image] * 10.0


class _Vectors(NamedTuple):
    """Sparse tf-idf vectors of M captions for one order: E entries, by caption, then by
    first occurrence in it.
    """

    captions: Array  # [E] int64, caption, 0 to M - 1
    numbers: Array  # [E] int64, n-gram, 0 to ``distinct`` - 1
    weights: Array  # [E] float64, count of the n-gram in the caption times its idf
    norms: Array  # [M] float64, Euclidean norms
    distinct: int  # number of distinct n-grams


def _vectors(
    captions: Sequence[Tokens], lengths: Array, df: DocumentFrequencies, n: int
) -> Iterator[_Vectors]:
    """Yield the tf-idf vectors of M captions (``lengths`` [M]) for each order from 1 to ``n``."""
    word_ids = df.word_ids
    # Further ids, for words that the document frequencies lack.
    unknown: defaultdict[str, int] = defaultdict()
    unknown.default_factory = lambda: len(word_ids) + len(unknown)
    ids_of_words = (
        word_ids[word] if word in word_ids else unknown[word]
        for word in chain.from_iterable(captions)
    )
    words = np.fromiter(ids_of_words, np.int64, int(lengths.sum()))
    caption = np.repeat(np.arange(len(captions)), lengths)
    # Ids of the order's distinct n-grams in the table of document frequencies.
    ids = np.empty(0, np.int64)
    for order, occurrences in enumerate(ngram_occurrences(words, lengths, n), start=1):
        if order == 1:
            ids = np.where(occurrences.words < len(word_ids), occurrences.words, -1)
        else:
            ids = df.table.extend_ngrams(ids[occurrences.prefixes], occurrences.words)
        # Group the occurrences by (caption, n-gram): the first of each group, and its size.
        keys = (
            caption[occurrences.positions] * len(occurrences.words)
            + occurrences.numbers
        )
        ranks = np.argsort(keys, kind="stable")
        (starts,) = np.nonzero(is_new(keys[ranks]))
        counts = np.diff(np.append(starts, len(keys)))
        by_occurrence = np.argsort(ranks[starts])
        first = ranks[starts][by_occurrence]
        counts = counts[by_occurrence]
        rows = caption[occurrences.positions[first]]
        numbers = occurrences.numbers[first]
        inverse, squares = df.inverses(ids[numbers])
        weights = counts * inverse
        (repeated,) = np.nonzero(counts > 1)
        squares[repeated] = [weight**2 for weight in weights[repeated].tolist()]
        norms = np.sqrt(
            np.bincount(rows, squares, len(captions)).astype(np.float64, copy=False)
        )
        yield _Vectors(rows, numbers, weights, norms, len(occurrences.words))


def _match_entries(
    vectors: _Vectors, image_of: Array, candidates: int
) -> tuple[Array, Array]:
    """Match the entries of candidates, which come first, with references' entries of
    the same image and n-gram.

    ``image_of`` [M] is the image of each caption. Returns two index arrays [S] into the
    E entries: candidates' entries, ascending, and references' entries.
    """
    keys = image_of[vectors.captions] * vectors.distinct + vectors.numbers
    split = int(np.searchsorted(vectors.captions, candidates))
    ranks = np.argsort(keys[split:], kind="stable")
    ordered = keys[split:][ranks]
    start = np.searchsorted(ordered, keys[:split], side="left")
    times = np.searchsorted(ordered, keys[:split], side="right") - start
    entries = np.repeat(np.arange(split), times)
    nth = np.arange(len(entries)) - np.repeat(np.cumsum(times) - times, times)
    return entries, ranks[start[entries] + nth] + split


def _length_penalties(candidates: Array, references: Array, sigma: float) -> Array:
    """Length penalties [P] of P pairs, from their numbers of tokens, [P] and [P].

    The reference scorer compares numbers of bigrams: the same differences, except for
    captions without a token, which score 0 whatever the penalty. Powers are Python's;
    NumPy's may differ in the last bit.
    """
    difference = np.abs(candidates - references)
    table = [
        math.e ** (-(float(gap) ** 2) / (2 * sigma**2))
        for gap in range(int(difference.max(initial=0)) + 1)
    ]
    return np.array(table)[difference]


class CiderD:
    """CIDEr-D of each caption against its image's references, in [0, 10]; papers print
    it times 100.

    Captions and references are given untokenised. With EOS as a token, ``<eos>`` ends
    every reference, every document and every candidate whose ``finished`` column is
    true. Without it, captions that break off ("a man with a") score too high, and
    training finds them.

    Source: Vedantam et al., CVPR 2015, section 6; EOS as in Hu, Cavicchioli and
    Capotondi, "A request for clarity over the End of Sequence token in the
    Self-Critical Sequence Training" (SacreEOS), 2023.

    Args:
        df: document frequencies of the training split, or a file of them (``.npz``, or
            a legacy ``.p`` / ``.pkl``). None takes them from the references of each
            call, one document per distinct image: right for scoring complete files,
            wrong for training, where a batch is no corpus.
        eos: EOS is a token.
        n: longest n-grams, at least 1.
        sigma: width of the length penalty in tokens, above 0.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``.

    Raises:
        ValueError: a parameter is out of range, or ``df`` was counted with other
            tokens, EOS or n-gram orders.
    """

    __name__ = "cider"
    columns = frozenset({"references"})
    bounds = (0.0, 10.0)

    def __init__(
        self,
        df: DocumentFrequencies | str | Path | None = None,
        eos: bool = True,
        n: int = 4,
        sigma: float = 6.0,
        tokenizer: str = TOKENIZER,
    ) -> None:
        check_values(Count, n=n)
        check_values(PositiveFloat, sigma=sigma)
        self.tokenizer = tokenizer
        self._tokenize = tokenizer_of(tokenizer)
        self._warned = False
        if isinstance(df, str | Path):
            is_pickle = Path(df).suffix in (".p", ".pkl", ".pickle")
            df = load_legacy_pickle(df) if is_pickle else DocumentFrequencies.load(df)
        self.df = df
        self.eos = eos
        self.n = n
        self.sigma = sigma
        counted = {"eos": eos, "tokenizer": tokenizer}
        for name, value in counted.items() if df is not None else ():
            if getattr(df, name) != value:
                raise ValueError(
                    f"the document frequencies were counted with {name}={getattr(df, name)!r}, the "
                    f"reward has {value!r}: count them again"
                )
        if df is not None and df.n < n:
            raise ValueError(f"the document frequencies have n-grams up to {df.n}")

    @property
    def signature(self) -> str:
        """Variant in the style of SacreEOS, such as
        ``STANDARD_wInit+Cider-D[n4,s6.0]+df[1fb8e70b]``.

        The last parts are the start of the fingerprint of given document frequencies,
        and a tokenizer other than ``ptb``.
        """
        standard = "STANDARD" if self.eos else "NO<EOS>"
        init = "w/oInit" if self.df is None else "wInit"
        counted = "" if self.df is None else f"+df[{self.df.fingerprint[:8]}]"
        tokens = "" if self.tokenizer == TOKENIZER else f"+tokenizer:{self.tokenizer}"
        return f"{standard}_{init}+Cider-D[n{self.n},s{float(self.sigma)}]{counted}{tokens}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references``.

        ``finished`` (N booleans, absent: all true) says which captions end with EOS;
        where ``df`` is None, ``image_id`` (N strings) tells images apart or, without
        it, their references do.

        Raises:
            RewardError: a column is missing or has another shape, a row has no
                reference, or a reference is not a string.
        """
        texts = as_texts(completions)
        keys = reference_lists(columns, self.__name__, len(texts))
        ended = eos_captions(self, columns, len(texts))
        if not texts:
            return []
        references = {
            key: _reference_tokens(key, self.tokenizer, self.eos)
            for key in dict.fromkeys(keys)
        }
        df = self.df
        if df is None:
            identities: Sequence[Any] = keys
            if columns.get("image_id") is not None:
                identities = required_column(
                    columns, "image_id", self.__name__, len(texts)
                )
            images = dict(zip(identities, keys, strict=True)).values()
            df = DocumentFrequencies.from_texts(
                images, eos=self.eos, n=self.n, tokenizer=self.tokenizer
            )
        candidates = [self._tokenize(text) for text in texts]
        for tokens, finished in zip(candidates, ended, strict=True):
            if finished:
                tokens.append(EOS)
        rows = [references[key] for key in keys]
        scores = cider_d(candidates, rows, df, self.n, self.sigma)
        if not any(scores) and not self._warned and df.all_zero:
            self._warned = True
            logger.warning(
                "WARNING: reward %r is 0 for every caption: all documents (%d) have "
                "every n-gram, so its weight is 0. Set df to document frequencies of "
                "more images",
                self.__name__,
                df.documents,
            )
        # Rounding may exceed the largest score in the last digit.
        return checked_scores(
            self, [min(score, self.bounds[1]) for score in scores], len(texts)
        )


@lru_cache(maxsize=CACHED_IMAGES)
def _reference_tokens(
    captions: tuple[str, ...], tokenizer: str, eos: bool
) -> list[list[str]]:
    """Tokens of the references of an image. They are interned: equal words are one object."""
    split = tokenizer_of(tokenizer)
    end = [EOS] if eos else []
    return [[*map(sys.intern, split(caption)), *end] for caption in captions]
