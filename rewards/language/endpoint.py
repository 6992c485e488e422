"""A language model behind an OpenAI-compatible endpoint, asked at temperature 0."""

import base64
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field

from rewards.base import RewardError, naming, optional
from rewards.devices import chunks
from rewards.images import open_image
from rewards.language.models import Question, check_probability
from rewards.options import check_values

Answer = TypeVar("Answer")
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, OverflowError)
"""Errors of reading an answer that lacks something."""
MOST_UNLISTED = 0.05
"""Largest share of the labels' probability that labels may have which are not listed."""


class EndpointModel:
    """Asks an OpenAI-compatible endpoint that lists ``top_logprobs``, such as vLLM's, several
    questions at a time; its key is ``OPENAI_API_KEY``.

    Args:
        reward: name of the reward, for messages.
        chat_template_kwargs: variables of the chat template, sent with each request; None turns
            thinking off, and ``{}`` sends nothing, for servers that refuse unknown fields.
        url: up to ``/v1``.
        model: its name there.
        concurrency: requests at a time.
        attempts: attempts for one question, with growing pauses.
        timeout: seconds of one attempt.

    Raises:
        ValueError: an argument is wrong, or the package openai is not installed.
    """

    def __init__(
        self,
        reward: str,
        chat_template_kwargs: dict[str, Any] | None,
        *,
        url: str,
        model: str,
        concurrency: int = 8,
        attempts: int = 6,
        timeout: float = 60.0,
    ) -> None:
        counts = {"concurrency": concurrency, "attempts": attempts}
        check_values(Annotated[int, Field(ge=1, le=1024)], **counts)
        check_values(Annotated[float, Field(gt=0, le=86400)], timeout=timeout)
        optional("openai", f"{reward}: endpoint needs", "'rl-caption[language]'")
        kwargs = chat_template_kwargs
        self.template_kwargs = {"enable_thinking": False} if kwargs is None else kwargs
        self.reward = reward
        self.url = url
        self.model = model
        self.concurrency = concurrency
        self.attempts = attempts
        self.timeout = timeout
        self.signature = f"{model}@{url}"
        if kwargs:
            self.signature += f",{json.dumps(kwargs, sort_keys=True)}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels, among the 20 most probable next tokens.

        Raises ``RewardError`` where the endpoint fails, or does not answer with a label.
        """
        return self._ask(
            questions, _listed, max_tokens=1, logprobs=True, top_logprobs=20
        )

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """Texts. Raises ``RewardError`` where the endpoint fails, or an answer has no text."""
        return self._ask(questions, _text, max_tokens=max_new_tokens)

    def _ask(
        self,
        questions: Sequence[Question],
        read: Callable[[Question, Any], Answer],
        **options: Any,
    ) -> list[Answer]:
        """What ``read`` makes of the first choice of each answer."""
        from openai import OpenAI

        if self.template_kwargs:
            options["extra_body"] = {"chat_template_kwargs": self.template_kwargs}
        answers: list[Answer] = []
        key = os.environ.get("OPENAI_API_KEY") or "none"
        client = OpenAI(
            base_url=self.url,
            api_key=key,
            timeout=self.timeout,
            max_retries=self.attempts - 1,
        )
        with client, ThreadPoolExecutor(self.concurrency) as pool:
            ask = partial(self._complete, client, options)
            for batch in chunks(
                questions, 4 * self.concurrency, f"{self.reward}: answers"
            ):
                for question, completion in zip(
                    batch, pool.map(ask, batch), strict=True
                ):
                    where = f"{question.where}: the answer of {self.url}"
                    with naming(where, MALFORMED, RewardError):
                        answers.append(read(question, completion.choices[0]))
        return answers

    def _complete(
        self, client: Any, options: dict[str, Any], question: Question
    ) -> Any:
        """The answer to one question. Raises ``RewardError`` where the endpoint fails."""
        from openai import OpenAIError

        content: Any = question.text
        if question.image is not None:
            with naming(question.where, (RewardError,), RewardError):
                image = {
                    "type": "image_url",
                    "image_url": {"url": _data_url(question.image)},
                }
            content = [image, {"type": "text", "text": question.text}]
        try:
            return client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                **options,
            )
        except (OpenAIError, json.JSONDecodeError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise RewardError(
                f"{question.where}: {self.url}: {error}{cause}"
            ) from error


def _data_url(source: Any) -> str:
    """An image as an address that has its content, as PNG."""
    buffer = io.BytesIO()
    open_image(source).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _text(question: Question, choice: Any) -> str:
    if not isinstance(choice.message.content, str):
        raise TypeError(f"the content is {choice.message.content!r:.80}: expected text")
    return choice.message.content


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
        masses.append(
            math.fsum(p for (token, _), p in listed.items() if token.strip() == label)
        )
    total = math.fsum(masses)
    likely, _ = max(listed, key=listed.__getitem__)
    check_probability(question, total, likely)
    least = min(listed.values())
    unlisted = min(masses.count(0.0) * least, 1 - math.fsum(listed.values()))
    if unlisted > MOST_UNLISTED * total:
        raise RewardError(
            f"{question.where}: labels that are not among the {len(listed)} listed tokens may have "
            f"the probability {unlisted:.2g}: expected more tokens"
        )
    return [mass / total for mass in masses]
