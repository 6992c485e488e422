"""Requests to the reward server: their bodies, checked; images by name, address or content."""

import asyncio
import base64
import binascii
import hashlib
import http.client
import io
import json
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from rewards.base import RewardError, naming
from rewards.images import UNREADABLE, open_image
from rewards.registry import COLUMNS
from rl_caption.integrations.client import columns_of
from rl_caption.integrations.config import ServeConfig
from rl_caption.integrations.openrlhf import caption_of, cut_end_tokens

Columns: TypeAlias = dict[str, list[Any]]
"""Name of a column -> N rows."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
URL_SECONDS = 10.0
"""Seconds after which an image's address that does not answer is refused."""
BODY_SECONDS = 60.0
"""Seconds after which a body that has not arrived is refused: a server that ends waits for those it has begun."""


@dataclass(frozen=True)
class EncodedImage:
    """An image that came with a request, decoded when a reward reads it: small files may be gigabytes of pixels."""

    content: bytes

    def render(self) -> Image.Image:
        """Decode it. Raises ``RewardError``."""
        with naming("an image of the request cannot be read", UNREADABLE, RewardError):
            image = Image.open(io.BytesIO(self.content), formats=FORMATS)
            image.load()
        return open_image(image)

    def identity(self) -> str:
        """The key of a file with this content (``rewards.images.image_identity``)."""
        return f"oriented content:{hashlib.blake2b(self.content, digest_size=16).hexdigest()}"


