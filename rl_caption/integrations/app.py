"""The application of ``rl-caption serve``: ``POST /score`` and ``GET /health``."""

import asyncio
import base64
import contextlib
import math
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rewards.base import RewardError
from rewards.mixed import MixedReward
from rewards.registry import COLUMNS
from rl_caption.data.base import LazyImage
from rl_caption.integrations.batching import BatchingScorer, QueueFull
from rl_caption.integrations.config import LOOPBACK, TOKEN_VARIABLE, ServeConfig

BODY_SECONDS = 60.0
"""Seconds after which a body that has not arrived is refused."""


class Scoring(BaseModel, extra="forbid"):
    """The body of ``POST /score``."""

    captions: list[str] = Field(min_length=1)
    columns: dict[str, list[Any]] = {}


def make_app(config: ServeConfig, reward: MixedReward) -> FastAPI:
    """Build the application that scores captions by ``reward``."""
    scorer = BatchingScorer(reward, config.max_batch, config.max_pending)
    # Pillow refuses images of more than twice this number.
    Image.MAX_IMAGE_PIXELS = int(config.max_megapixels * 1e6 / 2)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if config.host in LOOPBACK:
        # Else a page of another site could send requests, by a host name of its own.
        hosts = ["127.0.0.1", "localhost", "[::1]"]
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        """Refuse requests by their headers, and bodies that take too long to arrive."""
        refused = refusal_by_headers(request.headers, request.method, config.max_mb)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                # A client reads a refusal, too, only after it has sent everything.
                if refused is None:
                    await request.body()
                async for _ in request.stream():
                    pass
        except TimeoutError:
            return refusal(
                408, f"the body did not arrive within {BODY_SECONDS:g} seconds"
            )
        return refused or await call_next(request)

    @app.post("/score")
    async def score(scoring: Scoring) -> dict[str, Any]:
        """Scores of captions: the total, and each term."""
        try:
            columns = checked_columns(scoring, reward, config.images)
            scores = await scorer.score(scoring.captions, columns)
        except QueueFull as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from error
        except RewardError as error:
            raise HTTPException(422, str(error)) from error
        return {"scores": scores.total, "terms": scores.terms}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """The reward's terms, signature, bounds and columns, and the captions that wait."""
        return {
            "terms": reward.weights,
            "signature": reward.signature,
            "bounds": [end if math.isfinite(end) else None for end in reward.bounds],
            "columns": sorted(reward.columns),
            "pending": scorer.pending,
        }

    return app


def refusal_by_headers(headers: Headers, method: str, max_mb: float) -> Response | None:
    """Answer to a request with a wrong token or a too large body; None for others."""
    token = os.environ.get(TOKEN_VARIABLE)
    header = headers.get("authorization", "").encode()
    if token and not secrets.compare_digest(header, f"Bearer {token}".encode()):
        return refusal(401, "expected the header Authorization: Bearer TOKEN")
    size = headers.get("content-length", "0" if method == "GET" else "")
    if not size.isdecimal():
        return refusal(411, "expected the header Content-Length")
    if int(size) > max_mb * 2**20:
        return refusal(
            413, f"the body has {size} bytes: expected at most {max_mb:g} MiB"
        )
    return None


def refusal(status: int, message: str) -> JSONResponse:
    """An error response with a message."""
    return JSONResponse({"detail": message}, status)


def checked_columns(
    scoring: Scoring, reward: MixedReward, folders: Mapping[str, str]
) -> dict[str, list[Any]]:
    """Check the columns of a request and find their images. Raises ``RewardError``."""
    columns, count = dict(scoring.columns), len(scoring.captions)
    expected = {*COLUMNS, *reward.columns, "prompts"}
    for name, rows in columns.items():
        if name not in expected or len(rows) != count:
            raise RewardError(
                f"column {name!r} has {len(rows)} rows: expected {count}, and as a name one of "
                f"{sorted(expected)}"
            )
    if "image" in columns:
        images = enumerate(columns["image"])
        columns["image"] = [find_image(source, row, folders) for row, source in images]
    return columns


def find_image(source: Any, row: int, folders: Mapping[str, str]) -> str | LazyImage:
    """The image of a row: ``NAME/path`` below a folder (links followed), or
    ``{"base64": content}``. Raises ``RewardError``.
    """
    if isinstance(source, dict) and isinstance(source.get("base64"), str):
        with contextlib.suppress(ValueError):
            return LazyImage(f"row {row}", base64.b64decode(source["base64"]))
    elif isinstance(source, str):
        name, _, path = source.partition("/")
        if name in folders:
            root = Path(folders[name]).resolve()
            file = (root / path).resolve()
            if file.is_relative_to(root) and file.is_file():
                return str(file)
    raise RewardError(
        f"row {row}: image is {source!r:.80}: expected the path of a file as NAME/path, where NAME "
        f"is one of {sorted(folders)}, or an object with the key base64, the content of a file"
    )
