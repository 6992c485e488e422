"""Answers of a language model in files that several processes may share."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError, naming
from rewards.devices import chunks
from rewards.files import CheckedFiles
from rewards.images import image_identity
from rewards.language.models import Calls, LanguageModel, Question, calls_of

SAVED_TOGETHER = 256
"""Answers that are written at a time; what is answered before an error is kept."""


class CachedModel:
    """Another model whose answers are kept in a folder (``CheckedFiles``).

    The key of an answer has the model's signature, the prompt, labels, and content of the image.
    """

    def __init__(self, model: LanguageModel, folder: Path) -> None:
        self.model, self.signature = model, model.signature
        with naming("cache_dir"):
            self._files = CheckedFiles(folder, "answer", ".json")

    @property
    def calls(self) -> Calls:
        """Calls of the model; answers from files are none."""
        return calls_of(self.model)

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As the model; only questions without an answer are asked, each once."""
        return self._answers(questions, self.model.choose)

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """As the model; only questions without an answer are asked, each once."""

        def ask(some: Sequence[Question]) -> list[str]:
            return self.model.write(some, max_new_tokens)

        return self._answers(questions, ask, max_new_tokens)

    def _answers(
        self, questions: Sequence[Question], ask: Callable[[Any], list[Any]], *options: Any
    ) -> list[Any]:
        keys = [self._key(question, *options) for question in questions]
        asked = dict(zip(keys, questions, strict=True))
        kept = {}
        for key in asked:
            content = self._files.read(key)
            if content is not None:
                kept[key] = json.loads(content)
        missing = [key for key in asked if key not in kept]
        for batch in chunks(missing, SAVED_TOGETHER, "answers, saved"):
            answers = ask([asked[key] for key in batch])
            for key, answer in zip(batch, answers, strict=True):
                self._files.write(key, json.dumps(answer).encode())
                kept[key] = answer
        return [kept[key] for key in keys]

    def _key(self, question: Question, *options: Any) -> str:
        with naming(question.where, (RewardError,), RewardError):
            image = None if question.image is None else image_identity(question.image)
        parts = [self.signature, question.text, question.labels, image, *options]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
