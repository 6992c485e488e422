"""Language models behind rewards: a local one of Transformers, or one behind an
OpenAI-compatible endpoint.

A question with labels is answered by a distribution over them, from the probabilities
of the next token: nothing is sampled and nothing is parsed from a long answer. A
question without labels is answered by a text.
"""

import base64
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rewards.base import RewardError, naming, optional
from rewards.devices import Precision, chunks
from rewards.frozen_model import load_frozen
from rewards.images import ImageSource, open_image
from rewards.options import Count, check_values

Answer = TypeVar("Answer")
LEAST_PROBABILITY = 0.5
"""Smallest total probability of a question's labels; a lower one is an error."""
MOST_UNLISTED = 0.05
"""Largest share of the labels' probability that unlisted labels may have."""
MALFORMED = (AttributeError, LookupError, TypeError, ValueError, OverflowError)
"""Errors of reading an answer that lacks something."""


class Question(NamedTuple):
    """A prompt, perhaps with an image.

    Attributes:
        text: the whole prompt.
        labels: at least two answers, such as ``("A", "B")``; each begins with another
            token. Empty where the answer is a text.
        where: row and question, for messages.
        image: image that the question is about, for vision-language models.
    """

    text: str
    labels: tuple[str, ...]
    where: str
    image: ImageSource | None = None


class LanguageModel(Protocol):
    """A model that answers questions. A user's own needs only the method that its
    reward calls.
    """

    signature: str
    """Model, weights or address, and whatever else an answer depends on."""

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of each question's labels; they add up to 1. Raises ``RewardError``."""
        ...

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """A text for each question, by greedy decoding. Raises ``RewardError``."""
        ...


def build_model(
    reward: str,
    model: str | LanguageModel | None = None,
    endpoint: dict[str, Any] | None = None,
    device: str | None = None,
    precision: Precision = "fp32",
    chat_template_kwargs: dict[str, Any] | None = None,
    vision: bool = False,
) -> LanguageModel:
    """Make the language model of a reward from the reward's options.

    Args:
        reward: its name, for messages.
        model: a local model of Transformers (a folder with safetensors weights, or a
            name on the hub), or a ``LanguageModel`` of a user's own.
        endpoint: ``{url, model, concurrency, timeout}`` of ``EndpointModel``, in place of ``model``.
        device, precision: of the local model, as for ``Icc``.
        chat_template_kwargs: variables of the chat template, local or behind the
            endpoint. By default thinking is turned off; ``{}`` sends none to the
            endpoint.
        vision: whether the questions have images.

    Raises:
        ValueError: not exactly one of ``model`` and ``endpoint`` is set, an argument is
            wrong, or the model cannot be loaded.
    """
    if (model is None) == (endpoint is None):
        raise ValueError(
            f"{reward}: set either model or endpoint: {{url: ..., model: ...}}"
        )
    if endpoint is not None:
        with naming(f"{reward}: endpoint", (TypeError, ValueError)):
            return EndpointModel(reward, chat_template_kwargs, **endpoint)
    if not isinstance(model, str | Path):
        return model  # type: ignore[return-value]  # not None
    return LocalModel(
        str(model), reward, vision, device, precision, chat_template_kwargs
    )


def check_probability(labels: Sequence[str], probability: float, likely: str) -> None:
    """Raise ``RewardError`` if the labels are improbable: the model was about to say
    something else.

    Args:
        labels: labels of the question.
        probability: total probability of the labels.
        likely: the most probable token.
    """
    if not probability >= LEAST_PROBABILITY:
        raise RewardError(
            f"the labels {list(labels)} together have the probability {probability:.3g}: expected "
            f"at least {LEAST_PROBABILITY}. The most probable token is {likely!r}. A model that "
            f"thinks first needs chat_template_kwargs that turn it off"
        )


