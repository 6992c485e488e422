"""BLEU-1 to BLEU-4 as the COCO caption toolkit computes them.

Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine
Translation", ACL 2002, equations 1-4, with the toolkit's choices: the reference length
closest to the candidate's (of two, the shorter), and small constants instead of
smoothing, so that a caption without a matching n-gram scores almost 0.
"""

import math
from collections.abc import Sequence
from typing import Any

from rewards.base import as_texts, checked_scores, reference_lists
from rewards.options import Count, check_values
from rewards.text.ngrams import NGram, Tokens, ngram_counts
from rewards.text.tokenize import TOKENIZER, tokenizer_of

_SMALL = 1e-9
_TINY = 1e-15


def bleu_counts(
    candidate: Tokens, references: Sequence[Tokens], n: int = 4
) -> list[int]:
    """Return the 2 n + 2 counts from which BLEU of one candidate is computed; for a
    corpus they are summed.

    They are: for each order, the number of the candidate's n-grams that match, each
    clipped at its largest count in a reference; for each order, the number of the
    candidate's n-grams; the candidate's length and the reference length closest to it,
    both in tokens.

    Raises:
        ValueError: there is no reference.
    """
    if not references:
        raise ValueError("BLEU needs at least one reference")
    most: dict[NGram, int] = {}
    for reference in references:
        for ngram, count in ngram_counts(reference, n).items():
            if count > most.get(ngram, 0):
                most[ngram] = count
    correct = [0] * n
    for ngram, count in ngram_counts(candidate, n).items():
        correct[len(ngram) - 1] += min(most.get(ngram, 0), count)
    length = len(candidate)
    closest = min(
        (abs(len(reference) - length), len(reference)) for reference in references
    )[1]
    return [*correct, *(max(0, length - order) for order in range(n)), length, closest]


def bleu_of_counts(counts: Sequence[int]) -> list[float]:
    """BLEU-1 to BLEU-n, in [0, 1], of 2 n + 2 counts of one caption or of a corpus."""
    n = len(counts) // 2 - 1
    numbers = [int(count) for count in counts]
    scores = []
    product = 1.0
    for order, (correct, possible) in enumerate(
        zip(numbers[:n], numbers[n : 2 * n], strict=True)
    ):
        product *= (correct + _TINY) / (possible + _SMALL)
        scores.append(product ** (1.0 / (order + 1)))
    ratio = (numbers[-2] + _TINY) / (numbers[-1] + _SMALL)
    brevity_penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    return [score * brevity_penalty for score in scores]


class Bleu:
    """Sentence BLEU-n of each caption against its image's references, in [0, 1].

    The mean over captions is not the corpus BLEU that papers print, which is
    ``bleu_of_counts`` of summed ``bleu_counts``.

    Args:
        n: longest n-grams, at least 1; the log key is ``bleu<n>``.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``.
    """

    columns = frozenset({"references"})
    bounds = (0.0, 1.0)

    def __init__(self, n: int = 4, tokenizer: str = TOKENIZER) -> None:
        check_values(Count, n=n)
        self.n = n
        self.tokenizer = tokenizer
        self._tokenize = tokenizer_of(tokenizer)
        self.__name__ = f"bleu{n}"
        self.signature = f"BLEU[n{n},closest]+{tokenizer}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references``. Raises ``RewardError`` as
        ``reference_lists``.
        """
        texts = as_texts(completions)
        references = reference_lists(columns, self.__name__, len(texts))
        scores = [
            bleu_of_counts(
                bleu_counts(
                    self._tokenize(text),
                    [self._tokenize(one) for one in captions],
                    self.n,
                )
            )[-1]
            for text, captions in zip(texts, references, strict=True)
        ]
        return checked_scores(self, scores, len(texts))
