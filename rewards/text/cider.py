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
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rewards.base import RewardError, as_texts, checked_scores, required_column
from rewards.text.document_frequency import EOS, DocumentFrequencies, NGram, ngram_counts
from rewards.text.legacy_pickle import load_legacy_pickle
from rewards.text.ngram_table import Array
from rewards.text.packed_cider import PackedCiderD
from rewards.text.reference_bank import Bank
from rewards.text.references import reference_lists
from rewards.text.token_cider import TokenCiderD, WordVocabulary
from rewards.text.tokenize import TOKENIZER
from rewards.text.tokenizers import tokenizer_of

logger = logging.getLogger(__name__)
Tokens = Sequence[str]


class ReferenceVectors(NamedTuple):
    """The tf-idf vectors of one image's R references, arranged so that a candidate's n-gram is looked up once."""

    postings: dict[NGram, list[tuple[int, float]]]
    """n-gram -> (slot, weight) for each reference that has it; slot = reference * n + order - 1."""
    norms: list[float]
    """[R * n] Euclidean norm of each reference's vector of each order."""
    lengths: list[int]
    """[R] number of bigrams: tokens - 1."""


def reference_vectors(references: Sequence[Tokens], df: DocumentFrequencies, n: int = 4) -> ReferenceVectors:
    """Weigh the references of one image; the work that all candidates for the image share."""
    postings: dict[NGram, list[tuple[int, float]]] = {}
    norms: list[float] = []
    for number, tokens in enumerate(references):
        weights, own_norms = _weighted(tokens, df, n)
        for ngram, weight in weights.items():
            postings.setdefault(ngram, []).append((number * n + len(ngram) - 1, weight))
        norms += own_norms
    return ReferenceVectors(postings, norms, [max(0, len(tokens) - 1) for tokens in references])


def _weighted(tokens: Tokens, df: DocumentFrequencies, n: int) -> tuple[dict[NGram, float], list[float]]:
    """Return tf-idf weights (tf is the raw count) and the norm of each order's vector."""
    inverse = df.inverse
    weights: dict[NGram, float] = {}
    squares = [0.0] * n
    for ngram, count in ngram_counts(tokens, n).items():
        weight = float(count) * inverse(ngram)
        weights[ngram] = weight
        squares[len(ngram) - 1] += weight**2
    return weights, [math.sqrt(square) for square in squares]


def similarity(
    candidate: Tokens,
    vectors: ReferenceVectors,
    df: DocumentFrequencies,
    n: int = 4,
    sigma: float = 6.0,
    *,
    clipped: bool = True,
) -> float:
    """Score one candidate against one image's references, in [0, 10].

    Additions happen in the order of the reference scorer (pycocoevalcap), so that results are equal to the bit: over
    the candidate's n-grams, then over references, then the mean over orders, then / R, then x 10.

    Args:
        candidate: tokens, with EOS if the references have it.
        vectors: from ``reference_vectors`` with the same ``df`` and ``n``.
        df: document frequencies.
        n: longest n-grams.
        sigma: width of the length penalty, in tokens.
        clipped: True for CIDEr-D (clipping and length penalty), False for the original CIDEr.
    """
    weights, norms = _weighted(candidate, df, n)
    products = [0.0] * len(vectors.norms)
    postings = vectors.postings
    for ngram, weight in weights.items():
        for slot, reference_weight in postings.get(ngram, ()):
            products[slot] += (min(weight, reference_weight) if clipped else weight) * reference_weight
    length = max(0, len(candidate) - 1)
    sums = [0.0] * n
    for number, reference_length in enumerate(vectors.lengths):
        penalty = math.e ** (-(float(length - reference_length) ** 2) / (2 * sigma**2)) if clipped else 1.0
        for order in range(n):
            value = products[number * n + order]
            norm = vectors.norms[number * n + order]
            if norms[order] != 0 and norm != 0:
                value /= norms[order] * norm
            sums[order] += value * penalty
    total = 0.0
    for value in sums:  # not sum(): from Python 3.12 on it compensates, and the last digits would differ
        total += value
    return total / n / len(vectors.lengths) * 10.0


def cider_d(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int = 4,
    sigma: float = 6.0,
) -> list[float]:
    """Compute CIDEr-D of N tokenised candidates, each in [0, 10]; a candidate equal to its only reference gets 10.

    Args:
        candidates: [N] token lists.
        references: [N] lists of token lists, at least one each.
        df: document frequencies. EOS is the caller's: append it to both sides if ``df`` has it.
        n: longest n-grams; all orders weigh the same.
        sigma: width of the length penalty exp(-(l_c - l_r)^2 / (2 sigma^2)), in tokens.

    Returns:
        N scores. An image whose references have only n-grams that are in every document gives 0.

    Raises:
        ValueError: the numbers of candidates and references differ, an image has no reference, or ``df`` has
            shorter n-grams than ``n``.
    """
    return _scores(candidates, references, df, n, sigma, clipped=True)


def cider(
    candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], df: DocumentFrequencies, n: int = 4
) -> list[float]:
    """Compute the original CIDEr, without clipping and length penalty, in [0, 10]. Arguments as for ``cider_d``."""
    return _scores(candidates, references, df, n, 6.0, clipped=False)


