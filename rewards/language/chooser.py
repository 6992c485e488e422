"""Models that choose one of a few labels: by one forward pass, or behind an OpenAI-compatible endpoint.

A choice is a distribution over the labels, from the probabilities of the next token. Nothing is sampled and nothing is
parsed from a long answer, so the same question has the same answer. ``writer`` has models that answer with text.
"""

import base64
import contextlib
import hashlib
import inspect
import io
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from rewards.base import RewardError, naming
from rewards.devices import Precision, chunks, default_device
from rewards.frozen_model import FrozenModel, load_frozen
from rewards.http import HttpError, request_json, token_of
from rewards.images import ImageSource, image_identity, open_image
from rewards.options import Count, Range, check_fields, check_values

Answer = TypeVar("Answer")
Model = TypeVar("Model")
logger = logging.getLogger(__name__)
LEAST_MASS = 1e-6
"""Smallest probability of all labels together that counts as an answer."""
MOST_UNLISTED = 0.05
"""Largest share of the labels' probability that labels may have which an endpoint does not list."""
SAVED_TOGETHER = 256
"""Answers that are written to the cache at a time; what is computed before an error is kept."""


@dataclass(frozen=True)
class Question:
    """A question whose answer is one of ``labels``.

    Attributes:
        text: the whole prompt.
        labels: at least two, such as ``("A", "B")``; each begins with another token. Empty where the
            answer is a text.
        where: row and question, for messages.
        image: that the question is about, for vision-language models.
    """

    text: str
    labels: tuple[str, ...]
    where: str
    image: ImageSource | None = None


@runtime_checkable
class Chooser(Protocol):
    """A model that answers questions."""

    signature: str
    """Model, weights or address, and whatever else an answer depends on."""

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels of each question; they add up to 1. Raises ``RewardError``."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint, such as vLLM's.

    Args:
        url: up to ``/v1``.
        model: its name there.
        key_variable: environment variable with the key; without one none is sent.
        concurrency: requests at a time.
        attempts: attempts for one question, with growing pauses.
        timeout: seconds of one attempt.
        max_requests: requests of this process, after which scoring stops with an error; None is no limit.
        time_limit: seconds that one scoring may take, those of retries included; None is no limit.
        logprobs: read the probabilities of the labels from the most probable next tokens, 20 where the endpoint lists
            so many; a label that is not among them has 0, and the question no answer where that could change the
            probabilities by more than 5 %. False takes the text of the answer, which must be a label, with probability
            1: for endpoints without ``top_logprobs``.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    concurrency: Annotated[int, Range(min=1, max=1024)] = 8
    attempts: Annotated[int, Range(min=1, max=100)] = 6
    timeout: Annotated[float, Range(above=0, max=86400)] = 60.0
    max_requests: Count | None = None
    time_limit: Annotated[float, Range(above=0, max=10**9)] | None = None
    logprobs: bool = True


class Calls(NamedTuple):
    """What answers have cost; those from a cache cost nothing."""

    requests: int
    """Prompts that a model has read."""
    tokens: int | None
    """Tokens that were read and written; None where an endpoint did not say how many."""


def calls_of(*models: object) -> Calls:
    """The calls of several models together; None, and a model of one's own that does not count, have none."""
    tokens = [getattr(model, "tokens", 0) for model in models]
    return Calls(
        sum(getattr(model, "requests", 0) for model in models),
        None if None in tokens else sum(tokens),
    )


def choose(chooser: Chooser, questions: Sequence[Question]) -> list[list[float]]:
    """Probabilities of the labels of each question. Raises ``RewardError`` where a model's answer has none."""
    answers = chooser.choose(questions)
    if len(answers) != len(questions):
        raise RewardError(
            f"the model {chooser.signature} has {len(answers)} answers to {len(questions)} questions"
        )
    for question, answer in zip(questions, answers, strict=True):
        if not _can_answer(answer, question):
            expected = f"expected probabilities of {list(question.labels)}, which add up to 1"
            raise RewardError(f"{question.where}: the model answers {answer!r:.200}: {expected}")
    return answers


