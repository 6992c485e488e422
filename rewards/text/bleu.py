"""BLEU-1 to BLEU-4 as the COCO caption toolkit computes them.

Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL 2002, equations 1-4, with
the toolkit's choices: the reference length closest to the candidate's (the shorter of two), and small constants in
place of smoothing, so that a caption without a matching n-gram scores almost 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rewards.base import as_texts, checked_scores
from rewards.text.document_frequency import NGram, ngram_counts
from rewards.text.references import reference_lists
from rewards.text.tokenize import TOKENIZER
from rewards.text.tokenizers import tokenizer_of

Tokens = Sequence[str]

_SMALL = 1e-9
_TINY = 1e-15


class Matches(NamedTuple):
    """What BLEU counts, of one caption or of a whole corpus."""

    correct: list[int]
    """[n] n-grams of each order that a reference has, each at most as often as the reference that has it most."""
    possible: list[int]
    """[n] n-grams of each order in the candidates."""
    length: int
    reference_length: int


def count_matches(candidate: Tokens, references: Sequence[Tokens], n: int = 4) -> Matches:
    """Count the n-grams of one candidate that its references have."""
    most: dict[NGram, int] = {}
    for reference in references:
        for ngram, count in ngram_counts(reference, n).items():
            most[ngram] = max(most.get(ngram, 0), count)
    correct = [0] * n
    for ngram, count in ngram_counts(candidate, n).items():
        correct[len(ngram) - 1] += min(most.get(ngram, 0), count)
    length = len(candidate)
    closest = min((abs(len(reference) - length), len(reference)) for reference in references)[1]
    return Matches(correct, [max(0, length - order) for order in range(n)], length, closest)


def bleu_of(matches: Matches) -> list[float]:
    """Return BLEU-1 to BLEU-n in [0, 1] of what was counted."""
    scores = []
    product = 1.0
    for order, (correct, possible) in enumerate(zip(matches.correct, matches.possible, strict=True)):
        product *= (correct + _TINY) / (possible + _SMALL)
        scores.append(product ** (1.0 / (order + 1)))
    ratio = (matches.length + _TINY) / (matches.reference_length + _SMALL)
    brevity_penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    return [score * brevity_penalty for score in scores]


def sentence_bleu(
    candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], n: int = 4
) -> list[list[float]]:
    """Compute BLEU-1 to BLEU-n of each of N tokenised candidates by itself: [N][n], each in [0, 1].

    Raises:
        ValueError: the numbers of candidates and references differ, or an image has no reference.
    """
    return [bleu_of(matches) for matches in _counted(candidates, references, n)]


def corpus_bleu(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], n: int = 4) -> list[float]:
    """Compute BLEU-1 to BLEU-n of a corpus of N tokenised candidates: n numbers in [0, 1], as papers print (x 100).

    Raises:
        ValueError: the numbers of candidates and references differ, an image has no reference, or there is none.
    """
    counted = _counted(candidates, references, n)
    if not counted:
        raise ValueError("corpus BLEU of no captions: expected at least one")
    return bleu_of(
        Matches(
            [sum(matches.correct[order] for matches in counted) for order in range(n)],
            [sum(matches.possible[order] for matches in counted) for order in range(n)],
            sum(matches.length for matches in counted),
            sum(matches.reference_length for matches in counted),
        )
    )


def _counted(candidates: Sequence[Tokens], references: Sequence[Sequence[Tokens]], n: int) -> list[Matches]:
    if len(candidates) != len(references):
        raise ValueError(f"{len(candidates)} candidates and {len(references)} lists of references: expected as many")
    for row, captions in enumerate(references):
        if not captions:
            raise ValueError(f"candidate {row} has no reference: BLEU needs at least one")
    return [count_matches(candidate, captions, n) for candidate, captions in zip(candidates, references, strict=True)]


class Bleu:
    """Sentence BLEU-n of each caption against its image's references, in [0, 1].

    Captions and references are given as written and tokenised by ``tokenizer``. The mean over captions is
    not the corpus BLEU that papers print; that is ``corpus_bleu``.
    """

    columns = frozenset({"references"})
    bounds = (0.0, 1.0)

    def __init__(self, n: int = 4, tokenizer: str = TOKENIZER) -> None:
        """Choose the longest n-grams, ``n`` >= 1 (log key ``bleu<n>``), and the tokenizer, ``ptb`` or ``none``."""
        if n < 1:
            raise ValueError(f"n is {n}: expected 1 or more")
        self.n, self.tokenizer, self._tokenize = n, tokenizer, tokenizer_of(tokenizer)
        self.__name__ = f"bleu{n}"

    @property
    def signature(self) -> str:
        """Variant, such as ``BLEU[n4,closest]+ptb``."""
        return f"BLEU[n{self.n},closest]+{self.tokenizer}"

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions by the column ``references`` (N lists of captions).

        Raises:
            RewardError: the column is missing or has another length, a row has no reference, or one is not a string.
        """
        texts = as_texts(completions)
        references = reference_lists(columns, self.__name__, len(texts))
        scores = [
            bleu_of(count_matches(self._tokenize(text), [self._tokenize(caption) for caption in captions], self.n))[-1]
            for text, captions in zip(texts, references, strict=True)
        ]
        return checked_scores(self, scores, len(texts))
