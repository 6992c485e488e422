"""A web page that captions photos with several captioners side by side and shows the scores of judges.

The server is that of the standard library, for one person on one machine. Each request has one photo. Captioners and
judges are not thread-safe, so one lock lets one request at a time use them. Meanwhile one more request is read; others
wait unread, so that many large photos do not fill the memory.
"""

import base64
import io
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from urllib.parse import urlsplit

from accelerate import Accelerator
from PIL import Image, UnidentifiedImageError

from rewards.base import Reward, score_captions
from rewards.images import UNREADABLE
from rewards.registry import short_name
from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import DataError, Row, load_image, reward_inputs
from rl_caption.data.plain_files import check_type, json_object
from rl_caption.evaluation.results import unique_names
from rl_caption.lab.config import WebConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.captions import load_captioners
from rl_caption.programs.report.charts import templates
from rl_caption.runtime.errors import EXPECTED, ConfigError
from rl_caption.training.validation import decode_candidates

logger = logging.getLogger(__name__)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats of photos that are read; for some others Pillow would start a program such as Ghostscript."""
MOST_TEXT = 2**16
"""Most bytes of a request besides its photo."""
MOST_DIGITS = 12
"""Most digits of a ``Content-Length``."""
BODIES = 2
"""Requests whose bodies are in memory at a time: one is answered, one is read meanwhile."""
SECONDS = 60
"""A request ends after so many seconds without a byte from the browser, and where its body takes longer in all."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class Photo(TypedDict):
    """The JSON that the page sends: a file in base64, which captioners and judges to ask, and references, if any."""

    name: str
    image: str
    models: list[str]
    judges: list[str]
    references: list[str]


