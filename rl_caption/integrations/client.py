"""The client of ``rl-caption serve``: scores of captions, or an error; never a number in place of a failure."""

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.http import HttpError, request_json


class ServerError(RuntimeError):
    """The server refused a request, its reward failed, or it did not answer within all attempts."""


@dataclass(frozen=True)
class Scores:
    """Scores of N captions.

    Attributes:
        total: the reward, N numbers.
        terms: log key -> N raw scores of that term of the mixture.
    """

    total: list[float]
    terms: dict[str, list[float]]


class RewardClient:
    """Scores captions by a server; picklable, usable from threads.

    Args:
        url: of the server, such as ``http://127.0.0.1:8400``; None takes the environment variable ``RL_CAPTION_URL``.
        token: of the server; None takes the environment variable ``RL_CAPTION_TOKEN``, without one none is sent.
        timeout: seconds that one attempt may take.
        attempts: number of attempts where the server is busy, restarts or cannot be reached.
        backoff: seconds before the second attempt; doubled for each further one, up to 60, plus up to as much at
            random, so that workers do not come back all at once.

    Raises:
        ValueError: there is no address.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout: float = 120.0,
        attempts: int = 6,
        backoff: float = 0.5,
    ) -> None:
        url = url or os.environ.get("RL_CAPTION_URL", "")
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"url is {url!r}: expected the server's address, such as http://127.0.0.1:8400"
            )
        self.url, self.token = url.rstrip("/"), token or os.environ.get("RL_CAPTION_TOKEN")
        self.timeout, self.attempts, self.backoff = timeout, attempts, backoff

    def score(self, captions: Sequence[str], **columns: Sequence[Any]) -> Scores:
        """Score N captions.

        Args:
            captions: N captions.
            columns: columns of N rows that the reward needs: ``references`` (lists of strings), ``image`` (names below
                a folder of the server, addresses where it fetches them, or bytes of an image file), ``image_id``,
                ``finished``, ``prompts``.

        Raises:
            ServerError: the request is wrong, the reward failed (the message names row and term), or the server did
                not answer within all attempts.
        """
        body = {
            "captions": list(captions),
            "columns": {name: list(rows) for name, rows in columns.items()},
        }
        answer = self.post("/score", body)
        return Scores(answer["scores"], answer["terms"])

    async def score_async(self, captions: Sequence[str], **columns: Sequence[Any]) -> Scores:
        """``score`` in a thread, so that an event loop goes on meanwhile."""
        return await asyncio.to_thread(self.score, captions, **columns)

    def health(self) -> dict[str, Any]:
        """What the server scores by: ``{"terms", "signature", "bounds", "columns", ...}``. Raises as ``score``."""
        return self.post("/health", None)

    def post(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send a request (GET without a body) until it is answered; the answer's JSON object. Raises as ``score``."""
        address, token = self.url + path, self.token
        try:
            answer = request_json(
                address, body, token, self.timeout, self.attempts, self.backoff, encode_value
            )
        except HttpError as error:
            raise ServerError(str(error)) from error
        if not isinstance(answer, dict):
            raise ServerError(
                f"{address} answered {answer!r:.80}: expected the object of a reward server"
            )
        return answer


def columns_of(labels: Sequence[str], name: str) -> dict[str, list[Any]]:
    """Columns of N rows from N labels, each a JSON object such as ``{"image": "coco/1.jpg", "references": ["..."]}``.

    Raises:
        ValueError: a label is no such object, or has other keys than the first; the message names the row of ``name``.
    """
    rows: list[dict[str, Any]] = []
    for row, label in enumerate(labels):
        try:
            values = json.loads(label)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} of row {row} is {label!r:.80}: expected JSON") from error
        expected = rows[0].keys() if rows else None
        if not isinstance(values, dict) or (expected is not None and values.keys() != expected):
            expected_text = (
                "an object of columns"
                if expected is None
                else f"an object of {sorted(expected)}, as row 0"
            )
            raise ValueError(f"{name} of row {row} is {label!r:.80}: expected {expected_text}")
        rows.append(values)
    return {key: [values[key] for values in rows] for key in rows[0]} if rows else {}


def encode_value(value: Any) -> Any:
    """JSON for bytes of an image file, paths, and numbers of NumPy."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"{value!r:.80} cannot be sent: expected text, numbers, lists, or bytes of an image file"
    )