def build_chooser(
    reward: str,
    model: str | Chooser | None,
    endpoint: Endpoint | dict[str, Any] | None,
    cache_dir: str | Path | None,
    device: str | None,
    precision: Precision,
    batch_size: int,
    vision: bool,
) -> Chooser:
    """The model behind a reward: a local one (``model``), an ``endpoint``, or a ``Chooser`` of one's own as ``model``,
    with a cache on disk where asked for.

    Raises:
        ValueError: not exactly one of ``model`` and ``endpoint`` is set, or the model cannot be loaded.
    """
    check_values(Count, batch_size=batch_size)

    def load(name: str) -> Chooser:
        if vision:
            return VisionChooser(name, reward, device, precision, batch_size)
        return TextChooser(name, reward, device, precision, batch_size)

    return answering_model(
        reward, model, endpoint, cache_dir, Chooser, load, EndpointChooser, CachedChooser
    )


def answering_model(
    name: str,
    model: Any,
    endpoint: Endpoint | dict[str, Any] | None,
    cache_dir: str | Path | None,
    protocol: Any,
    load: Callable[[str], Model],
    ask: Callable[[Endpoint], Model],
    keep: Callable[[Model, Path], Model],
) -> Model:
    """The one model of a ``protocol`` that options choose, for messages about ``name``: ``model`` itself where it is
    one, else what ``load`` makes of this name; or what ``ask`` makes of ``endpoint``. ``keep`` adds the cache.

    Raises:
        ValueError: not exactly one of ``model`` and ``endpoint`` is set, or an option of the endpoint is wrong.
    """
    if (model is None) == (endpoint is None):
        raise ValueError(
            f"{name}: set either model (a local model) or endpoint: {{url: ..., model: ...}}"
        )
    answerer: Model
    if endpoint is not None:
        if not isinstance(endpoint, Endpoint):
            signature = inspect.signature(Endpoint)  # whose errors name the key alone
            with naming(f"{name}: endpoint", (TypeError,), ValueError):
                signature.bind_partial(**endpoint)
                signature.bind(**endpoint)
            endpoint = Endpoint(**endpoint)
        answerer = ask(endpoint)
    else:
        answerer = model if isinstance(model, protocol) else load(str(model))
    return answerer if cache_dir is None else keep(answerer, Path(cache_dir))


def label_ids(tokenizer: Any, labels: Sequence[str], reward: str) -> list[list[int]]:
    """First tokens of each label, with and without a space before it. Raises ``ValueError`` where two share one."""
    ids = []
    for label in labels:
        pieces = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (label, f" {label}")
        )
        spoken = {
            piece for tokens in pieces for piece in tokens[:1] if tokenizer.decode([piece]).strip()
        }
        ids.append(sorted(spoken))
    first = [piece for pieces in ids for piece in pieces]
    if len(set(first)) < len(first) or not all(ids):
        raise ValueError(
            f"{reward}: the tokenizer does not tell the labels {list(labels)} apart by their first tokens"
        )
    return ids


def label_probabilities(logits: Any, ids: Sequence[Sequence[int]]) -> list[float]:
    """Probabilities of the labels among themselves, from the logits [V] of the next token."""
    import torch

    scores = torch.stack([torch.logsumexp(logits[list(pieces)].double(), dim=0) for pieces in ids])
    return scores.softmax(dim=0).tolist()


