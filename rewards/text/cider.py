"""CIDEr and CIDEr-D: tf-idf weighted n-gram agreement of a caption with the captions people wrote for its image.

Source: Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015 (section 4
for CIDEr, section 6 for CIDEr-D). What the COCO toolkit and every paper that uses it call "CIDEr" is CIDEr-D.

Scale: scores here are in [0, 10], as the toolkit's are. Papers print the toolkit's CIDEr times 100: a corpus score of
1.30 here is the "CIDEr 130.0" of a table.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rewards.base import as_texts, checked_scores, required_column
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.legacy_pickle import load_legacy_pickle
from rewards.text.ngrams import Array, is_new, ngram_occurrences
from rewards.text.references import reference_lists
from rewards.text.tokenize import TOKENIZER, tokenizer_of

logger = logging.getLogger(__name__)
Tokens = Sequence[str]

MOST_TOKENS = 1 << 18
"""Tokens of candidates and references that are scored at once."""


def cider_d(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int = 4,
    sigma: float = 6.0,
) -> list[float]:
    """Compute CIDEr-D of N tokenised candidates, each in [0, 10]; a candidate equal to its only reference gets 10.

    Equal to the reference scorer (pycocoevalcap) to the last bit: sums are taken in its order, over a candidate's
    n-grams as they first occur, then over references, then over orders, and logarithms and powers one by one.

    Args:
        candidates: [N] token lists.
        references: [N] lists of token lists, at least one each. Candidates of one image may share one list (the same
            object), whose n-grams are then counted once.
        df: document frequencies. EOS is the caller's: append it to both sides if ``df`` has it.
        n: longest n-grams; all orders weigh the same.
        sigma: width of the length penalty exp(-(l_c - l_r)^2 / (2 sigma^2)), in tokens.

    Returns:
        N scores. An image whose references have only n-grams that are in every document gives 0.

    Raises:
        ValueError: the numbers of candidates and references differ, an image has no reference, or ``df`` has
            shorter n-grams than ``n``.
    """
    return _scores(candidates, references, df, n, sigma)


def cider(
    candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], df: DocumentFrequencies, n: int = 4
) -> list[float]:
    """Compute the original CIDEr, without clipping and length penalty, in [0, 10]. Arguments as for ``cider_d``."""
    return _scores(candidates, references, df, n, None)


def _scores(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int,
    sigma: float | None,
) -> list[float]:
    """CIDEr-D, or with ``sigma`` None CIDEr."""
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates and {len(references)} lists of references: expected as many")
    if df.n < n:
        raise ValueError(f"the document frequencies count n-grams up to {df.n}, CIDEr was asked for n = {n}")
    for row, captions in enumerate(references):
        if not captions:
            raise ValueError(f"candidate {row} has no reference: CIDEr needs at least one")
    scores: list[float] = []
    start = tokens = 0
    for stop, (candidate, captions) in enumerate(zip(candidates, references, strict=True), start=1):
        tokens += len(candidate) + sum(map(len, captions))
        if tokens >= MOST_TOKENS or stop == len(candidates):
            scores += _batch_scores(candidates[start:stop], references[start:stop], df, n, sigma).tolist()
            start, tokens = stop, 0
    return scores


class _Vectors(NamedTuple):
    """The tf-idf vectors of one order of M captions: E n-grams, by caption, then by first occurrence in it."""

    captions: Array
    """[E] row of the caption, 0 to M - 1."""
    numbers: Array
    """[E] number of the n-gram, below ``different``."""
    weights: Array
    """[E] how often the caption has it times its inverse document frequency."""
    norms: Array
    """[M] Euclidean norms."""
    different: int


def _batch_scores(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int,
    sigma: float | None,
) -> Array:
    """Scores [N] of N candidates for B images.

    The M captions are the N candidates, then the references of image 0, of image 1, ... The P pairs are those of each
    candidate with the references of its image: all pairs of candidate 0, then all of candidate 1, ...
    """
    images = {id(own): own for own in references}
    row = dict(zip(images, range(len(images)), strict=True))
    image = np.fromiter((row[id(own)] for own in references), np.int64, len(references))  # [N]
    sizes = np.fromiter(map(len, images.values()), np.int64, len(images))  # [B] references of each image
    captions = [*candidates, *chain.from_iterable(images.values())]
    lengths = np.fromiter(map(len, captions), np.int64, len(captions))  # [M]
    image_of = np.concatenate([image, np.repeat(np.arange(len(images)), sizes)])  # [M]

    candidate = np.repeat(np.arange(len(candidates)), sizes[image])  # [P]
    first_reference = (np.cumsum(sizes) - sizes + len(candidates))[image]  # [N] its row among the captions
    first_pair = np.cumsum(sizes[image]) - sizes[image]  # [N]
    reference = np.arange(len(candidate)) + (first_reference - first_pair)[candidate]  # [P] row among the captions
    penalties = 1.0 if sigma is None else _length_penalties(lengths[candidate], lengths[reference], sigma)
    total = np.zeros(len(candidates))
    for vectors in _vectors(captions, lengths, df, n):
        own, theirs = _shared(vectors, image_of, len(candidates))
        weights, others = vectors.weights[own], vectors.weights[theirs]
        products = (weights if sigma is None else np.minimum(weights, others)) * others
        pair = vectors.captions[theirs] + (first_pair - first_reference)[vectors.captions[own]]
        # bincount adds in the order of its input; where nothing is shared it returns integers.
        values = np.bincount(pair, products, len(candidate)).astype(np.float64, copy=False)
        scale = vectors.norms[candidate] * vectors.norms[reference]
        values = np.divide(values, scale, out=values, where=scale != 0) * penalties
        total += np.bincount(candidate, values, len(candidates))
    return total / n / sizes[image] * 10.0


def _vectors(captions: Sequence[Tokens], lengths: Array, df: DocumentFrequencies, n: int) -> Iterator[_Vectors]:
    """The tf-idf vectors of M captions, order by order from 1 to ``n``."""
    known, unknown = df.word_ids, _Unknown(len(df.word_ids))
    words = np.fromiter(
        (known[word] if word in known else unknown[word] for word in chain.from_iterable(captions)),
        np.int64,
        int(lengths.sum()),
    )
    caption = np.repeat(np.arange(len(captions)), lengths)
    ids = np.empty(0, np.int64)
    for order, found in enumerate(ngram_occurrences(words, lengths, n), start=1):
        if order == 1:
            ids = np.where(found.words < len(known), found.words, -1)
        else:
            ids = df.table.extended(ids[found.prefixes], found.words)
        # The different n-grams of each caption, where each first occurs, and how often.
        keys = caption[found.positions] * len(found.words) + found.numbers
        ranks = np.argsort(keys, kind="stable")
        (starts,) = np.nonzero(is_new(keys[ranks]))
        counts = np.diff(np.append(starts, len(keys)))
        by_occurrence = np.argsort(ranks[starts])
        first, counts = ranks[starts][by_occurrence], counts[by_occurrence]
        rows, numbers = caption[found.positions[first]], found.numbers[first]
        inverse, squares = df.inverses(ids[numbers])
        weights = counts * inverse
        (repeated,) = np.nonzero(counts > 1)
        squares[repeated] = [weight**2 for weight in weights[repeated].tolist()]
        norms = np.sqrt(np.bincount(rows, squares, len(captions)).astype(np.float64, copy=False))
        yield _Vectors(rows, numbers, weights, norms, len(found.words))


def _shared(vectors: _Vectors, image_of: Array, candidates: int) -> tuple[Array, Array]:
    """Find the n-grams that candidates share with references of their images.

    Args:
        vectors: of M captions, candidates first.
        image_of: [M] image of each caption.
        candidates: how many captions are candidates.

    Returns:
        Entries [S] of ``vectors`` of candidates, and [S] of references; in the order of the candidates' entries.
    """
    keys = image_of[vectors.captions] * vectors.different + vectors.numbers
    split = int(np.searchsorted(vectors.captions, candidates))
    ranks = np.argsort(keys[split:], kind="stable")
    ordered = keys[split:][ranks]
    start = np.searchsorted(ordered, keys[:split], side="left")
    times = np.searchsorted(ordered, keys[:split], side="right") - start
    own = np.repeat(np.arange(split), times)
    nth = np.arange(len(own)) - np.repeat(np.cumsum(times) - times, times)
    return own, ranks[start[own] + nth] + split


def _length_penalties(candidates: Array, references: Array, sigma: float) -> Array:
    """Length penalties [P] of candidates and references with so many tokens [P].

    The reference scorer takes the number of bigrams for the length. The power is Python's; NumPy's may differ in a bit.
    """
    difference = np.abs(np.maximum(candidates - 1, 0) - np.maximum(references - 1, 0))
    table = [math.e ** (-(float(gap) ** 2) / (2 * sigma**2)) for gap in range(int(difference.max(initial=0)) + 1)]
    return np.array(table)[difference]


class _Unknown(dict[str, int]):
    """Ids of words that the document frequencies lack, from ``first`` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, self.first + len(self))


