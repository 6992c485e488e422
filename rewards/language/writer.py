"""Models that answer a prompt with a text: a local one, greedily, or an OpenAI-compatible endpoint at temperature 0."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from rewards.base import RewardError
from rewards.devices import Precision, chunks
from rewards.frozen_model import load_frozen
from rewards.language.chooser import (
    CachedModel,
    Endpoint,
    EndpointClient,
    Question,
    VisionModel,
    answering_model,
    prompt_ids,
)
from rewards.options import Count, check_values

Value = TypeVar("Value")
ATTEMPTS = 3
"""How often a question is asked whose answer cannot be read."""


@runtime_checkable
class Writer(Protocol):
    """A model that answers questions with texts."""

    signature: str
    """Model, weights or address, and whatever else an answer depends on."""

    def write(self, questions: Sequence[Question]) -> list[str]:
        """The answer to each question. Raises ``RewardError``."""
        ...


def build_writer(
    name: str,
    model: str | Writer | None = None,
    endpoint: Endpoint | dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    device: str | None = None,
    precision: Precision = "fp32",
    max_new_tokens: int = 512,
    vision: bool = False,
) -> Writer:
    """The model behind texts: a local one (``model``), an ``endpoint``, or a ``Writer`` of one's own as ``model``.

    Args:
        name: of what is built, for messages.
        model: folder with safetensors weights, or a name on the hub: a vision-language model with ``vision``, else a
            causal language model.
        endpoint: an OpenAI-compatible one in its place, as arguments of ``Endpoint``.
        cache_dir: folder where answers are kept.
        device, precision: of the local model, as for ``Icc``.
        max_new_tokens: most tokens of an answer.
        vision: whether the questions have images.

    Raises:
        ValueError: not exactly one of ``model`` and ``endpoint`` is set, or the model cannot be loaded.
    """
    check_values(Count, max_new_tokens=max_new_tokens)

    def load(folder: str) -> Writer:
        return (VisionWriter if vision else TextWriter)(
            folder, name, device, precision, max_new_tokens
        )

    def ask(options: Endpoint) -> Writer:
        return EndpointWriter(options, max_new_tokens)

    return answering_model(name, model, endpoint, cache_dir, Writer, load, ask, CachedWriter)


def read_answers(
    writer: Writer,
    questions: Sequence[Question],
    read: Callable[[str], Value],
    unreadable: Callable[[RewardError], Value] | None = None,
) -> list[Value]:
    """What ``read`` makes of each answer. It raises ``ValueError`` for one that it cannot read.

    Such a question is asked again, with what was wrong; after ``ATTEMPTS`` there is a ``RewardError``, which begins
    with the question's ``where``. It is raised, or given to ``unreadable``, whose value stands in.
    """
    values: dict[int, Value] = {}
    pending = dict(enumerate(questions))
    for attempt in range(1, ATTEMPTS + 1):
        if not pending:
            break
        answers = writer.write(list(pending.values()))
        for (index, question), answer in zip(list(pending.items()), answers, strict=True):
            try:
                values[index] = read(answer)
                del pending[index]
            except (ValueError, RecursionError) as error:
                if attempt == ATTEMPTS:
                    problem = f"{error}; it is {answer!r:.200}"
                    failure = RewardError(f"{question.where}: the answer cannot be read: {problem}")
                    if unreadable is None:
                        raise failure from error
                    values[index] = unreadable(failure)
                    continue
                text = f"{questions[index].text}\n\nAn earlier answer could not be read ({error}). Keep to the format."
                pending[index] = replace(question, text=text)
    return [values[index] for index in range(len(questions))]


def read_list(answer: str) -> list[Any]:
    """The JSON list in an answer, with at least one item. ``ValueError`` or ``RecursionError`` if there is none."""
    start, end = answer.find("["), answer.rfind("]")
    if start < 0 or end < start:
        raise ValueError("it has no list")
    items = json.loads(answer[start : end + 1])
    if not items:
        raise ValueError("its list is empty")
    return list(items)


class TextWriter:
    """A local causal language model, greedily, one prompt at a time, so that an answer depends on its prompt alone."""

    def __init__(
        self, model: str, name: str, device: str | None, precision: Precision, max_new_tokens: int
    ) -> None:
        self._frozen, self.name = (
            load_frozen("AutoModelForCausalLM", model, name, device, precision),
            name,
        )
        self.max_new_tokens = max_new_tokens
        self.signature = (
            f"{Path(model).name},{self._frozen.weights},{precision},tokens{max_new_tokens}"
        )
        self.requests = self.tokens = 0

    def write(self, questions: Sequence[Question]) -> list[str]:
        """As ``Writer.write``. Raises ``RewardError`` for a prompt that leaves no room for the answer."""
        import torch

        answers = []
        for (question,) in chunks(questions, 1, f"{self.name}: texts"):
            ids = torch.tensor(
                [prompt_ids(self._frozen, question, self.max_new_tokens)],
                device=self._frozen.device,
            )
            answers.append(
                _generate(self._frozen.network, self._frozen.tokenizer, self, {"input_ids": ids})
            )
        return answers


class VisionWriter:
    """A local vision-language model, greedily, one prompt with its image at a time."""

    def __init__(
        self, model: str, name: str, device: str | None, precision: Precision, max_new_tokens: int
    ) -> None:
        self._model, self.name = VisionModel(model, name, device, precision), name
        self.max_new_tokens = max_new_tokens
        self.signature = f"{self._model.signature},tokens{max_new_tokens}"
        self.requests = self.tokens = 0

    def write(self, questions: Sequence[Question]) -> list[str]:
        """As ``Writer.write``. Raises ``RewardError`` for an image that cannot be opened."""
        network, tokenizer = self._model.network, self._model.processor.tokenizer
        return [
            _generate(network, tokenizer, self, self._model.inputs([question]))
            for (question,) in chunks(questions, 1, f"{self.name}: texts")
        ]


def _generate(network: Any, tokenizer: Any, writer: TextWriter | VisionWriter, inputs: Any) -> str:
    """The greedy answer to one prompt; the writer counts it."""
    import torch

    end = tokenizer.eos_token_id
    options = {
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": writer.max_new_tokens,
        "pad_token_id": end,
    }
    mask = (
        {}
        if "attention_mask" in inputs
        else {"attention_mask": torch.ones_like(inputs["input_ids"])}
    )
    with torch.no_grad():
        ids = network.generate(**inputs, **mask, **options)[0]
    writer.requests += 1
    writer.tokens += len(ids)
    return str(tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True))


class EndpointWriter:
    """An OpenAI-compatible endpoint."""

    def __init__(self, endpoint: Endpoint, max_new_tokens: int) -> None:
        self.client, self.max_new_tokens = EndpointClient(endpoint), max_new_tokens
        self.signature = f"{endpoint.model}@{endpoint.url},tokens{max_new_tokens}"

    @property
    def requests(self) -> int:
        """As ``EndpointClient.requests``."""
        return self.client.requests

    @property
    def tokens(self) -> int | None:
        """As ``EndpointClient.tokens``."""
        return self.client.tokens

    def write(self, questions: Sequence[Question], end: float | None = None) -> list[str]:
        """As ``Writer.write``, until ``end`` (``EndpointClient.map``).

        Raises ``RewardError`` where the endpoint fails or its answer has no text.
        """
        return self.client.map(self._answer, questions, end)

    def _answer(self, question: Question, end: float) -> str:
        answer = self.client.ask(question, self.max_new_tokens, end)
        with self.client.naming_answer(question):
            text = answer["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"the content is {text!r:.80}: expected text")
        return text


class CachedWriter(CachedModel):
    """Another writer whose answers are kept in a folder."""

    def write(self, questions: Sequence[Question]) -> list[str]:
        """As ``Writer.write``; only questions without an answer are asked, each once."""
        return self._cache.answers(self.signature, questions, self._ask(self.model.write))