def prompt_ids(frozen: FrozenModel, question: Question, room: int = 0) -> list[int]:
    """Tokens of a prompt: by the tokenizer's chat template where it has one, else the prompt and ``Answer:``.

    Raises:
        RewardError: it and ``room`` further tokens are more than the model reads.
    """
    tokenizer = frozen.tokenizer
    if tokenizer.chat_template:
        message = [{"role": "user", "content": question.text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(f"{question.text}\nAnswer:")["input_ids"]
    if len(ids) + room > frozen.longest:
        size = f"{len(ids)} tokens" + (f" and the answer up to {room}" if room else "")
        raise RewardError(
            f"{question.where}: the prompt has {size}, the model reads {frozen.longest}"
        )
    return ids


def next_logits(network: Any, inputs: Mapping[str, Any]) -> Any:
    """Logits [B, V] of the first token of the answers to B prompts.

    Prompts are padded on the right, where no token that counts sees the padding, so that an answer does not depend on
    the batch (but for rounding). Logits are made for the ends of prompts alone: those of whole prompts take gigabytes.
    """
    import torch

    ends = inputs["attention_mask"].sum(1) - 1
    positions, place = torch.unique(ends, return_inverse=True)
    keeps = (
        "logits_to_keep" in inspect.signature(network.forward).parameters
    )  # a few models make all logits
    with torch.no_grad():
        logits = network(
            **inputs, use_cache=False, **({"logits_to_keep": positions} if keeps else {})
        ).logits
    return logits[torch.arange(len(ends), device=place.device), place if keeps else ends]


def _answer(question: Question, logits: Any, tokenizer: Any, reward: str) -> list[float]:
    """Probabilities of the labels from the logits [V] of the first token of the answer."""
    with naming(question.where, (ValueError,), RewardError):
        pieces = label_ids(tokenizer, question.labels, reward)
    return label_probabilities(logits, pieces)


class TextChooser:
    """A local causal language model: one forward pass for a batch of prompts."""

    def __init__(
        self, model: str, reward: str, device: str | None, precision: Precision, batch_size: int
    ) -> None:
        self._frozen, self.reward = (
            load_frozen("AutoModelForCausalLM", model, reward, device, precision),
            reward,
        )
        self.batch_size = batch_size
        self.signature = f"{Path(model).name},{self._frozen.weights},{precision}"
        self.requests = self.tokens = 0

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As ``Chooser.choose``. Raises ``RewardError`` for a prompt that is longer than the model reads."""
        import torch

        prompts = [prompt_ids(self._frozen, question) for question in questions]
        answers: list[list[float]] = [[] for _ in questions]
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for batch in chunks(order, self.batch_size, f"{self.reward}: answers"):
            ids = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(prompts[row]) for row in batch], batch_first=True
            )
            lengths = torch.tensor([len(prompts[row]) for row in batch])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
            device = self._frozen.device
            logits = next_logits(
                self._frozen.network,
                {"input_ids": ids.to(device), "attention_mask": mask.to(device)},
            )
            for row, logits_of_row in zip(batch, logits, strict=True):
                answers[row] = _answer(
                    questions[row], logits_of_row, self._frozen.tokenizer, self.reward
                )
            self.requests += len(batch)
            self.tokens += int(lengths.sum())
        return answers


class VisionModel:
    """A local vision-language model of Transformers with a chat template."""

    def __init__(self, model: str, reward: str, device: str | None, precision: Precision) -> None:
        check_values(Precision, precision=precision)
        import transformers

        from rewards.devices import DTYPES
        from rewards.model_files import fingerprint, load_complete, transformers_options

        with naming(f"{reward}: the model {model!r} cannot be loaded"):
            options = transformers_options(model)
            self.processor: Any = transformers.AutoProcessor.from_pretrained(
                model, padding_side="right", **options
            )
            if not getattr(self.processor, "chat_template", None):
                raise ValueError("its processor has no chat template")
            if (
                self.processor.tokenizer.pad_token is None
            ):  # any will do, as no token sees the padding
                self.processor.tokenizer.pad_token = self.processor.tokenizer.eos_token
            options |= {"dtype": DTYPES[precision], "use_safetensors": True}
            network = load_complete(transformers.AutoModelForImageTextToText, model, **options)
        self.device = default_device(device)
        self.network = network.to(self.device).eval().requires_grad_(False)
        self.signature = f"{Path(model).name},{fingerprint(network.state_dict())[:12]},{precision}"

    def inputs(self, questions: Sequence[Question]) -> Any:
        """Tensors of prompts with their images, padded on the right.

        Raises ``RewardError`` for an image that cannot be opened.
        """
        messages = []
        for question in questions:
            content: list[dict[str, Any]] = [{"type": "text", "text": question.text}]
            if question.image is not None:
                content.insert(0, {"type": "image", "image": open_image(question.image)})
            messages.append([{"role": "user", "content": content}])
        return self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(self.device, dtype=self.network.dtype)


class VisionChooser:
    """A local vision-language model: one forward pass for a batch of prompts with their images."""

    def __init__(
        self, model: str, reward: str, device: str | None, precision: Precision, batch_size: int
    ) -> None:
        self._model, self.reward = VisionModel(model, reward, device, precision), reward
        self.batch_size = batch_size
        self.signature = self._model.signature
        self.requests = self.tokens = 0

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As ``Chooser.choose``. Raises ``RewardError`` for an image that cannot be opened."""
        answers = []
        for batch in chunks(questions, self.batch_size, f"{self.reward}: answers"):
            inputs = self._model.inputs(batch)
            logits = next_logits(self._model.network, inputs)
            tokenizer = self._model.processor.tokenizer
            answers += [
                _answer(*pair, tokenizer, self.reward) for pair in zip(batch, logits, strict=True)
            ]
            self.requests += len(batch)
            self.tokens += int(inputs["attention_mask"].sum())
        return answers


class EndpointClient:
    """Asks an OpenAI-compatible endpoint at temperature 0, several questions at a time; counts requests and tokens."""

    def __init__(self, endpoint: Endpoint) -> None:
        check_fields(endpoint)
        if not endpoint.url.startswith(("http://", "https://")):
            raise ValueError(
                f"endpoint.url is {endpoint.url!r}: expected an address such as http://127.0.0.1:8000/v1"
            )
        self.endpoint = endpoint
        self.requests = 0
        self.tokens: int | None = 0
        """As ``Calls``."""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"endpoint": self.endpoint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["endpoint"])  # type: ignore[misc]

    def map(
        self,
        answer: Callable[[Question, float], Answer],
        questions: Sequence[Question],
        end: float | None = None,
    ) -> list[Answer]:
        """``answer`` of every question, ``concurrency`` at a time.

        It takes the question and the ``end`` of the scoring, a ``time.monotonic()``; None is after ``time_limit``.
        Raises ``RewardError`` from then on.
        """
        answers: list[Answer] = []
        end = end_of_scoring(self.endpoint.time_limit) if end is None else end
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            for batch in chunks(
                questions, 4 * self.endpoint.concurrency, f"{self.endpoint.model}: answers"
            ):
                answers += pool.map(answer, batch, repeat(end))
        return answers

    def ask(self, question: Question, max_tokens: int, end: float, **options: Any) -> Any:
        """The JSON of the answer to one question. Raises ``RewardError`` where the endpoint fails until ``end``."""
        content: Any = question.text
        if question.image is not None:
            buffer = io.BytesIO()
            open_image(question.image).save(buffer, "PNG")
            url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
            content = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": question.text},
            ]
        endpoint = self.endpoint
        body = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }
        with self._lock:
            if endpoint.max_requests is not None and self.requests >= endpoint.max_requests:
                raise RewardError(
                    f"{question.where}: {self.requests} requests were made, as many as max_requests allows"
                )
            self.requests += 1
        address, token = (
            f"{endpoint.url.rstrip('/')}/chat/completions",
            token_of(endpoint.key_variable),
        )
        body |= {"max_tokens": max_tokens, **options}
        limit = (
            ""
            if end == math.inf
            else f", within {endpoint.time_limit:g} seconds (time_limit) of the first one"
        )
        with naming(f"{question.where}{limit}", (HttpError,), RewardError):
            answer = request_json(
                address, body, token, endpoint.timeout, endpoint.attempts, deadline=end
            )
        count = _tokens_of(answer)
        with self._lock:
            if count is None and self.tokens is not None:
                logger.warning(
                    "%s does not say how many tokens it reads: they are not counted", endpoint.url
                )
            self.tokens = None if self.tokens is None or count is None else self.tokens + count
        return answer

    def naming_answer(self, question: Question) -> AbstractContextManager[None]:
        """Context that turns what an answer lacks into a ``RewardError`` that names question and address."""
        where = f"{question.where}: the answer of {self.endpoint.url}"
        return naming(
            where,
            (LookupError, TypeError, ValueError, ArithmeticError, AttributeError),
            RewardError,
        )


