"""From the options of a reward to its language model, whose answers may be kept in files."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError, naming
from rewards.devices import Precision, chunks
from rewards.files import CheckedFiles
from rewards.images import image_identity
from rewards.language.endpoint import EndpointModel
from rewards.language.local import LocalModel
from rewards.language.models import LanguageModel, Question

SAVED_TOGETHER = 256
"""Answers that are written at a time; what is answered before an error is kept."""


def build_model(
    reward: str,
    model: str | LanguageModel | None = None,
    endpoint: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    device: str | None = None,
    precision: Precision = "fp32",
    chat_template_kwargs: dict[str, Any] | None = None,
    vision: bool = False,
) -> LanguageModel:
    """Make the language model of a reward, whose options these are.

    Args:
        reward: its name, for messages.
        model: a local model of Transformers (a folder with safetensors weights, or a name on the
            hub), or a ``LanguageModel`` of a user's own.
        endpoint: ``{url, model, concurrency, timeout}`` of ``EndpointModel``, in place of ``model``.
        cache_dir: folder where answers are kept.
        device, precision: of the local model, as for ``Icc``.
        chat_template_kwargs: variables of the chat template, local or behind the endpoint. By
            default thinking is turned off; ``{}`` sends none to the endpoint.
        vision: whether the questions have images.

    Raises:
        ValueError: not exactly one of ``model`` and ``endpoint`` is set, an argument is wrong, or
            the model cannot be loaded.
    """
    if (model is None) == (endpoint is None):
        raise ValueError(
            f"{reward}: set either model or endpoint: {{url: ..., model: ...}}"
        )
    built: Any = model
    if endpoint is not None:
        with naming(f"{reward}: endpoint", (TypeError, ValueError)):
            built = EndpointModel(reward, chat_template_kwargs, **endpoint)
    elif isinstance(model, str | Path):
        built = LocalModel(
            str(model), reward, vision, device, precision, chat_template_kwargs
        )
    return built if cache_dir is None else CachedModel(built, Path(cache_dir))


class CachedModel:
    """Another model whose answers are kept in a folder (``CheckedFiles``).

    The key of an answer has the model's signature, the prompt, labels, and content of the image.
    """

    def __init__(self, model: LanguageModel, folder: Path) -> None:
        self.model = model
        self.signature = model.signature
        with naming("cache_dir"):
            self.files = CheckedFiles(folder, "answer", ".json")

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As the model; only questions without an answer are asked, each once."""
        return self._answers(questions, self.model.choose)

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """As the model; only questions without an answer are asked, each once."""
        return self._answers(questions, self.model.write, max_new_tokens)

    def _answers(
        self,
        questions: Sequence[Question],
        ask: Callable[..., list[Any]],
        *options: int,
    ) -> list[Any]:
        keys = [self._key(question, *options) for question in questions]
        kept = {}
        missing = {}
        for key, question in zip(keys, questions, strict=True):
            content = self.files.read(key)
            if content is None:
                missing[key] = question
            else:
                kept[key] = json.loads(content)
        for batch in chunks(list(missing), SAVED_TOGETHER, "answers, saved"):
            answers = ask([missing[key] for key in batch], *options)
            for key, answer in zip(batch, answers, strict=True):
                self.files.write(key, json.dumps(answer).encode())
                kept[key] = answer
        return [kept[key] for key in keys]

    def _key(self, question: Question, *options: int) -> str:
        with naming(question.where, (RewardError,), RewardError):
            image = None if question.image is None else image_identity(question.image)
        parts = [self.signature, question.text, question.labels, image, *options]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