class RefusedRequest(ValueError):
    """A request that gets no scores: HTTP status, message, and the row and field that it is about."""

    def __init__(
        self, status: int, message: str, row: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.row, self.field = status, row, field


async def read_json(request: Any, max_mb: float) -> Any:
    """The JSON body of a request.

    Raises ``RefusedRequest`` for one that is larger than ``max_mb`` MiB, slower than ``BODY_SECONDS``, or no JSON.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_mb * 2**20:
                    raise RefusedRequest(413, f"the body is larger than {max_mb:g} MiB (max_mb)")
    except TimeoutError as error:
        raise RefusedRequest(
            408, f"the body did not arrive within {BODY_SECONDS:g} seconds"
        ) from error
    try:
        return await asyncio.to_thread(json.loads, body)
    except ValueError as error:
        raise RefusedRequest(400, f"the body is not JSON: {error}") from error


def read_scoring(body: Any) -> tuple[list[str], Columns]:
    """Captions and columns of ``{"captions": [str, ...], "columns": {name: [...]}}``. Raises ``RefusedRequest``."""
    values = check_fields(body, {"captions"}, {"columns"})
    columns = values.get("columns") or {}
    if not isinstance(columns, dict):
        raise RefusedRequest(
            422, f"columns is {columns!r:.80}: expected an object of lists", field="columns"
        )
    return check_texts(values, "captions"), columns


def read_openrlhf(body: Any) -> tuple[list[str], Columns]:
    """Captions and columns of OpenRLHF's ``{"query", "prompts", "labels"}`` (docs/serve.md).

    A label is a JSON object of columns, such as ``{"image": "coco/1.jpg", "references": ["..."]}``; every row has the
    same ones. Raises ``RefusedRequest``.
    """
    values = check_fields(body, {"query", "prompts", "labels"})
    queries, prompts, labels = (
        check_texts(values, name) for name in ("query", "prompts", "labels")
    )
    for name, texts in (("prompts", prompts), ("labels", labels)):
        if len(texts) != len(queries):
            raise RefusedRequest(
                422, f"{name} has {len(texts)} rows for {len(queries)} queries", field=name
            )
    try:
        columns = columns_of(labels, "label")
    except ValueError as error:
        raise RefusedRequest(422, str(error), field="labels") from error
    captions = _captions(
        [partial(caption_of, *pair) for pair in zip(queries, prompts, strict=True)], "query"
    )
    return [caption for caption, _ in captions], columns | {
        "finished": [ended for _, ended in captions]
    }


def read_llamafactory(body: Any, after: str | None) -> tuple[list[str], Columns]:
    """Captions of LlamaFactory's ``{"model", "messages": [text, ...]}``, whose texts are prompt, caption and EOS.

    ``after`` is what ends the prompt, such as ``<|im_start|>assistant\n``. Raises ``RefusedRequest`` without it, for
    texts without it, and for unknown tokens after the caption.
    """
    messages = check_texts(check_fields(body, {"messages"}, {"model"}), "messages")
    if not after:
        problem = "the address has no after=TEXT, the end of the prompt: every message begins with its prompt"
        raise RefusedRequest(422, problem, field="after")

    def caption(message: str) -> tuple[str, bool]:
        if after not in message:
            raise ValueError(f"the message {message!r:.80} does not contain {after!r:.80} (after)")
        return cut_end_tokens(message.rpartition(after)[2])

    captions = _captions([partial(caption, message) for message in messages], "messages")
    return [caption for caption, _ in captions], {"finished": [ended for _, ended in captions]}


def _captions(read: Sequence[Callable[[], tuple[str, bool]]], field: str) -> list[tuple[str, bool]]:
    """Captions of N rows, and whether they ended. Raises ``RefusedRequest`` with the row where that cannot be told."""
    captions = []
    for row, caption in enumerate(read):
        try:
            captions.append(caption())
        except ValueError as error:
            raise RefusedRequest(422, f"row {row}: {error}", row, field) from error
    return captions


def check_fields(body: Any, required: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    """``body``, an object with the fields ``required`` and perhaps ``optional`` ones. Raises ``RefusedRequest``."""
    expected = f"expected an object with {', '.join(sorted(required | optional))}"
    if not isinstance(body, dict):
        raise RefusedRequest(422, f"the body is {body!r:.80}: {expected}")
    for field in [*(body.keys() - required - optional), *(required - body.keys())]:
        problem = "unknown" if field in body else "missing"
        raise RefusedRequest(422, f"the field {field!r:.80} is {problem}: {expected}", field=field)
    return body


def check_texts(values: dict[str, Any], field: str) -> list[str]:
    """``values[field]``, a list of strings, not empty. Raises ``RefusedRequest``."""
    texts = values[field]
    if not isinstance(texts, list) or not texts:
        raise RefusedRequest(
            422, f"{field} is {texts!r:.80}: expected a list of at least one text", field=field
        )
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise RefusedRequest(
                422, f"{field} has {text!r:.80} in row {row}: expected text", row, field
            )
    return texts


def read_rows(
    config: ServeConfig, required: Set[str], captions: list[str], columns: Columns
) -> Columns:
    """The columns, checked, with images that a reward reads.

    Raises:
        RefusedRequest: a column is unknown, missing or of another length, or an image cannot be read.
    """
    expected = {*COLUMNS, *required, "prompts"}
    for name, rows in columns.items():
        if name not in expected:
            raise RefusedRequest(
                422, f"the column {name!r:.80} is unknown: expected {sorted(expected)}", field=name
            )
        if not isinstance(rows, list) or len(rows) != len(captions):
            count = len(rows) if isinstance(rows, list) else f"{rows!r:.80}, no list,"
            raise RefusedRequest(
                422, f"column {name} has {count} rows for {len(captions)} captions", field=name
            )
    for name in sorted(required - columns.keys()):
        raise RefusedRequest(
            422, f"the reward needs the column {name!r}, which the request lacks", field=name
        )
    if "image" in columns:
        images = {
            json.dumps(source): source for source in columns["image"]
        }  # one object for the samples of an image
        decoded: dict[str, Any] = {}
        for row, source in enumerate(columns["image"]):
            key = json.dumps(source)
            if key not in decoded:
                decoded[key] = read_image(config, images[key], row)
        columns = columns | {"image": [decoded[json.dumps(source)] for source in columns["image"]]}
    return columns


def read_image(config: ServeConfig, source: Any, row: int) -> Path | EncodedImage:
    """An image of row ``row``: ``NAME/path`` below a folder of ``images``, an address, or ``{"base64": content}``.

    Raises:
        RefusedRequest: it lies outside, does not exist, is no image or larger than ``max_megapixels``.
    """
    try:
        if isinstance(source, dict) and source.keys() == {"base64"}:
            return encoded_image(
                base64.b64decode(source["base64"], validate=True), config.max_megapixels
            )
        if isinstance(source, str) and source.startswith(("http://", "https://")):
            return encoded_image(fetch(config, source), config.max_megapixels)
        if isinstance(source, str):
            return find_image(config, source)
    except (*UNREADABLE, binascii.Error, http.client.HTTPException) as error:
        text = repr(source)[:80]
        raise RefusedRequest(
            422, f"row {row}: image {text}: {error or type(error).__name__}", row, "image"
        ) from error
    raise RefusedRequest(
        422, f"row {row}: image is {source!r:.80}: expected NAME/path or base64", row, "image"
    )


def find_image(config: ServeConfig, name: str) -> Path:
    """The file behind ``NAME/path``. Raises ``ValueError`` where it is not below the folder, links followed."""
    folder, _, path = name.partition("/")
    if folder not in config.images:
        raise ValueError(
            f"there is no folder {folder!r:.80}: the server has {sorted(config.images)}"
        )
    root = Path(config.images[folder]).resolve()
    file = Path(os.path.realpath(root / path))  # resolve() raises where links go in a circle
    if not file.is_relative_to(root) or not file.is_file():
        raise ValueError(f"there is no such file below the folder {folder!r}")
    with Image.open(file, formats=FORMATS) as image:
        check_pixels(image, config.max_megapixels)
    return file


def fetch(config: ServeConfig, url: str) -> bytes:
    """The content of an address, at most ``max_mb`` MiB. Raises ``ValueError`` where that is not asked for."""
    if not config.allow_urls:
        raise ValueError("addresses are not fetched: set allow_urls, or send the image's bytes")
    limit = int(config.max_mb * 2**20)
    with urllib.request.urlopen(url, timeout=URL_SECONDS) as response:
        if urllib.parse.urlsplit(response.url).scheme not in ("http", "https"):
            raise ValueError(f"it leads to {response.url!r:.80}")
        content: bytes = response.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {config.max_mb:g} MiB (max_mb)")
    return content


def encoded_image(content: bytes, max_megapixels: float) -> EncodedImage:
    """An image file's content, of which the size is checked. Raises ``ValueError`` or what Pillow raises."""
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        check_pixels(image, max_megapixels)
    return EncodedImage(content)


def check_pixels(image: Image.Image, max_megapixels: float) -> None:
    """Raise ``ValueError`` for an image of more than ``max_megapixels`` million pixels."""
    if image.width * image.height > max_megapixels * 1e6:
        allowed = f"at most {max_megapixels:g} million (max_megapixels)"
        raise ValueError(f"it has {image.width} x {image.height} pixels: expected {allowed}")