def end_of_scoring(time_limit: float | None) -> float:
    """The ``time.monotonic()`` at which a scoring that begins now has to be over."""
    return math.inf if time_limit is None else time.monotonic() + time_limit


def _tokens_of(answer: Any) -> int | None:
    """The tokens that an answer says it took; None where it does not."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    for names in (("total_tokens",), ("prompt_tokens", "completion_tokens")):
        counts: list[Any] = [usage.get(name) for name in names] if isinstance(usage, dict) else []
        if counts and all(isinstance(count, int) and count >= 0 for count in counts):
            return sum(counts)
    return None


class EndpointChooser:
    """An OpenAI-compatible endpoint that is asked for one token."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = EndpointClient(endpoint)
        self.signature = f"{endpoint.model}@{endpoint.url}{'' if endpoint.logprobs else ',text'}"

    @property
    def requests(self) -> int:
        """As ``EndpointClient.requests``."""
        return self.client.requests

    @property
    def tokens(self) -> int | None:
        """As ``EndpointClient.tokens``."""
        return self.client.tokens

    def choose(self, questions: Sequence[Question], end: float | None = None) -> list[list[float]]:
        """As ``Chooser.choose``, until ``end`` (``EndpointClient.map``).

        Raises ``RewardError`` where the endpoint fails or does not answer with a label.
        """
        return self.client.map(self._answer, questions, end)

    def _answer(self, question: Question, end: float) -> list[float]:
        logprobs, problem, unlisted = self.client.endpoint.logprobs, "", 0.0
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if logprobs else {}
        for _ in range(self.client.endpoint.attempts):
            answer = self.client.ask(question, 1, end, **options)
            with self.client.naming_answer(question):
                choice = answer["choices"][0]
                if logprobs:
                    masses, unlisted = _masses(
                        question, choice["logprobs"]["content"][0]["top_logprobs"]
                    )
                else:
                    text = str(choice["message"]["content"]).strip().rstrip(".):")
                    masses = [float(text == label) for label in question.labels]
            total = math.fsum(masses)
            if total >= LEAST_MASS and unlisted <= MOST_UNLISTED * total:
                return [mass / total for mass in masses]
            problem = json.dumps(choice)[:300]
        expected = f"expected one of {list(question.labels)}"
        if unlisted:
            expected += f", or more of the most probable tokens: those that are not listed may have {unlisted:.2g}"
        raise RewardError(f"{question.where}: the answer is {problem}: {expected}")


