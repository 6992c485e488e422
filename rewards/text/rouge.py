"""ROUGE-L as the COCO caption toolkit computes it.

Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, section
3.1, with beta = 1.2 and, as in the toolkit, the maximum of precision and the maximum of
recall over references, which may come from two of them.
"""

from collections.abc import Sequence
from typing import Any

from rewards.base import as_texts, checked_scores, reference_lists
from rewards.text.ngrams import Tokens
from rewards.text.tokenize import TOKENIZER, tokenizer_of


def longest_common_subsequence(first: Tokens, second: Tokens) -> int:
    """Length of the longest common subsequence, by bit-parallelism (Hyyro 2004,
    "Bit-parallel LCS-length computation revisited"): a bit for each token of ``first``,
    where a zero bit marks a step of the subsequence.
    """
    positions: dict[str, int] = {}
    for index, token in enumerate(first):
        positions[token] = positions.get(token, 0) | 1 << index
    everything = (1 << len(first)) - 1
    state = everything
    for token in second:
        matched = state & positions.get(token, 0)
        state = ((state + matched) | (state - matched)) & everything
    return len(first) - state.bit_count()


def rouge_l(
    candidate: Tokens, references: Sequence[Tokens], beta: float = 1.2
) -> float:
    """ROUGE-L of one tokenised candidate, in [0, 1]: (1 + β²) P R / (R + β² P). Raises
    ``ValueError`` if there is no reference.
    """
    if not references:
        raise ValueError("ROUGE-L needs at least one reference")
    words = candidate or [""]  # the toolkit splits an empty caption into one empty word
    precision = recall = 0.0
    for reference in references:
        reference_words = reference or [""]
        common = longest_common_subsequence(words, reference_words)
        precision = max(precision, common / len(words))
        recall = max(recall, common / len(reference_words))
    if precision == 0 or recall == 0:
        return 0.0
    return ((1 + beta**2) * precision * recall) / (recall + beta**2 * precision)


class RougeL:
    """ROUGE-L of each caption against its image's references, in [0, 1].

    The mean over captions is the corpus score that papers print (times 100).

    Args:
        beta: weight of recall against precision, above 0; the toolkit's is 1.2.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``.
    """

    __name__ = "rouge_l"
    columns = frozenset({"references"})
    bounds = (0.0, 1.0)

    def __init__(self, beta: float = 1.2, tokenizer: str = TOKENIZER) -> None:
        if not beta > 0:
            raise ValueError(f"beta is {beta}: expected a number above 0")
        self.beta = beta
        self.tokenizer = tokenizer
        self._tokenize = tokenizer_of(tokenizer)
        self.signature = f"ROUGE-L[b{float(beta)}]+{tokenizer}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references``. Raises ``RewardError`` as
        ``reference_lists``.
        """
        texts = as_texts(completions)
        references = reference_lists(columns, self.__name__, len(texts))
        scores = [
            rouge_l(
                self._tokenize(text),
                [self._tokenize(caption) for caption in captions],
                self.beta,
            )
            for text, captions in zip(texts, references, strict=True)
        ]
        return checked_scores(self, scores, len(texts))