class LocalModel:
    """A language model or vision-language model of Transformers. It answers one prompt
    after the other, so that no answer depends on others.

    Prompts go through the chat template. Models that can think before they answer are
    told not to (``enable_thinking``).

    Args:
        model: folder with safetensors weights, or a name on the hub.
        reward: its name, for messages.
        vision: whether it is a vision-language model.
        device: None is the process's current CUDA device if there is one, else the CPU.
        precision: of weights and activations.
        chat_template_kwargs: variables of the chat template.

    Raises:
        ValueError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        reward: str,
        vision: bool,
        device: str | None,
        precision: Precision,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> None:
        head = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
        self.frozen = load_frozen(head, model, reward, device, precision)
        self.reader = self.frozen.tokenizer
        self.tokenizer = getattr(self.reader, "tokenizer", self.reader)
        self.reward = reward
        self.vision = vision
        self.template_kwargs = dict(chat_template_kwargs or {})
        if "enable_thinking" in str(self.reader.chat_template):
            self.template_kwargs.setdefault("enable_thinking", False)
        variables = json.dumps(self.template_kwargs, sort_keys=True)
        name = Path(model).name
        self.signature = f"{name},{self.frozen.weights},{precision},{variables}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels, by one forward pass each.

        Raises ``RewardError`` for a prompt that is longer than the model reads, for an
        image that cannot be opened or is refused by the processor, and for a model
        without a chat template; the message names the row.
        """
        return self._ask(questions, 1, self._shares)

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """Texts by greedy decoding.

        Raises ``RewardError`` as ``choose``, also where a prompt leaves no room for the text.
        """
        return self._ask(questions, max_new_tokens, self._text)

    def _ask(
        self,
        questions: Sequence[Question],
        max_new_tokens: int,
        read: Callable[[Question, Any], Answer],
    ) -> list[Answer]:
        """Answers that ``read`` takes from Transformers' output: tokens, and logits [1,
        V] of each new token.
        """
        answers = []
        kinds = (ValueError, TypeError, RewardError)
        for (question,) in chunks(questions, 1, f"{self.reward}: answers"):
            with naming(question.where, kinds, RewardError):
                inputs = self._encode(question)
                length = inputs["input_ids"].shape[1]
                most = self.frozen.longest - max_new_tokens + 1
                if length > most:
                    raise ValueError(f"it has {length} tokens: expected at most {most}")
                output = self.frozen.network.generate(
                    **inputs,
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=self.tokenizer.eos_token_id,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                answers.append(read(question, output))
        return answers

    def _encode(self, question: Question) -> Any:
        content: Any = question.text
        if self.vision:
            content = [{"type": "text", "text": question.text}]
            if question.image is not None:
                image = open_image(question.image)
                content.insert(0, {"type": "image", "image": image})
        encoded = self.reader.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **self.template_kwargs,
        )
        moved = encoded.to(self.frozen.device)
        return moved.to(dtype=self.frozen.network.dtype) if self.vision else moved

    def _shares(self, question: Question, output: Any) -> list[float]:
        """Probabilities of the labels among themselves, from the logits of the next token."""
        import torch

        logits = output.logits[0][0].double()
        ids = label_ids(self.tokenizer, question.labels)
        scores = torch.stack([torch.logsumexp(logits[pieces], dim=0) for pieces in ids])
        together = (scores.logsumexp(0) - logits.logsumexp(0)).exp().item()
        likely = self.tokenizer.decode([int(logits.argmax())])
        check_probability(question.labels, together, likely)
        return scores.softmax(dim=0).tolist()

    def _text(self, question: Question, output: Any) -> str:
        new_ids = output.sequences[0, -len(output.logits) :]
        return self.tokenizer.decode(new_ids, skip_special_tokens=True)


def label_ids(tokenizer: Any, labels: Sequence[str]) -> list[list[int]]:
    """First tokens of each label, with and without a space before it.

    Raises ``ValueError`` where two labels share a token.
    """
    ids = []
    for label in labels:
        both = tokenizer([label, f" {label}"], add_special_tokens=False)["input_ids"]
        firsts = {tokens[0] for tokens in both}
        ids.append([token for token in firsts if tokenizer.decode([token]).strip()])
    if not all(ids) or len(set().union(*ids)) < sum(map(len, ids)):
        raise ValueError(
            f"the first tokens of the labels {list(labels)} are not different"
        )
    return ids