def _scores(
    candidates: Sequence[Tokens],
    references: Sequence[Sequence[Tokens]],
    df: DocumentFrequencies,
    n: int,
    sigma: float,
    *,
    clipped: bool,
) -> list[float]:
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates and {len(references)} lists of references: expected as many")
    if df.n < n:
        raise ValueError(f"the document frequencies count n-grams up to {df.n}, CIDEr was asked for n = {n}")
    for row, captions in enumerate(references):
        if not captions:
            raise ValueError(f"candidate {row} has no reference: CIDEr needs at least one")
    return [
        similarity(candidate, reference_vectors(captions, df, n), df, n, sigma, clipped=clipped)
        for candidate, captions in zip(candidates, references, strict=True)
    ]


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
            cache_images: images whose references are kept (about 2.5 kB each), least recently used out first. An epoch
                comes to each image once: what holds fewer than the training images saves nothing.
            tokenizer: ``ptb``, or ``none`` for text that is tokenised already (``rewards.text.tokenizers``).

        Raises:
            ValueError: a parameter is out of range, or ``df`` was counted with other tokens, EOS or n-gram orders.
        """
        if n < 1 or not sigma > 0 or cache_images < 1:
            raise ValueError(
                f"n = {n}, sigma = {sigma}, cache_images = {cache_images}: expected n >= 1 and the rest > 0"
            )
        self.tokenizer, self._tokenize = tokenizer, tokenizer_of(tokenizer)
        self._warned = False
        self.df = _loaded(df)
        self.vocabulary: WordVocabulary | None = None
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
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_tokens")}

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions.

        Args:
            prompts: unused.
            completions: N captions (strings or TRL messages).
            **columns: ``references`` (N lists of captions); ``finished`` (N booleans, absent: all true);
                ``image_id`` (N strings, only used to tell images apart where ``df`` is None); ``completion_ids`` (a
                tensor [N, L], see ``bind_vocabulary``; of no account without one).

        Returns:
            N scores in [0, 10].

        Raises:
            RewardError: a column is missing or has another shape, a row has no reference, or one is not a string.
        """
        texts = as_texts(completions)
        keys = reference_lists(columns, self.__name__, len(texts))
        ended = self._ended(columns, len(texts))
        ids = self._token_ids(columns, len(texts))
        if not texts:
            return []
        df, packed = self.df, self._packed
        if df is None or packed is None:
            df = self._df_of_call(keys, columns)
            packed = PackedCiderD(df, self.n, self.sigma, len(texts))
        identities = list(map(id, keys))  # captions of an image share one list of references
        images = dict(zip(identities, keys, strict=True))
        number = dict(zip(images, range(len(images)), strict=True))
        owner = np.fromiter(map(number.__getitem__, identities), np.int64, len(keys))
        bank = Bank.of(packed.references(list(images.values()), self._reference_tokens))
        ends = ended.tolist()

        def tokens_of(rows: Sequence[int]) -> list[list[str]]:
            found = [self._tokenize(texts[row]) for row in rows]
            for tokens, row in zip(found, rows, strict=True):
                if ends[row]:
                    tokens.append(EOS)
            return found

        if ids is None or self._tokens is None or bank.has_extra(packed.size):
            scores = packed.scores(packed.numbers(tokens_of(range(len(texts)))), owner, bank)
        else:
            scores = self._tokens.scores(ids, ended, owner, bank, tokens_of)
        if not scores.any():
            self._warn_of_no_weight(df)
        # Rounding may exceed the largest score in the last digit.
        return checked_scores(self, np.minimum(scores, self.bounds[1]).tolist(), len(texts))

    def bind_vocabulary(self, vocabulary: WordVocabulary) -> None:
        """Take the column ``completion_ids`` for ids of this vocabulary from now on, where it is a tensor [N, L].

        Captions are then scored from their ids, on the ids' device, with the same scores as from their text. Lists of
        ids, such as TRL's, are not looked at: they are of another model's vocabulary.
        """
        self.vocabulary = vocabulary
        self.__dict__.pop("_tokens", None)

    @cached_property
    def _packed(self) -> PackedCiderD | None:
        return None if self.df is None else PackedCiderD(self.df, self.n, self.sigma, self.cache_images)

    @cached_property
    def _tokens(self) -> TokenCiderD | None:
        if self._packed is None or self.vocabulary is None:
            return None
        return TokenCiderD(self._packed, self.vocabulary)

    def _token_ids(self, columns: Mapping[str, Any], count: int) -> Any:
        """The tensor of word ids, where there is one and the reward knows the words."""
        ids, torch = columns.get("completion_ids"), sys.modules.get("torch")
        if self.vocabulary is None or torch is None or not isinstance(ids, torch.Tensor):
            return None
        if ids.ndim != 2 or len(ids) != count:
            found = f"completion_ids have the shape {list(ids.shape)}: expected [{count}, tokens]"
            raise RewardError(f"reward {self.__name__!r}: {found}")
        return ids

    def _ended(self, columns: Mapping[str, Any], count: int) -> Array:
        """[N] whether EOS is a caption's last token."""
        if not self.eos or columns.get("finished") is None:
            return np.full(count, self.eos)
        return np.array([bool(done) for done in required_column(dict(columns), "finished", self.__name__, count)])

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
        """Say once, of scores that are all 0, that they could be nothing else."""
        counts = df.table.counts
        if not self._warned and (counts[counts > 0] == df.documents).all():
            self._warned = True
            logger.warning(
                "WARNING: reward %r is 0 for every caption: each n-gram is in all documents that were counted (%d), so "
                "that none has a weight; give document frequencies (df) of more images",
                self.__name__,
                df.documents,
            )

    def _reference_tokens(self, captions: Sequence[str]) -> list[list[str]]:
        end = [EOS] if self.eos else []
        return [[*self._tokenize(caption), *end] for caption in captions]

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
