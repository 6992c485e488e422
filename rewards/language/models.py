"""Language models behind rewards: questions, what answers them, and how answers are read.

A question with labels is answered by a distribution over them, from the probabilities of the next
token: nothing is sampled and nothing is parsed from a long answer. A question without labels is
answered by a text.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from rewards.base import RewardError, naming
from rewards.images import ImageSource

Value = TypeVar("Value")
LEAST_PROBABILITY = 0.5
"""Smallest probability that the labels of a question have to have together."""
ATTEMPTS = 3
"""How often a question is asked whose answer is a text that cannot be read."""


@dataclass(frozen=True)
class Question:
    """A prompt, perhaps with an image.

    Attributes:
        text: the whole prompt.
        labels: at least two answers, such as ``("A", "B")``; each begins with another token. Empty
            where the answer is a text.
        where: row and question, for messages.
        image: image that the question is about, for vision-language models.
    """

    text: str
    labels: tuple[str, ...]
    where: str
    image: ImageSource | None = None

    def __post_init__(self) -> None:
        with naming(f"{self.where}: the prompt is no text", (UnicodeEncodeError,), RewardError):
            self.text.encode()


class Calls(NamedTuple):
    """Cost of answers; answers from a cache cost nothing."""

    requests: int = 0
    """Prompts that a model has read."""
    tokens: int | None = 0
    """Tokens that were read and written; None where an endpoint did not say how many."""

    def plus(self, requests: int, tokens: int | None) -> "Calls":
        """The sum, which is unknown where one number is."""
        total = None if self.tokens is None or tokens is None else self.tokens + tokens
        return Calls(self.requests + requests, total)


class LanguageModel(Protocol):
    """A model that answers questions; one of a user's own needs only the method that is used.

    It may have an attribute ``calls`` (``Calls``).
    """

    signature: str
    """Model, weights or address, and whatever else an answer depends on."""

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of each question's labels; they add up to 1. Raises ``RewardError``."""
        ...

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """A text for each question, by greedy decoding. Raises ``RewardError``."""
        ...


def calls_of(*models: object) -> Calls:
    """The calls of several models together; None, and a model that does not count, have none."""
    total = Calls()
    for model in models:
        total = total.plus(*getattr(model, "calls", Calls()))
    return total


def choose(model: LanguageModel, questions: Sequence[Question]) -> list[list[float]]:
    """Probabilities of each question's labels.

    Raises ``RewardError`` where the model's numbers are none, such as NaN.
    """
    answers = model.choose(questions)
    for question, answer in zip(questions, answers, strict=True):
        together = math.fsum(answer) if len(answer) == len(question.labels) else math.nan
        if min(answer) < 0 or not abs(together - 1) < 1e-3:
            expected = f"expected probabilities of {list(question.labels)}, which add up to 1"
            raise RewardError(f"{question.where}: the model answers {answer!r:.200}: {expected}")
    return answers


def check_probability(question: Question, probability: float, likely: str) -> None:
    """Refuse an answer whose labels are improbable: the model was about to say something else.

    Args:
        question: for the message.
        probability: of all labels together.
        likely: the most probable token.
    """
    if probability < LEAST_PROBABILITY:
        raise RewardError(
            f"{question.where}: the labels {list(question.labels)} together have the probability "
            f"{probability:.3g}: expected at least {LEAST_PROBABILITY}. The most probable token is "
            f"{likely!r}. A model that thinks first needs chat_template_kwargs that turn it off"
        )


def read_answers(
    model: LanguageModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    read: Callable[[str], Value],
    unreadable: Callable[[RewardError], Value] | None = None,
) -> list[Value]:
    """Ask for texts, and return what ``read`` makes of each.

    ``read`` raises ``ValueError`` for an answer that it cannot read. Its question is asked again,
    with what was wrong; after ``ATTEMPTS`` a ``RewardError`` that names the question is raised, or
    given to ``unreadable``, whose value stands in.
    """
    values: dict[int, Value] = {}
    pending = dict(enumerate(questions))
    for attempt in range(1, ATTEMPTS + 1):
        if not pending:
            break
        answers = model.write(list(pending.values()), max_new_tokens)
        for index, answer in zip(list(pending), answers, strict=True):
            question = questions[index]
            try:
                values[index] = read(answer)
                del pending[index]
            except (ValueError, RecursionError) as error:
                if attempt < ATTEMPTS:
                    again = f"An earlier answer could not be read ({error}). Keep to the format."
                    pending[index] = replace(question, text=f"{question.text}\n\n{again}")
                    continue
                failure = RewardError(
                    f"{question.where}: the answer cannot be read: {error}; it is {answer!r:.200}"
                )
                if unreadable is None:
                    raise failure from error
                values[index] = unreadable(failure)
    return [values[index] for index in range(len(questions))]


def read_list(answer: str) -> list[Any]:
    """The JSON list in an answer, with at least one item. Raises ``ValueError`` without one."""
    start, end = answer.find("["), answer.rfind("]")
    if start < 0 or end < start:
        raise ValueError("it has no list")
    items: list[Any] = json.loads(answer[start : end + 1])
    if not items:
        raise ValueError("its list is empty")
    return items