class EndpointModel:
    """Asks an OpenAI-compatible endpoint that lists ``top_logprobs``, such as vLLM's,
    at temperature 0, several questions at a time; its key is the environment variable
    ``OPENAI_API_KEY``.

    Args:
        reward: name of the reward, for messages.
        chat_template_kwargs: variables of the chat template, sent with each request;
            None turns thinking off, and ``{}`` sends nothing, for servers that refuse
            unknown fields.
        url: address of the endpoint, up to ``/v1``.
        model: name of the model at the endpoint.
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
        check_values(Count, concurrency=concurrency, attempts=attempts)
        optional("openai", f"{reward}: endpoint needs", "'rl-caption[language]'")
        self.template_kwargs = chat_template_kwargs
        if chat_template_kwargs is None:
            self.template_kwargs = {"enable_thinking": False}
        self.reward = reward
        self.url = url
        self.model = model
        self.concurrency = concurrency
        self.options: dict[str, Any] = {
            "base_url": url,
            "timeout": timeout,
            "max_retries": attempts - 1,
        }
        variables = json.dumps(self.template_kwargs, sort_keys=True)
        self.signature = f"{model}@{url},{variables}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels, among the 20 most probable next tokens.

        Raises ``RewardError`` where the endpoint fails, or does not answer with a label.
        """
        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
        return self._ask(questions, _listed_probabilities, options)

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """Texts. Raises ``RewardError`` where the endpoint fails, or an answer has no text."""
        return self._ask(questions, _text, {"max_tokens": max_new_tokens})

    def _ask(
        self,
        questions: Sequence[Question],
        read: Callable[[Question, Any], Answer],
        options: dict[str, Any],
    ) -> list[Answer]:
        """Answers that ``read`` takes from the first choice of each completion."""
        from openai import OpenAI, OpenAIError

        if self.template_kwargs:
            options["extra_body"] = {"chat_template_kwargs": self.template_kwargs}
        key = os.environ.get("OPENAI_API_KEY") or "none"
        client = OpenAI(api_key=key, **self.options)

        def ask(question: Question) -> Answer:
            """Send one request and read its answer."""
            where = f"{question.where}: the answer of {self.url}"
            with naming(where, (OpenAIError, RewardError, *MALFORMED), RewardError):
                completion = client.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "user", "content": _content(question)}],
                    temperature=0,
                    **options,
                )
                return read(question, completion.choices[0])

        answers: list[Answer] = []
        with client, ThreadPoolExecutor(self.concurrency) as pool:
            title = f"{self.reward}: answers"
            for batch in chunks(questions, 4 * self.concurrency, title):
                answers += pool.map(ask, batch)
        return answers


def _content(question: Question) -> Any:
    """Content of a message: the text alone, or an image, as a data URL of a PNG, and
    the text.
    """
    if question.image is None:
        return question.text
    buffer = io.BytesIO()
    open_image(question.image).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return [image, {"type": "text", "text": question.text}]


def _text(question: Question, choice: Any) -> str:
    if not isinstance(choice.message.content, str):
        raise TypeError(f"the content is {choice.message.content!r:.80}: expected text")
    return choice.message.content


def _listed_probabilities(question: Question, choice: Any) -> list[float]:
    """Probabilities of the labels among themselves; a label that is not listed has 0.

    An unlisted token is at most as probable as any listed token, and the unlisted
    tokens together have the probability that the listed tokens leave. ``RewardError``
    if unlisted labels may have more than ``MOST_UNLISTED``.
    """
    # Some servers list the token that they chose once more.
    tokens = choice.logprobs.content[0].top_logprobs
    listed = {(one.token, one.logprob): math.exp(one.logprob) for one in tokens}
    masses = [
        math.fsum(mass for (token, _), mass in listed.items() if token.strip() == label)
        for label in question.labels
    ]
    total = math.fsum(masses)
    likely, _ = max(listed, key=listed.__getitem__)
    check_probability(question.labels, total, likely)
    least = min(listed.values())
    unlisted = min(masses.count(0.0) * least, 1 - math.fsum(listed.values()))
    if unlisted > MOST_UNLISTED * total:
        raise RewardError(
            f"labels that are not among the {len(listed)} listed tokens may have the probability "
            f"{unlisted:.2g}: expected more tokens"
        )
    return [mass / total for mass in masses]
