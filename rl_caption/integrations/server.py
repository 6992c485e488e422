"""``rl-caption serve``: a reward or mixture behind HTTP, which scores captions of many workers in shared calls."""

import asyncio
import contextlib
import json
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rewards.base import RewardError, leaf_rewards, optional
from rewards.mixed import MixedReward
from rl_caption.config.build import build_reward
from rl_caption.integrations.batching import BatchingScorer, QueueFull
from rl_caption.integrations.client import Scores
from rl_caption.integrations.config import TOKEN_VARIABLE, ServeConfig, is_loopback
from rl_caption.integrations.requests import (
    Columns,
    RefusedRequest,
    read_json,
    read_llamafactory,
    read_openrlhf,
    read_rows,
    read_scoring,
)
from rl_caption.runtime.errors import ConfigError

logger = logging.getLogger(__name__)
KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
"""How many kernels torch keeps on a CPU, unless the variable is set. Calls of each size have their own; by default it
keeps 1,024, and the server's memory would grow for minutes, by hundreds of MiB."""


def serve(config: ServeConfig) -> None:
    """Build the reward, listen, and answer until SIGTERM or Ctrl-C; what was accepted until then is answered.

    Raises:
        ConfigError: the reward cannot be built or needs a training split, a folder of images is missing, the address
            cannot be listened on, or a package of the extra ``serve`` is not installed.
    """
    os.environ.setdefault(*KERNELS)
    for package in ("uvicorn", "fastapi", "prometheus_client"):
        optional(package, "serve needs", "'rl-caption[serve]'", ConfigError)
    for name, folder in config.images.items():
        if not Path(folder).is_dir():
            raise ConfigError(f"images.{name} is {folder!r}: there is no such folder")
    with bind(config) as listener:
        address = f"http://{config.host}:{listener.getsockname()[1]}"
        if config.workers == 1:
            app = build_app(config, build_served_reward(config))
            print(f"{address}  (Ctrl-C ends it)", flush=True)
            _answer_until_stopped(app, listener)
        else:
            print(f"{address}  ({config.workers} workers start; Ctrl-C ends them)", flush=True)
            _run_workers(config, listener)


def build_served_reward(config: ServeConfig) -> MixedReward:
    """The mixture. Raises ``ConfigError``, also for CIDEr-D without document frequencies."""
    reward = build_reward(config.reward, [], tokenizer=config.tokenizer)
    for term in leaf_rewards(reward):
        if getattr(term, "df", term) is None:
            raise ConfigError(
                f"reward.df is not set: {term.__name__} needs document frequencies of the training captions, such as "
                "the file document_frequencies.npz of a run; without them scores would depend on who else asks"
            )
    return reward


@contextlib.contextmanager
def bind(config: ServeConfig) -> Iterator[socket.socket]:
    """A socket at the address to listen on. Raises ``ConfigError``."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            where = f"host is {config.host!r} and port {config.port}"
            raise ConfigError(
                f"{where}: cannot listen there ({error.strerror}); port 0 takes a free one"
            ) from error
        listener.listen(2048)  # requests wait until the reward is loaded
        yield listener


def _run_workers(config: ServeConfig, listener: socket.socket) -> None:
    """Start the workers, pass SIGTERM and Ctrl-C on, and wait for them; if one ends by itself, all end."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(config, listener, index))
        for index in range(config.workers)
    ]
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGTERM)

    for worker in workers:
        worker.start()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while any(worker.is_alive() for worker in workers):
        multiprocessing.connection.wait(
            [worker.sentinel for worker in workers if worker.is_alive()], timeout=1
        )
        if not stopping and not all(worker.is_alive() for worker in workers):
            logger.error(
                "a worker ended with code %s: the others are stopped",
                [worker.exitcode for worker in workers],
            )
            stop()
    # One that was still loading has died of SIGTERM.
    if any(worker.exitcode not in (0, -signal.SIGTERM) for worker in workers):
        raise ConfigError(f"workers ended with the codes {[worker.exitcode for worker in workers]}")


def _work(config: ServeConfig, listener: socket.socket, index: int) -> None:
    """One worker: its GPU is chosen before CUDA is initialised."""
    import torch

    if count := torch.cuda.device_count():
        torch.cuda.set_device(index % count)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _answer_until_stopped(build_app(config, build_served_reward(config)), listener)


