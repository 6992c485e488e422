"""Questions about an image, answered from its caption alone.

Source: the form of Xing et al., "CapRL: Stimulating Dense Image Caption Capabilities
via Reinforcement Learning", ICLR 2026: multiple-choice questions with shuffled options
and the option that the caption does not say. The prompt is our own.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from string import ascii_uppercase
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from rewards.base import (
    RewardError,
    as_texts,
    checked_scores,
    passes_on,
    required_column,
)
from rewards.language.models import Question, build_model
from rewards.options import Count, check_type, check_values

NOT_SAID = "The caption does not say."
PROMPT = (
    "Below is a caption of an image that you cannot see. Answer the question from the caption "
    "alone.\n\n"
    "Caption: {caption}\n\nQuestion: {question}\n{choices}\n\nReply with the letter of the answer."
)


class ImageQuestion(TypedDict):
    """One entry of the column ``questions``: ``answer`` is one of ``choices``."""

    question: str
    choices: Annotated[list[str], Field(min_length=2, max_length=25)]
    answer: str


class CaptionQA:
    """Mean probability that a language model answers an image's questions right, in [0, 1].

    It sees the caption alone. The choices of a question and a further one, "The caption
    does not say.", are shuffled by (image, question), so that they are the same for
    every caption of an image and in every run.

    A caption that says more answers more: without a limit the longest wins. Above
    ``words`` words the score is multiplied by words / length, so that a caption of 400
    words scores at most 0.2 by default.

    Args:
        words: length in words from which longer captions are scaled down; None never does.
        **options: the language model, local or behind an endpoint, as for ``build_model``.

    Raises:
        ValueError: an argument is wrong, or the model cannot be loaded.
    """

    __name__ = "caption_qa"
    columns = frozenset({"questions", "image_id"})
    bounds = (0.0, 1.0)

    @passes_on(build_model, without=("reward", "vision"))
    def __init__(
        self,
        *,
        words: Count | None = 80,
        **options: Any,
    ) -> None:
        check_values(Count | None, words=words)
        self.language_model = build_model(self.__name__, **options)
        self.words = words
        read = f"{self.language_model.signature},expected,words{words}"
        self.signature = f"{self.__name__}[{read}]"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions; ``questions`` are N lists of ``ImageQuestion``, ``image_id`` N ids.

        Raises:
            RewardError: a column is missing, a question is wrong, or the model does not
                answer one; the message names row and question.
        """
        captions = as_texts(completions)
        image_ids = required_column(columns, "image_id", self.__name__, len(captions))
        rows = required_column(columns, "questions", self.__name__, len(captions))
        questions = []
        right = []
        for row, caption in enumerate(captions):
            where = f"reward {self.__name__!r}: row {row}"
            items = check_questions(rows[row], f"{where}, questions")
            for index, item in enumerate(items):
                choices = [*item["choices"], NOT_SAID]
                order = shuffled_choices(len(choices), str(image_ids[row]), index)
                labels = tuple(ascii_uppercase[: len(choices)])
                lines = [
                    f"{label}. {choices[place]}"
                    for label, place in zip(labels, order, strict=True)
                ]
                text = PROMPT.format(
                    caption=caption,
                    question=item["question"],
                    choices="\n".join(lines),
                )
                asked = Question(text, labels, f"{where}, question {index}")
                questions.append(asked)
                right.append(order.index(choices.index(item["answer"])))
        answers = zip(self.language_model.choose(questions), right, strict=True)
        scores = []
        for caption, items in zip(captions, rows, strict=True):
            row_answers = islice(answers, len(items))
            mean = fmean(probabilities[place] for probabilities, place in row_answers)
            scores.append(mean * length_factor(caption, self.words))
        return checked_scores(self, scores, len(captions))


def shuffled_choices(count: int, image_id: str, index: int) -> list[int]:
    """An order of ``count`` choices that depends on image and number of the question alone."""
    texts = [f"0\0{image_id}\0{index}\0{choice}" for choice in range(count)]
    keys = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return sorted(range(count), key=keys.__getitem__)


def length_factor(caption: str, words: int | None) -> float:
    """min(1, words / length in words of the caption); 1 without a limit."""
    length = len(caption.split())
    return 1.0 if words is None or length <= words else words / length


def check_questions(items: Any, where: str) -> list[ImageQuestion]:
    """The questions of an image, at least one. Raises ``RewardError`` that begins with ``where``."""
    questions = Annotated[list[ImageQuestion], Field(min_length=1)]
    check_type(items, questions, where, RewardError)
    for index, item in enumerate(items):
        choices = item["choices"]
        different = {" ".join(choice.split()) for choice in choices} - {"", NOT_SAID}
        if len(different) < len(choices) or item["answer"] not in choices:
            raise RewardError(
                f"{where}[{index}]: choices are {choices!r:.80} and answer is "
                f"{item['answer']!r:.80}: expected different choices, one of them the answer"
            )
    return items
