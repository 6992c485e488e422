"""Two baselines for ICC: concreteness of a caption's words in a list that people rated,
and its length.
"""

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import as_texts, checked_scores, naming
from rewards.text.tokenize import TOKENIZER, tokenize


class WordConcreteness:
    """Mean human rating of concreteness of a caption's words, in [1, 5]; 1 if no word
    is rated.

    Source of the ratings: Brysbaert, Warriner and Kuperman, Behavior Research Methods
    2014. Words are PTB tokens in lower case. Words that are not in the list, such as
    most plurals and inflected verbs, are skipped, and the list's two-word expressions
    are not used.

    Args:
        ratings: the published table, ``Concreteness_ratings_Brysbaert_et_al_BRM.txt``:
            columns separated by tabs; ``Word``, ``Bigram`` (0 for single words) and
            ``Conc.M`` are read.

    Raises:
        ValueError: the file is missing, or is not this table; the message names the
            line.
    """

    __name__ = "word_concreteness"
    columns: frozenset[str] = frozenset()
    bounds = (1.0, 5.0)
    tokenizer = TOKENIZER

    def __init__(self, ratings: str | Path) -> None:
        self._means = read_concreteness(ratings)
        lines = [f"{word}\t{mean}\n" for word, mean in sorted(self._means.items())]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
        table = f"{len(lines)} words,{digest}"
        self.signature = f"{self.__name__}[{table}]+{self.tokenizer}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions."""
        texts = as_texts(completions)
        return checked_scores(self, [self._score(text) for text in texts], len(texts))

    def _score(self, text: str) -> float:
        rated = [self._means[word] for word in tokenize(text) if word in self._means]
        return math.fsum(rated) / len(rated) if rated else self.bounds[0]


def read_concreteness(path: str | Path) -> dict[str, float]:
    """Read the single words of the published table: word in lower case -> mean rating in [1, 5].

    Raises:
        ValueError: the file cannot be read, lacks a column, or a rating is no number in [1, 5].
    """
    means: dict[str, float] = {}
    unreadable = (OSError, ValueError, csv.Error)
    with (
        naming(f"word_concreteness: {path} cannot be read", unreadable),
        open(path, "rb") as file,
    ):
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        lacking = {"Word", "Bigram", "Conc.M"} - set(rows.fieldnames or ())
        if lacking:
            raise ValueError(f"it lacks the columns {sorted(lacking)}")
        for row in rows:
            with naming(f"line {rows.line_num}", (TypeError, ValueError)):
                mean = float(row["Conc.M"])
                if not row["Word"] or not 1 <= mean <= 5:
                    raise ValueError(f"{row['Word']!r:.80} has the rating {mean}")
            if row["Bigram"] == "0":
                means[row["Word"].lower()] = mean
    if not means:
        raise ValueError(f"{path} has no words")
    return means


class CaptionLength:
    """Number of words of a caption, split at white space, in [0, inf)."""

    __name__ = "length"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, math.inf)
    signature = "length[words at white space]"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Count the words of N captions."""
        return [float(len(text.split())) for text in as_texts(completions)]