def _answer_until_stopped(app: Any, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C; those that have been accepted are answered first."""
    import uvicorn

    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # uvicorn raises the signal again when it has stopped
        signal.signal(number, lambda *_: None)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


class ServerMetrics:
    """What ``/metrics`` says of one worker."""

    def __init__(self, scorer: BatchingScorer) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = registry = CollectorRegistry()
        self.captions = Counter(
            "rl_caption_captions", "captions that were scored", registry=registry
        )
        self.refused = Counter(
            "rl_caption_refused", "requests without scores", ["status"], registry=registry
        )
        self.seconds = Histogram(
            "rl_caption_seconds", "seconds of a scored request", registry=registry
        )
        pending = Gauge("rl_caption_pending_captions", "captions that wait", registry=registry)
        pending.set_function(lambda: scorer.pending)
        calls = Gauge("rl_caption_reward_calls", "calls of the reward", registry=registry)
        calls.set_function(lambda: scorer.calls)

    def text(self) -> bytes:
        """All of it in Prometheus' format."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


def build_app(config: ServeConfig, reward: MixedReward) -> Any:
    """The ASGI application: ``/score``, ``/openrlhf``, ``/llamafactory``, ``/health`` and ``/metrics``."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    scorer = BatchingScorer(reward, config.max_batch, config.window_ms / 1000, config.max_pending)
    metrics = ServerMetrics(scorer)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(scorer.run())
        yield
        running.cancel()

    async def score(request: Request, read: Callable[[Any], tuple[list[str], Columns]]) -> Scores:
        start = time.perf_counter()
        scores = await scores_of(request, read, config, scorer)
        metrics.captions.inc(len(scores.total))
        metrics.seconds.observe(time.perf_counter() - start)
        return scores

    app = FastAPI(
        title="rl-caption", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    if is_loopback(
        config.host
    ):  # else pages of other sites could ask, under a name that leads here
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "[::1]"])

    answer_errors(app, metrics)

    @app.post("/score")
    async def _(request: Request) -> Any:
        scores = await score(request, read_scoring)
        return JSONResponse({"scores": scores.total, "terms": scores.terms})

    @app.post("/openrlhf")
    async def _(request: Request) -> Any:
        scores = await score(request, read_openrlhf)
        return JSONResponse(
            {"rewards": scores.total, "scores": scores.total, "extra_logs": scores.terms}
        )

    @app.post("/llamafactory")
    async def _(request: Request) -> Any:
        read = partial(read_llamafactory, after=request.query_params.get("after"))
        return JSONResponse({"scores": (await score(request, read)).total})

    @app.get("/health")
    async def _() -> Any:
        bounds = [end if math.isfinite(end) else None for end in reward.bounds]
        described = {
            "signature": reward.signature,
            "bounds": bounds,
            "columns": sorted(reward.columns),
        }
        return JSONResponse(
            {"status": "ok", "terms": reward.weights, "pending": scorer.pending} | described
        )

    @app.get("/metrics")
    async def _() -> Any:
        return PlainTextResponse(metrics.text())

    return app


def answer_errors(app: Any, metrics: ServerMetrics) -> None:
    """Add the answers to refused requests: JSON with the error, and where known row and field."""
    from fastapi import Request
    from fastapi.responses import Response

    @app.exception_handler(RefusedRequest)
    async def refuse(_: Request, error: RefusedRequest) -> Response:
        metrics.refused.labels(error.status).inc()
        body = json.dumps(
            {"error": str(error), "row": error.row, "field": error.field}
        )  # ASCII: fields are any text
        headers = {"Retry-After": "1"} if error.status == 503 else None
        return Response(body, error.status, headers, "application/json")

    @app.exception_handler(RecursionError)
    async def refuse_nesting(request: Request, _: RecursionError) -> Response:
        return await refuse(request, RefusedRequest(400, "brackets are nested too deeply"))


async def scores_of(
    request: Any,
    read: Callable[[Any], tuple[list[str], Columns]],
    config: ServeConfig,
    scorer: BatchingScorer,
) -> Scores:
    """Scores of the captions that ``read`` takes from the body of a request. Raises ``RefusedRequest``."""
    check_token(request.headers.get("authorization", ""))
    captions, columns = read(await read_json(request, config.max_mb))
    columns = await asyncio.to_thread(read_rows, config, scorer.reward.columns, captions, columns)
    try:
        return await scorer.score(captions, columns)
    except QueueFull as error:
        raise RefusedRequest(503, str(error)) from error
    except RewardError as error:
        row = await scorer.failing_row(captions, columns)
        raise RefusedRequest(
            422, str(error) if row is None else f"row {row}: {error}", row
        ) from error


def check_token(authorization: str) -> None:
    """Raises ``RefusedRequest`` where the server has a token and the header ``Authorization`` has not."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token and not secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise RefusedRequest(
            401, "the token is missing or wrong: expected the header Authorization: Bearer TOKEN"
        )
