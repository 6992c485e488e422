"""Language models behind rewards: questions, and what answers them.

A question with labels is answered by a distribution over them, from the probabilities of the next
token: nothing is sampled and nothing is parsed from a long answer. A question without labels is
answered by a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rewards.base import RewardError, naming
from rewards.images import ImageSource

LEAST_PROBABILITY = 0.5
"""Smallest probability that the labels of a question have to have together."""


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
        with naming(
            f"{self.where}: the prompt is no text", (UnicodeEncodeError,), RewardError
        ):
            self.text.encode()


class LanguageModel(Protocol):
    """A model that answers questions; one of a user's own needs only the method that is used."""

    signature: str
    """Model, weights or address, and whatever else an answer depends on."""

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of each question's labels; they add up to 1. Raises ``RewardError``."""
        ...

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """A text for each question, by greedy decoding. Raises ``RewardError``."""
        ...


def check_probability(question: Question, probability: float, likely: str) -> None:
    """Refuse an answer whose labels are improbable: the model was about to say something else.

    Args:
        question: for the message.
        probability: of all labels together.
        likely: the most probable token.
    """
    if not probability >= LEAST_PROBABILITY:
        raise RewardError(
            f"{question.where}: the labels {list(question.labels)} together have the probability "
            f"{probability:.3g}: expected at least {LEAST_PROBABILITY}. The most probable token is "
            f"{likely!r}. A model that thinks first needs chat_template_kwargs that turn it off"
        )
