"""The client of ``rl-caption serve``: scores of captions, or an error; a failure never
becomes a score.
"""

import base64
import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY = frozenset({429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed later."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses without the proxies of the environment."""


class ServerError(RuntimeError):
    """The server refused a request, its reward failed, or it did not answer within all attempts."""


@dataclass(frozen=True)
class Scores:
    """Scores of N captions: ``total`` [N], and log key of each term -> raw scores [N]."""

    total: list[float]
    terms: dict[str, list[float]]


class RewardClient:
    """Scores captions by a server; picklable, usable from threads.

    Args:
        url: server, such as ``http://127.0.0.1:8400``; None takes ``RL_CAPTION_URL``.
        token: token of the server; None takes ``RL_CAPTION_TOKEN``, or sends none.
        timeout: seconds that one attempt waits.
        attempts: number of attempts where the server is busy, restarts or cannot be reached.
        backoff: seconds before the second attempt; doubled for each further one, up to 60.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout: float = 120.0,
        attempts: int = 6,
        backoff: float = 0.5,
    ) -> None:
        self.url = (url or os.environ["RL_CAPTION_URL"]).rstrip("/")
        self.token = token or os.environ.get("RL_CAPTION_TOKEN")
        self.timeout, self.attempts, self.backoff = timeout, attempts, backoff

    def score(self, captions: Sequence[str], **columns: Sequence[Any]) -> Scores:
        """Score N captions.

        Args:
            captions: N captions.
            columns: columns of N rows that the reward needs: ``references`` (lists of
                strings), ``image`` (names below a folder of the server, bytes of image
                files, or a ``Path`` of a file here, which is sent), ``image_id``,
                ``finished``, ``prompts``.

        Raises:
            ServerError: the request is wrong, the reward failed, or the server did not answer.
        """
        rows = {name: list(values) for name, values in columns.items()}
        answer = self._ask("/score", {"captions": list(captions), "columns": rows})
        return Scores(answer["scores"], answer["terms"])

    def health(self) -> dict[str, Any]:
        """Reward of the server: ``terms``, ``signature``, ``bounds``, ``columns`` and
        the number ``pending``. Raises ``ServerError``.
        """
        return self._ask("/health", None)

    def _ask(self, path: str, body: Any) -> dict[str, Any]:
        data = None if body is None else json.dumps(body, default=_encode).encode()
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url + path, data, headers)
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                pause = min(self.backoff * 2 ** (attempt - 1), 60.0)
                time.sleep(pause * (1 + random.random()))  # not all workers at once
            try:
                with OPENER.open(request, timeout=self.timeout) as response:
                    answer: dict[str, Any] = json.load(response)
                return answer
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {error.read().decode(errors='replace')[:1000]}"
                if error.code not in BUSY:
                    raise ServerError(f"{request.full_url}: {problem}") from error
            except (OSError, http.client.HTTPException) as error:
                problem = str(error)
        raise ServerError(
            f"{request.full_url} gave no scores in {self.attempts} attempts; the last: {problem}"
        )


def columns_of(labels: Sequence[str]) -> dict[str, list[Any]]:
    """Columns of N labels, JSON objects such as
    ``{"image": "coco/1.jpg", "references": ["..."]}``.
    """
    rows = [json.loads(label) for label in labels]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _encode(value: Any) -> Any:
    """JSON for files, their bytes, and numbers of NumPy."""
    if isinstance(value, Path):
        value = value.read_bytes()
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    return value.tolist()