def _masses(question: Question, listed: Any) -> tuple[list[float], float]:
    """Probabilities of the labels, 0 where one is not among the listed tokens; and the most that these may have.

    What is not listed is at most as probable as any listed token, and all of it together as what these leave.
    """
    # Some servers list the token that they chose once more.
    masses = {(one["token"], float(one["logprob"])): math.exp(one["logprob"]) for one in listed}
    total = math.fsum(masses.values())
    if not total < 1.01:
        raise ValueError(f"the probabilities of its tokens add up to {total:g}: expected at most 1")
    spoken = [(token.strip(), mass) for (token, _), mass in masses.items()]
    labels = [
        math.fsum(mass for token, mass in spoken if token == label) for label in question.labels
    ]
    return labels, max(0.0, min(labels.count(0.0) * min(masses.values()), 1 - total))


class AnswerCache:
    """Answers in ``answers.sqlite`` of a folder, by the signature of the model, text, labels and image."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with naming("cache_dir"):
            folder.mkdir(parents=True, exist_ok=True)
        with self._open() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, probabilities TEXT NOT NULL)"
            )

    @contextlib.contextmanager
    def _open(self) -> Any:
        """A connection that commits at the end; other processes may write meanwhile."""
        path = self.folder / "answers.sqlite"
        named = naming(f"cache_dir: {str(path)!r}", (sqlite3.Error,), RewardError)
        with named, contextlib.closing(sqlite3.connect(path, timeout=60)) as database, database:
            yield database

    def answers(
        self,
        signature: str,
        questions: Sequence[Question],
        ask: Callable[[Sequence[Question]], Sequence[Any]],
    ) -> list[Any]:
        """Answers of the model with this ``signature``; only questions without one are asked, once."""
        keys = [self._key(signature, question) for question in questions]
        with self._open() as database:
            asked = dict(zip(keys, questions, strict=True))
            kept = {
                key: answer
                for key, question in asked.items()
                for answer in self._read(database, key, question)
            }
        missing = {
            key: question for key, question in zip(keys, questions, strict=True) if key not in kept
        }
        for batch in chunks(list(missing.items()), SAVED_TOGETHER, "answers, saved"):
            new_answers = ask([question for _, question in batch])
            rows = [
                (key, json.dumps(answer))
                for (key, _), answer in zip(batch, new_answers, strict=True)
            ]
            with self._open() as database:
                database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
            kept |= {key: answer for (key, _), answer in zip(batch, new_answers, strict=True)}
        return [kept[key] for key in keys]

    def _read(self, database: sqlite3.Connection, key: bytes, question: Question) -> list[Any]:
        """The answer that is stored under a key, if there is one and it can be one."""
        answers = []
        for (text,) in database.execute("SELECT probabilities FROM answers WHERE key = ?", (key,)):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                answers += [
                    answer for answer in [json.loads(text)] if _can_answer(answer, question)
                ]
            if not answers:
                logger.warning(
                    "cache_dir: an answer in %s is damaged: it is asked for again", self.folder
                )
        return answers

    def _key(self, signature: str, question: Question) -> bytes:
        image = None if question.image is None else image_identity(question.image)
        content = json.dumps([signature, question.text, question.labels, image])
        return hashlib.blake2b(content.encode(), digest_size=16).digest()


def _can_answer(answer: Any, question: Question) -> bool:
    if not question.labels:
        return isinstance(answer, str)
    with contextlib.suppress(ValueError, TypeError, ArithmeticError):
        return (
            len(answer) == len(question.labels)
            and min(answer) >= 0
            and abs(math.fsum(answer) - 1) < 1e-3
        )
    return False


class CachedModel:
    """A chooser or a writer whose answers are kept in a folder."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self.signature, self._cache = model, model.signature, AnswerCache(folder)

    @property
    def requests(self) -> int:
        """Of the model; answers from the folder are none."""
        return getattr(self.model, "requests", 0)

    @property
    def tokens(self) -> int | None:
        """Of the model."""
        return getattr(self.model, "tokens", 0)

    def _ask(self, answer: Callable[..., Answer]) -> Callable[..., Answer]:
        """``answer`` of the model, within one scoring: it is called for some questions after the others."""
        client = getattr(self.model, "client", None)
        if not isinstance(client, EndpointClient):
            return answer
        return partial(answer, end=end_of_scoring(client.endpoint.time_limit))


class CachedChooser(CachedModel):
    """Another chooser whose answers are kept in a folder."""

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As ``Chooser.choose``; only questions without an answer are asked, each once."""
        return self._cache.answers(self.signature, questions, self._ask(self.model.choose))
