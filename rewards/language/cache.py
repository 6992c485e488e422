"""Answers of a language model in a file that several processes may share."""

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError, naming
from rewards.devices import chunks
from rewards.images import image_identity
from rewards.language.models import Calls, LanguageModel, Question, calls_of

SAVED_TOGETHER = 256
"""Answers that are written at a time; what is answered before an error is kept."""


class CachedModel:
    """Another model whose answers are kept in ``answers.sqlite`` of a folder.

    The key of an answer has the model's signature, the prompt, labels, and content of the image.
    """

    def __init__(self, model: LanguageModel, folder: Path) -> None:
        self.model, self.signature = model, model.signature
        self.path = folder / "answers.sqlite"
        with naming("cache_dir"):
            folder.mkdir(parents=True, exist_ok=True)
        with self._open() as database:
            database.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, json TEXT)")

    @property
    def calls(self) -> Calls:
        """Calls of the model; answers from the file are none."""
        return calls_of(self.model)

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As the model; only questions without an answer are asked, each once."""
        return self._answers(questions, self.model.choose)

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """As the model; only questions without an answer are asked, each once."""
        return self._answers(
            questions, lambda some: self.model.write(some, max_new_tokens), max_new_tokens
        )

    def _answers(
        self, questions: Sequence[Question], ask: Callable[[Any], list[Any]], *options: Any
    ) -> list[Any]:
        keys = [self._key(question, *options) for question in questions]
        query, kept = "SELECT json FROM answers WHERE key = ?", {}
        with self._open() as database:
            for key in keys:
                for (text,) in database.execute(query, (key,)):
                    kept[key] = json.loads(text)
        asked = dict(zip(keys, questions, strict=True))
        missing = [(key, question) for key, question in asked.items() if key not in kept]
        for batch in chunks(missing, SAVED_TOGETHER, "answers, saved"):
            answers = ask([question for _, question in batch])
            new = {key: answer for (key, _), answer in zip(batch, answers, strict=True)}
            rows = [(key, json.dumps(answer)) for key, answer in new.items()]
            with self._open() as database:
                database.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
            kept |= new
        return [kept[key] for key in keys]

    def _key(self, question: Question, *options: Any) -> bytes:
        with naming(question.where, (RewardError,), RewardError):
            image = None if question.image is None else image_identity(question.image)
        parts = [self.signature, question.text, question.labels, image, *options]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection that commits at the end; other processes may write meanwhile."""
        named = naming(f"cache_dir: {str(self.path)!r}", (sqlite3.Error,), RewardError)
        with named, contextlib.closing(sqlite3.connect(self.path, timeout=60)) as file, file:
            yield file
