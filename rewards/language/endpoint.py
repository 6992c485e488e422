"""A language model behind an OpenAI-compatible endpoint, asked at temperature 0."""

import base64
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rewards.base import RewardError, naming, optional
from rewards.devices import chunks
from rewards.images import open_image
from rewards.language.models import Calls, Question, check_probability
from rewards.options import check_fields

Answer = TypeVar("Answer")
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, OverflowError)
"""Errors of reading an answer that lacks something."""
MOST_UNLISTED = 0.05
"""Largest share of the labels' probability that labels may have which are not listed."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint, such as vLLM's.

    Args:
        url: up to ``/v1``.
        model: its name there.
        key_variable: environment variable with the key.
        concurrency: requests at a time.
        attempts: attempts for one question, with growing pauses.
        timeout: seconds of one attempt.
        logprobs: read the probabilities of the labels from the 20 most probable next tokens. False
            takes the text of the answer, which must be a label, with probability 1: for endpoints
            without ``top_logprobs``.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 8
    attempts: Annotated[int, Field(ge=1, le=100)] = 6
    timeout: Annotated[float, Field(gt=0, le=86400)] = 60.0
    logprobs: bool = True


class EndpointModel:
    """Asks an endpoint, several questions at a time.

    Args:
        endpoint: arguments of ``Endpoint``.
        reward: name of the reward, for messages.
        chat_template_kwargs: variables of the chat template, sent with each request; None turns
            thinking off, and ``{}`` sends nothing, for servers that refuse unknown fields.

    Raises:
        ValueError: an argument is wrong, or the package openai is not installed.
    """

    def __init__(
        self,
        endpoint: dict[str, Any],
        reward: str,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        with naming(f"{reward}: endpoint", (TypeError, ValueError), ValueError):
            self.endpoint = Endpoint(**endpoint)
            check_fields(self.endpoint)
        optional("openai", f"{reward}: endpoint needs", "'rl-caption[language]'")
        kwargs = chat_template_kwargs
        self.template_kwargs = {"enable_thinking": False} if kwargs is None else kwargs
        self.reward, self.calls = reward, Calls()
        self.signature = f"{self.endpoint.model}@{self.endpoint.url}"
        if not self.endpoint.logprobs:
            self.signature += ",text"
        if kwargs:
            self.signature += f",{json.dumps(kwargs, sort_keys=True)}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels.

        Raises ``RewardError`` where the endpoint fails, or does not answer with a label.
        """
        if not self.endpoint.logprobs:
            return self._ask(questions, _said, max_tokens=1)
        return self._ask(questions, _listed, max_tokens=1, logprobs=True, top_logprobs=20)

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """Texts. Raises ``RewardError`` where the endpoint fails, or an answer has no text."""
        return self._ask(questions, _text, max_tokens=max_new_tokens)

    def _ask(
        self, questions: Sequence[Question], read: Callable[[Question, Any], Answer], **options: Any
    ) -> list[Answer]:
        """What ``read`` makes of the first choice of each answer."""
        from openai import OpenAI

        if self.template_kwargs:
            options["extra_body"] = {"chat_template_kwargs": self.template_kwargs}
        endpoint, answers = self.endpoint, list[Answer]()
        with (
            OpenAI(
                base_url=endpoint.url,
                api_key=os.environ.get(endpoint.key_variable) or "none",
                timeout=endpoint.timeout,
                max_retries=endpoint.attempts - 1,
            ) as client,
            ThreadPoolExecutor(endpoint.concurrency) as pool,
        ):
            ask = partial(self._complete, client, options)
            title = f"{self.reward}: answers"
            for batch in chunks(questions, 4 * endpoint.concurrency, title):
                for question, completion in zip(batch, pool.map(ask, batch), strict=True):
                    where = f"{question.where}: the answer of {endpoint.url}"
                    with naming(where, MALFORMED, RewardError):
                        self.calls = self.calls.plus(1, _tokens(completion))
                        answers.append(read(question, completion.choices[0]))
        return answers

    def _complete(self, client: Any, options: dict[str, Any], question: Question) -> Any:
        """The answer to one question. Raises ``RewardError`` where the endpoint fails."""
        from openai import OpenAIError

        content: Any = question.text
        if question.image is not None:
            with naming(question.where, (RewardError,), RewardError):
                url = _data_url(question.image)
            image = {"type": "image_url", "image_url": {"url": url}}
            content = [image, {"type": "text", "text": question.text}]
        try:
            return client.chat.completions.create(
                model=self.endpoint.model,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                **options,
            )
        except (OpenAIError, json.JSONDecodeError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise RewardError(f"{question.where}: {self.endpoint.url}: {error}{cause}") from error


def _data_url(source: Any) -> str:
    """An image as an address that has its content, as PNG."""
    buffer = io.BytesIO()
    open_image(source).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _tokens(completion: Any) -> int | None:
    """Tokens that an answer says it took; None where it does not."""
    return None if completion.usage is None else completion.usage.total_tokens


def _text(question: Question, choice: Any) -> str:
    if not isinstance(choice.message.content, str):
        raise TypeError(f"the content is {choice.message.content!r:.80}: expected text")
    return choice.message.content


def _said(question: Question, choice: Any) -> list[float]:
    """Probability 1 of the label that an answer is."""
    text = _text(question, choice).strip().rstrip(".):")
    if text not in question.labels:
        expected = f"expected one of {list(question.labels)}"
        raise RewardError(f"{question.where}: the answer is {text!r:.80}: {expected}")
    return [float(text == label) for label in question.labels]


def _listed(question: Question, choice: Any) -> list[float]:
    """Probabilities of the labels among themselves; a label that is not listed has 0.

    A token that is not listed is at most as probable as any listed one, and all of them together
    have what the listed ones leave.
    """
    # Some servers list the token that they chose once more.
    listed = {
        (one.token, one.logprob): math.exp(one.logprob)
        for one in choice.logprobs.content[0].top_logprobs
    }
    masses = []
    for label in question.labels:
        masses.append(math.fsum(p for (token, _), p in listed.items() if token.strip() == label))
    total = math.fsum(masses)
    ((likely, _), least) = max(listed, key=listed.__getitem__), min(listed.values())
    check_probability(question, total, likely)
    unlisted = min(masses.count(0.0) * least, 1 - math.fsum(listed.values()))
    if unlisted > MOST_UNLISTED * total:
        raise RewardError(
            f"{question.where}: labels that are not among the {len(listed)} listed tokens may have "
            f"the probability {unlisted:.2g}: expected more tokens, or logprobs: false"
        )
    return [mass / total for mass in masses]