class CiderD:
    """CIDEr-D of each caption against its image's references, in [0, 10]; papers print it times 100.

    Captions and references are given as written; both are tokenised by ``tokenizer``. With EOS as a token, ``<eos>``
    ends every reference, every document and every candidate whose ``finished`` column is true.
    Without it, captions that break off ("a man with a") are paid too well and training finds them.

    Source: Vedantam et al., CVPR 2015, section 6; EOS as in Hu, Cavicchioli and Capotondi, "A request for clarity
    over the End of Sequence token in the Self-Critical Sequence Training" (SacreEOS), 2023.
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
        cache_images: int = 200_000,
        tokenizer: str = TOKENIZER,
    ) -> None:
        """Choose the document frequencies.

        Args:
            df: document frequencies of the training split, or a file of them (``.npz``, or a legacy ``.p`` / ``.pkl``).
                None takes them from the references of each call, one document per distinct image: right for scoring
                whole files, wrong for training, where a batch is no corpus.
            eos: EOS is a token.
            n: longest n-grams, at least 1.
            sigma: width of the length penalty in tokens, above 0.
            cache_images: images whose tokenised references are kept (about 1 kB each), least recently used out first.
                An epoch comes to each image once: a cache smaller than the training split saves nothing.
            tokenizer: ``ptb``, or ``none`` for text that is tokenised already (``rewards.text.tokenize.TOKENIZERS``).

        Raises:
            ValueError: a parameter is out of range, or ``df`` was counted with other tokens, EOS or n-gram orders.
        """
        if n < 1 or not sigma > 0 or cache_images < 1:
            raise ValueError(
                f"n = {n}, sigma = {sigma}, cache_images = {cache_images}: expected n >= 1 and the rest > 0"
            )
        self.tokenizer, self._tokenize = tokenizer, tokenizer_of(tokenizer)
        self._warned = False
        self._cache: OrderedDict[tuple[str, ...], list[list[str]]] = OrderedDict()
        self.df = _loaded(df)
        self.eos, self.n, self.sigma, self.cache_images = eos, n, sigma, cache_images
        if self.df is not None:
            self._check_df(self.df)

    @property
    def signature(self) -> str:
        """Variant in the style of SacreEOS, such as ``STANDARD_wInit+Cider-D[n4,s6.0]+df[1fb8e70b]``.

        The last parts are the start of the fingerprint of the document frequencies, where they are fixed, and the
        tokenizer, where it is not ``ptb``.
        """
        standard = "STANDARD" if self.eos else "NO<EOS>"
        init = "w/oInit" if self.df is None else "wInit"
        counted = "" if self.df is None else f"+df[{self.df.fingerprint[:8]}]"
        tokens = "" if self.tokenizer == TOKENIZER else f"+tokenizer:{self.tokenizer}"
        return f"{standard}_{init}+Cider-D[n{self.n},s{float(self.sigma)}]{counted}{tokens}"

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the document frequencies; None where every call makes its own."""
        return None if self.df is None else self.df.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without what can be made again."""
        return {**self.__dict__, "_cache": OrderedDict()}

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions.

        Args:
            prompts: unused.
            completions: N captions (strings or TRL messages).
            **columns: ``references`` (N lists of captions); ``finished`` (N booleans, absent: all true);
                ``image_id`` (N strings, only used to tell images apart where ``df`` is None).

        Returns:
            N scores in [0, 10].

        Raises:
            RewardError: a column is missing or has another shape, a row has no reference, or one is not a string.
        """
        texts = as_texts(completions)
        keys = reference_lists(columns, self.__name__, len(texts))
        ended = self._ended(columns, len(texts))
        if not texts:
            return []
        references = self._tokenized(keys)
        df = self.df if self.df is not None else self._df_of_call(keys, columns)
        candidates = [self._tokenize(text) for text in texts]
        for tokens, finished in zip(candidates, ended, strict=True):
            if finished:
                tokens.append(EOS)
        scores = cider_d(candidates, [references[key] for key in keys], df, self.n, self.sigma)
        if not any(scores):
            self._warn_of_no_weight(df)
        # Rounding may exceed the largest score in the last digit.
        return checked_scores(self, [min(score, self.bounds[1]) for score in scores], len(texts))

    def _tokenized(self, keys: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], list[list[str]]]:
        """Tokens of the references of images, from the cache where it has them."""
        end = [EOS] if self.eos else []
        found: dict[tuple[str, ...], list[list[str]]] = {}
        for key in dict.fromkeys(keys):
            tokens = self._cache.pop(key, None)
            if tokens is None:  # interned, equal words are one string in memory
                tokens = [[*map(sys.intern, self._tokenize(caption)), *end] for caption in key]
            self._cache[key] = found[key] = tokens
        while len(self._cache) > self.cache_images:
            self._cache.popitem(last=False)
        return found

    def _ended(self, columns: Mapping[str, Any], count: int) -> list[bool]:
        """[N] whether EOS is a caption's last token."""
        if not self.eos or columns.get("finished") is None:
            return [self.eos] * count
        return [bool(done) for done in required_column(dict(columns), "finished", self.__name__, count)]

    def _df_of_call(self, keys: Sequence[tuple[str, ...]], columns: Mapping[str, Any]) -> DocumentFrequencies:
        identities: Sequence[Any] = keys
        if columns.get("image_id") is not None:
            identities = required_column(dict(columns), "image_id", self.__name__, len(keys))
        images = dict(zip(identities, keys, strict=True))
        return DocumentFrequencies.from_references(
            ([self._tokenize(caption) for caption in captions] for captions in images.values()),
            eos=self.eos,
            n=self.n,
            tokenizer=self.tokenizer,
        )

    def _warn_of_no_weight(self, df: DocumentFrequencies) -> None:
        """Warn once where all scores are 0 because every weight is."""
        if not self._warned and df.all_zero:
            self._warned = True
            logger.warning(
                "WARNING: reward %r is 0 for every caption: each n-gram is in all documents that were counted (%d), so "
                "that none has a weight; give document frequencies (df) of more images",
                self.__name__,
                df.documents,
            )

    def _check_df(self, df: DocumentFrequencies) -> None:
        if df.eos != self.eos:
            counted = "with" if df.eos else "without"
            raise ValueError(
                f"the document frequencies were counted {counted} <eos> and the reward was asked for eos={self.eos}: "
                f"scores would mix both conventions. Pass eos={df.eos}, or count them again"
            )
        if df.tokenizer != self.tokenizer:
            raise ValueError(
                f"the document frequencies are of tokens made by {df.tokenizer!r}, this reward's are made by "
                f"{self.tokenizer!r}: their n-grams would not meet. Pass that tokenizer, or count them again"
            )
        if df.n < self.n:
            raise ValueError(f"the document frequencies count n-grams up to {df.n}, the reward needs {self.n}")


def _loaded(df: DocumentFrequencies | str | Path | None) -> DocumentFrequencies | None:
    if df is None or isinstance(df, DocumentFrequencies):
        return df
    return load_legacy_pickle(df) if Path(df).suffix in (".p", ".pkl", ".pickle") else DocumentFrequencies.load(df)
