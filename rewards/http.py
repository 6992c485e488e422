"""JSON over HTTP with retries, by the standard library alone."""

import http.client
import json
import math
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

BUSY = frozenset({429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed later."""
UNANSWERED = (OSError, http.client.HTTPException, ValueError, RecursionError)
"""What is raised without a connection, and where an answer is cut off or its brackets are nested too deeply."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address would get the token, and a POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


class HttpError(RuntimeError):
    """A request was refused, or not answered within all attempts."""


def request_json(
    url: str,
    body: Any = None,
    token: str | None = None,
    timeout: float = 60.0,
    attempts: int = 6,
    backoff: float = 0.5,
    encode: Callable[[Any], Any] | None = None,
    deadline: float = math.inf,
) -> Any:
    """Send a request (GET without a body) until it is answered; the JSON of the answer.

    Args:
        url: http or https.
        body: sent as JSON.
        token: sent as ``Authorization: Bearer``.
        timeout: seconds of one attempt: of connecting, of each wait for a piece of the answer, and of all pieces.
        attempts: number of attempts where the server is busy or cannot be reached.
        backoff: seconds before the second attempt; doubled for each further one, up to 60, plus up to as much at
            random, so that many clients do not come back all at once. ``Retry-After`` is obeyed where it is longer.
        encode: JSON of what ``json`` does not know, as its ``default``.
        deadline: ``time.monotonic()`` from which on no attempt begins or goes on.

    Raises:
        HttpError: another status than 200 (redirects are not followed), or no answer within all attempts; the message
            begins with the address.
    """
    data = None if body is None else json.dumps(body, default=encode).encode()
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {token}"} if token else {}
    )
    request = urllib.request.Request(url, data, headers)
    # A proxy of the environment is for other machines; it does not know this one's loopback address.
    local = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    opener = urllib.request.build_opener(
        _NoRedirect, *([urllib.request.ProxyHandler({})] if local else [])
    )
    problem, asked, attempt = "there was no time for one", 0.0, 0
    while attempt < attempts:
        pause = min(backoff * 2 ** (attempt - 1), 60.0) if attempt else 0.0
        pause = max(asked, pause + random.random() * pause)
        if time.monotonic() + pause >= deadline:
            break
        time.sleep(pause)
        attempt += 1
        end = min(time.monotonic() + timeout, deadline)
        try:
            with opener.open(request, timeout=max(end - time.monotonic(), 1e-3)) as response:
                return json.loads(_body(response, end))
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}: {_message(error)}"
            if error.code not in BUSY:
                raise HttpError(f"{url}: {problem}") from error
            asked = _seconds(error.headers)
        except UNANSWERED as error:
            problem = str(error) or type(error).__name__
    raise HttpError(f"{url} did not answer after {attempt} attempts; the last: {problem}")


def _body(response: Any, end: float) -> bytes:
    """The body of an answer. ``TimeoutError`` where it is not complete at ``end``, as pieces may come for ever."""
    pieces = []
    while piece := response.read1(2**16):
        pieces.append(piece)
        if time.monotonic() > end:
            raise TimeoutError("the answer was not complete in time")
    return b"".join(pieces)


def _seconds(headers: Any) -> float:
    """``Retry-After`` in seconds, at most 60; 0 without it, or as a date."""
    value = headers.get("Retry-After", "")
    return min(float(value), 60.0) if value.isascii() and value.isdigit() else 0.0


def _message(error: urllib.error.HTTPError) -> str:
    """The message in the body of an answer that is an error."""
    try:
        text = error.read().decode("utf-8", "replace")
    except OSError as cut:
        return str(cut)
    try:
        message = json.loads(text)["error"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (ValueError, KeyError, TypeError, RecursionError):
        return text[:200] or str(error.reason)


def token_of(variable: str) -> str | None:
    """The value of an environment variable, None where it is unset or empty."""
    return os.environ.get(variable) or None
