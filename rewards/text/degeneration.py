"""Signs of degenerate captions that need no reference: repetition, cut-off endings,
length, vocabulary.

All functions take tokenised captions (``rewards.text.tokenize``), which may be empty.
"""

from collections.abc import Collection, Sequence
from typing import Any

from rewards.base import as_texts
from rewards.options import Count, check_values
from rewards.text.ngrams import Tokens, ngram_counts
from rewards.text.ptb_rules import names
from rewards.text.tokenize import TOKENIZER, tokenizer_of

BAD_ENDINGS = frozenset(
    names("""
    a an the this these those its their his my your our some every
    against among at atop between during for from in into like near of on onto to toward towards
    upon with within without next
    and or but nor while as that which who whose where than because if
    is are was were be been being am has have had does do did will would could may might should
    's n't very several
    """)
)
"""Words at which a finished English caption hardly ever ends: articles and determiners,
prepositions, conjunctions and relative words, auxiliaries, and words that need another
after them. Words that often end a caption as an adverb, noun or pronoun (``behind``,
``inside``, ``by``, ``off``, ``can``, ``other``, ``her``) are left out. ``on`` and
``in`` are included, because captions that break off end there; 0.6 % of the captions
that people wrote for COCO val2017 do, too.
"""


def repeated_ngram_share(captions: Sequence[Tokens], n: int = 2) -> float:
    """Fraction of n-grams that occurred earlier in the same caption, over all captions, in [0, 1].

    ``a cat and a cat`` has the bigrams a-cat, cat-and, and-a, a-cat: one of four is repeated.
    """
    total = repeated = 0
    for tokens in captions:
        counts = [
            count for ngram, count in ngram_counts(tokens, n).items() if len(ngram) == n
        ]
        total += sum(counts)
        repeated += sum(counts) - len(counts)
    return repeated / total if total else 0.0


def bad_ending(tokens: Tokens) -> bool:
    """Whether an English caption is empty or ends in one of ``BAD_ENDINGS``."""
    return not tokens or tokens[-1] in BAD_ENDINGS


def degeneration_statistics(
    captions: Sequence[Tokens],
    training_captions: Collection[tuple[str, ...]] | None = None,
    tokenizer: str = TOKENIZER,
) -> dict[str, float]:
    """Statistics of captions that were split by ``tokenizer``. Raises ``ValueError`` if
    there is no caption.

    - ``length``: mean number of tokens;
    - ``vocabulary``: number of distinct tokens;
    - ``repeated_ngrams``: fraction of bigrams that occurred earlier in their caption;
    - ``bad_endings``: fraction of captions that are empty or break off; only for ``ptb``, as the
      words are English;
    - ``duplicates``: fraction of captions equal to an earlier one;
    - ``empty``: fraction of captions without a token;
    - ``novel``: fraction of captions that are not in ``training_captions``, a set of tuples of
      tokens, if it is given.
    """
    if not captions:
        raise ValueError(
            "there are no captions to compute statistics of: expected at least one"
        )
    count = len(captions)
    different = {tuple(tokens) for tokens in captions}
    values = {
        "length": sum(map(len, captions)) / count,
        "vocabulary": float(len({token for tokens in captions for token in tokens})),
        "repeated_ngrams": repeated_ngram_share(captions),
        "duplicates": (count - len(different)) / count,
        "empty": sum(not tokens for tokens in captions) / count,
    }
    if tokenizer == TOKENIZER:
        values["bad_endings"] = sum(map(bad_ending, captions)) / count
    if training_captions is not None:
        values["novel"] = (
            sum(tuple(tokens) not in training_captions for tokens in captions) / count
        )
    return values


class Repetition:
    """Penalty for repeated n-grams: minus the share of a caption's n-grams that
    occurred earlier in it, in [-1, 0].

    ``n``, at least 1, is the order of the n-grams, ``tokenizer`` one of
    ``rewards.text.tokenize.TOKENIZERS``.
    """

    __name__ = "repetition"
    columns: frozenset[str] = frozenset()
    bounds = (-1.0, 0.0)

    def __init__(self, n: int = 2, tokenizer: str = TOKENIZER) -> None:
        check_values(Count, n=n)
        self.n = n
        self.tokenizer = tokenizer
        self._tokenize = tokenizer_of(tokenizer)
        self.signature = f"repetition[n{n}]+{tokenizer}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions; no column is needed."""
        texts = as_texts(completions)
        return [-repeated_ngram_share([self._tokenize(text)], self.n) for text in texts]