class RefusedRequest(ValueError):
    """A request that is refused; the message is for the person at the page."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class SideBySide(NamedTuple):
    """The loaded captioners and judges, by their headings on the page."""

    captioners: Mapping[str, Captioner]
    judges: Mapping[str, Reward]
    decoding: Decoding
    accelerator: Accelerator
    seed: int

    def captions(
        self,
        image_id: str,
        image: Image.Image,
        models: Sequence[str],
        judges: Sequence[str],
        references: Sequence[str],
    ) -> list[dict[str, Any]]:
        """Caption one image by each of ``models``: ``{"model", "caption", "scores": {judge: score}}`` for each.

        A judge that compares with references is left out where there are none.

        Raises:
            RewardError: a judge failed; the message names it.
        """
        row: Row = {"image_id": image_id, "image": image, "references": list(references)}
        candidates = []
        for name in models:
            captioner = self.captioners[name]
            decoded = decode_candidates(
                captioner, captioner.policy, [row], self.decoding, self.accelerator, seed=self.seed
            )
            candidates.append(decoded[image_id][0])
        texts = [candidate.caption for candidate in candidates]
        prompts, columns = reward_inputs(
            [row] * len(candidates), [candidate.finished for candidate in candidates]
        )
        if not references:
            del columns["references"]
        scores: dict[str, list[float]] = {}
        for name in judges:
            reward = self.judges[name]
            if reward.columns <= columns.keys():
                scores[name] = score_captions(reward, name, prompts, texts, columns)
        return [
            {
                "model": model,
                "caption": text,
                "scores": {name: values[index] for name, values in scores.items()},
            }
            for index, (model, text) in enumerate(zip(models, texts, strict=True))
        ]


class PageServer(ThreadingHTTPServer):
    """Answers ``GET /`` with the page and ``POST /captions`` with the captions of one photo.

    Constructing it binds the address; it listens after ``load`` has loaded the models.
    """

    daemon_threads = True
    models: SideBySide
    page: bytes

    def __init__(self, config: WebConfig) -> None:
        self.config, self.lock, self.bodies = (
            config,
            threading.Lock(),
            threading.BoundedSemaphore(BODIES),
        )
        try:
            super().__init__((config.host, config.port), _Handler, bind_and_activate=False)
            self.server_bind()
        except OSError as error:
            where = f"host is {config.host!r} and port {config.port}"
            raise ConfigError(
                f"{where}: cannot listen there ({error.strerror}); port 0 takes a free one"
            ) from error

    def load(self) -> None:
        """Load captioners and judges, then listen. Raises what ``load_models`` raises."""
        self.models = load_models(self.config)
        self.page = render_page(self.config, self.models).encode()
        self.server_activate()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{self.config.host}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an unexpected error with its traceback; that a browser has gone away is not one."""
        if not isinstance(sys.exception(), ConnectionError):
            logger.exception("a request failed")


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SECONDS

    def do_GET(self) -> None:
        """Send the page."""
        try:
            self._check_sender()
            if self.path != "/":
                raise RefusedRequest(
                    HTTPStatus.NOT_FOUND, f"there is no {self.path!r:.80}: the page is at /"
                )
        except RefusedRequest as refused:
            self._send(refused.status, "text/plain", str(refused).encode())
        else:
            self._send(HTTPStatus.OK, "text/html", self.server.page)

    def do_POST(self) -> None:
        """Send the captions of a photo as JSON, or ``{"error": message}``."""
        status = HTTPStatus.OK
        answer: dict[str, Any] = {}
        try:
            answer = {"captions": self._captions()}
        except RefusedRequest as refused:
            status, answer = refused.status, {"error": str(refused)}
        except EXPECTED as error:
            status, answer = HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        self._send(status, "application/json", json.dumps(answer).encode())

    def _captions(self) -> list[dict[str, Any]]:
        self._check_sender()
        if self.path != "/captions" or self.headers.get_content_type() != "application/json":
            raise RefusedRequest(
                HTTPStatus.NOT_FOUND, "photos must be sent to /captions as application/json"
            )
        length, limit = self.headers.get("Content-Length", ""), self.server.config.max_mb
        if not (length.isascii() and length.isdigit()):
            raise RefusedRequest(
                HTTPStatus.LENGTH_REQUIRED, f"Content-Length is {length!r:.80}: expected a number"
            )
        if len(length) > MOST_DIGITS or int(length) > math.ceil(limit * 2**20 / 3) * 4 + MOST_TEXT:
            raise RefusedRequest(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the photo is larger than max_mb, {limit} MiB"
            )
        with self.server.bodies:
            photo: Photo = json_object(self._body(int(length)), "the request")  # type: ignore[assignment]
            check_type(photo, Photo, "the request", DataError)
            if int(length) - len(photo["image"]) > MOST_TEXT:
                raise RefusedRequest(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the request has over {MOST_TEXT} bytes besides its photo",
                )
            return self._answer(photo)

    def _body(self, length: int) -> bytes:
        """The body of a request. Raises ``RefusedRequest`` where it has not arrived after ``SECONDS``."""
        body, ends = bytearray(), time.monotonic() + SECONDS
        while len(body) < length and (piece := self.rfile.read1(length - len(body))):
            body += piece
            if time.monotonic() > ends:
                raise RefusedRequest(
                    HTTPStatus.REQUEST_TIMEOUT, f"the photo has not arrived after {SECONDS} seconds"
                )
        return bytes(body)

    def _answer(self, photo: Photo) -> list[dict[str, Any]]:
        models = self.server.models
        for key, chosen, available in (
            ("models", photo["models"], models.captioners),
            ("judges", photo["judges"], models.judges),
        ):
            if (
                not {*chosen} <= available.keys()
                or len({*chosen}) < len(chosen)
                or (key == "models" and not chosen)
            ):
                raise DataError(
                    f"{key} are {chosen!r:.200}: expected some of {list(available)}, each once"
                )
        references = [text.strip() for text in photo["references"] if text.strip()]
        with (
            self.server.lock
        ):  # also around the photo: a small file may take gigabytes when it is decoded
            image = read_photo(photo["name"], photo["image"], self.server.config.max_megapixels)
            return models.captions(
                photo["name"], image, photo["models"], photo["judges"], references
            )

    def _check_sender(self) -> None:
        """Refuse requests by pages of other sites, and by names that somebody else's DNS leads here."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not is_own(host, self.server.config.host):
            raise RefusedRequest(
                HTTPStatus.FORBIDDEN, f"Host is {host!r:.80}: expected {self.server.url}"
            )
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            raise RefusedRequest(
                HTTPStatus.FORBIDDEN, f"Origin is {origin!r:.80}: expected http://{host}"
            )

    def _send(self, status: HTTPStatus, content_type: str, content: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{content_type}; charset=utf-8",
            "Content-Length": str(len(content)),
        }
        for name, value in (headers | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing for a request."""


