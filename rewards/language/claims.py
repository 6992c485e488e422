"""Claims of a caption, each verified against the image or against the claims of the references.

Source: the form of DCScore (Ye et al., "Painting with Words: Elevating Detailed Image
Captioning with Benchmark and Alignment Learning" (DeCapBench), ICLR 2025): precision of
the caption's claims, recall of the references' claims, and their F. Claims are the
detail units of SPECS (``rewards.text.detail_units``); prompts are our own.
"""

import re
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from rewards.base import (
    as_texts,
    checked_scores,
    passes_on,
    reference_lists,
    required_column,
)
from rewards.language.models import Question, build_model
from rewards.options import check_values
from rewards.text.detail_units import default_tagger, detail_units_of

Score = Literal["precision", "recall", "f"]
Source = Literal["image", "references"]
IMAGE_PROMPT = (
    'A caption of this image says: "{caption}"\n\nIs this detail of it true of the image: '
    '"{claim}"? '
    "Reply with Yes or No."
)
TEXT_PROMPT = (
    "Descriptions of an image:\n{descriptions}\n\nAccording to them alone, is this true of the "
    "image: "
    '"{claim}"? Reply with Yes or No.'
)
LABELS = ("Yes", "No")
_UNSAID = re.compile(r"\b(?:a|an|the)\b|^\W*(?:and|or|but)\b")


class Claims:
    """Precision, recall or F of the claims of a caption, in [0, 1].

    Claims are detail units: phrases of a caption, such as "a brown dog" and "on the
    grass", cut by rules. The precision is the mean probability of "Yes" over the
    caption's claims, verified against the image by a vision-language model, or against
    the references by a language model. The recall is the same over the claims of the
    longest reference, verified against the caption. F is their harmonic mean. A caption
    without a claim scores 0.

    A claim counts once, however often it is said: of claims that are equal but for
    case, punctuation, articles and a conjunction at their beginning, the first is
    verified. Otherwise repeating a true claim would raise the precision.

    Args:
        source: what the caption's claims are verified against.
        score: ``precision``, ``recall`` or ``f``. Recall needs references; precision
            alone favours captions that say little.
        **options: the language model, local or behind an endpoint, as for ``build_model``: a
            vision-language model with ``source: image``.

    Raises:
        ValueError: an argument is wrong, or the model cannot be loaded.
        RewardError: the package that tags parts of speech, textblob, is not installed.
    """

    __name__ = "claims"
    bounds = (0.0, 1.0)

    @passes_on(build_model, without=("reward", "vision"))
    def __init__(
        self,
        *,
        source: Source = "references",
        score: Score = "f",
        **options: Any,
    ) -> None:
        check_values(Source, source=source)
        check_values(Score, score=score)
        vision = source == "image"
        default_tagger()
        self.language_model = build_model(self.__name__, vision=vision, **options)
        self.source = source
        self.score = score
        columns = set()
        if vision and score != "recall":
            columns.add("image")
        if not vision or score != "precision":
            columns.add("references")
        self.columns = frozenset(columns)
        read = f"{self.language_model.signature},{source},{score},distinct"
        self.signature = f"{self.__name__}[{read}]"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions.

        Raises:
            RewardError: a column is missing, or the model does not answer; the message
                names row and claim.
        """
        captions = as_texts(completions)
        count = len(captions)
        references: Sequence[Sequence[str]] = [()] * count
        images: Sequence[Any] = [None] * count
        if "references" in self.columns:
            references = reference_lists(columns, self.__name__, count)
        if "image" in self.columns:
            images = required_column(columns, "image", self.__name__, count)
        longest = [max(texts, key=len, default="") for texts in references]
        claims = list(map(distinct, detail_units_of([*captions, *longest])))
        questions: list[Question] = []
        sizes = []
        for row, caption in enumerate(captions):
            where = f"reward {self.__name__!r}: row {row}"
            said = [] if self.score == "recall" else claims[row]
            has_recall = claims[row] and self.score != "precision"
            expected = claims[count + row] if has_recall else []
            for claim in said:
                place = f"{where}, claim {claim!r}"
                question = _in_text(claim, references[row], place)
                if self.source == "image":
                    text = IMAGE_PROMPT.format(caption=caption, claim=claim)
                    question = Question(text, LABELS, place, images[row])
                questions.append(question)
            for claim in expected:
                place = f"{where}, claim of a reference {claim!r}"
                questions.append(_in_text(claim, [caption], place))
            sizes.append((len(said), len(expected)))

        truth = iter([answer[0] for answer in self.language_model.choose(questions)])
        scores = []
        for said_count, expected_count in sizes:
            precision = _mean(list(islice(truth, said_count)))
            recall = _mean(list(islice(truth, expected_count)))
            harmonic = 2 * precision * recall / (precision + recall or 1)
            values = {"precision": precision, "recall": recall, "f": harmonic}
            scores.append(values[self.score])
        return checked_scores(self, scores, count)


def distinct(claims: Sequence[str]) -> list[str]:
    """The first of claims that are equal but for case, punctuation, articles and a
    conjunction at their beginning.
    """
    firsts: dict[str, str] = {}
    for claim in claims:
        words = re.findall(r"\w+", _UNSAID.sub(" ", claim.casefold()))
        firsts.setdefault(" ".join(words), claim)
    return list(firsts.values())


def _in_text(claim: str, texts: Sequence[str], where: str) -> Question:
    lines = "\n".join(f"- {text}" for text in texts)
    return Question(TEXT_PROMPT.format(descriptions=lines, claim=claim), LABELS, where)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