def serve(config: WebConfig) -> None:
    """Load everything, print the page's address, and answer until Ctrl-C.

    Raises:
        ConfigError: the address cannot be listened on, or ``load_models`` raises it.
        CaptionerError: ``load_models`` raises it.
    """
    with PageServer(config) as server:
        if config.host not in ("127.0.0.1", "localhost", "::1"):
            logger.warning(
                "WARNING: host is %s: whoever reaches this machine there can use the page, without a password",
                config.host,
            )
        server.load()
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def load_models(config: WebConfig) -> SideBySide:
    """Load the captioners and judges of a configuration.

    Raises:
        ConfigError: there is no captioner, or one twice; or a judge cannot be built, or needs more than one photo.
        CaptionerError: a captioner cannot be loaded, or reads region features.
    """
    if not config.models:
        raise ConfigError(
            "models is empty: expected at least one captioner, such as runs/NAME/export/best"
        )
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"web was started as {accelerator.num_processes} processes: start it as one"
        )
    for name, judge_config in config.judges.items():
        if short_name(judge_config.target or name) == "cider" and "df" not in judge_config.kwargs:
            option = f"--judges.{name}.kwargs.df runs/NAME/document_frequencies.npz"
            raise ConfigError(
                f"judges.{name} needs document frequencies, which cannot be computed from one photo: set {option}"
            )
    judges = build_judges(config.judges, None, [], key="judges")
    for name, judge in judges.items():
        if unknown := sorted(judge.columns - {"image", "references"}):
            raise ConfigError(
                f"judges.{name} needs {', '.join(unknown)}: the page provides only a photo and its references"
            )
    folders = [Path(model.rstrip("/").removesuffix("/export/best")) for model in config.models]
    if len(set(folders)) < len(folders):
        raise ConfigError(f"models is {config.models}: expected each captioner once")
    captioners = {}
    for name, model in zip(unique_names(folders), config.models, strict=True):
        captioners[name] = load_captioners([model], None, "probabilities")
        if captioners[name].input_kind != "pixels":
            raise CaptionerError(f"models: {model} reads region features, not photos")
        captioners[name].policy.to(accelerator.device)
    return SideBySide(captioners, judges, config.decode, accelerator, config.seed)


def render_page(config: WebConfig, models: SideBySide) -> str:
    """Render the page as one HTML file with its style and script; it shows captions and names as text, never HTML."""
    captioners = dict(zip(models.captioners, config.models, strict=True))
    judges = {
        name: (f"{judge.bounds[0]:g} to {judge.bounds[1]:g}", "references" in judge.columns)
        for name, judge in models.judges.items()
    }
    limits = {"images": config.max_images, "megabytes": config.max_mb}
    page = templates().get_template("web.html")
    return page.render(
        captioners=captioners, judges=judges, limits=limits, how=models.decoding.describe()
    )


def read_photo(name: str, content: str, max_megapixels: float) -> Image.Image:
    """Decode a photo from base64, as RGB and turned upright.

    Raises:
        DataError: it is no photo, is damaged, or has more pixels than allowed; the message begins with ``name``.
    """
    try:
        with Image.open(
            io.BytesIO(base64.b64decode(content, validate=True)), formats=FORMATS
        ) as photo:
            width, height = photo.size
            if width * height > max_megapixels * 1e6:
                allowed = f"expected at most {max_megapixels:g} million (max_megapixels)"
                raise DataError(f"it has {width} x {height} pixels: {allowed}")
            photo.load()
            return load_image(photo)
    except UnidentifiedImageError as error:
        raise DataError(
            f"{name} cannot be read: its format is none of {', '.join(FORMATS)}"
        ) from error
    except UNREADABLE as error:
        raise DataError(f"{name} cannot be read: {error or type(error).__name__}") from error


def is_own(netloc: str, host: str) -> bool:
    """Whether the ``Host`` of a request names this server: an IP address, ``localhost``, or the configured ``host``.

    Any other name may be one whose owner points it here by DNS, to read the answers (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return False
    try:
        ip_address(name)
    except ValueError:
        return name in ("localhost", host.lower())
    return True
