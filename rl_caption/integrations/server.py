"""``rl-caption serve``: a reward behind HTTP, which scores captions of many workers together."""

import logging
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rewards.base import leaf_rewards, optional
from rewards.mixed import MixedReward
from rl_caption.config.build import build_reward
from rl_caption.integrations.batching import BatchingScorer
from rl_caption.integrations.config import ServeConfig
from rl_caption.runtime.errors import ConfigError

logger = logging.getLogger(__name__)
KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
"""How many kernels torch keeps on a CPU, unless the variable is set. Calls of each size have their
own; by default it keeps 1,024, and the server's memory grows by hundreds of MiB."""
STARTUP_FAILURE = 3
"""uvicorn's exit code of a worker that would fail again."""
SILENCE_SECONDS = 600
"""Seconds after which a worker that does not answer its supervisor is replaced."""


def serve(config: ServeConfig) -> None:
    """Build the reward, listen, and answer until SIGTERM or Ctrl-C; then answer what was accepted.

    Raises:
        ConfigError: the reward cannot be built or a folder is missing.
    """
    os.environ.setdefault(*KERNELS)
    optional("uvicorn", "serve needs", "'rl-caption[serve]'", ConfigError)
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    for name, folder in config.images.items():
        if not Path(folder).is_dir():
            raise ConfigError(f"images.{name} is {folder!r}: there is no such folder")
    ready = multiprocessing.get_context("spawn").Value("i", 0)
    options = uvicorn.Config(
        partial(load_app, config, ready),
        config.host,
        config.port,
        factory=True,
        workers=config.workers,
        log_level="warning",
        timeout_worker_healthcheck=SILENCE_SECONDS,
    )
    with options.bind_socket() as listener:
        listener.listen(2048)
        config.port = listener.getsockname()[1]
        if config.workers == 1:
            uvicorn.Server(options).run([listener])
            return
        supervisor = Multiprocess(options, [listener])
        supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise ConfigError("a worker could not start")


def load_app(config: ServeConfig, ready: Any) -> Any:
    """The application of one worker; the last of them to be ready prints the address.

    ``ready`` is the number of workers that are ready, shared by all of them.
    """
    from rl_caption.integrations.app import make_app

    try:
        if config.workers > 1 and torch.cuda.is_available():
            number = int(multiprocessing.current_process().name.rpartition("-")[2])
            torch.cuda.set_device(number % torch.cuda.device_count())
        scorer = make_scorer(config, build_served_reward(config))
        scorer.warm_up()
    except Exception:
        if config.workers == 1:
            raise
        logger.exception("a worker could not start")
        sys.exit(STARTUP_FAILURE)
    with ready.get_lock():
        ready.value += 1
        if ready.value == config.workers:
            print(f"http://{config.host}:{config.port}  (Ctrl-C ends it)", flush=True)
    return make_app(config, scorer)


def make_scorer(config: ServeConfig, reward: MixedReward) -> BatchingScorer:
    """The queue of a worker."""
    return BatchingScorer(reward, config.max_batch, config.window_ms / 1000, config.max_pending)


def build_served_reward(config: ServeConfig) -> MixedReward:
    """The mixture. Raises ``ConfigError``, also for CIDEr-D without document frequencies."""
    reward = build_reward(config.reward, [], tokenizer=config.tokenizer)
    for term in leaf_rewards(reward):
        if getattr(term, "df", term) is None:
            raise ConfigError(
                f"reward.df is not set: {term.__name__} needs document frequencies of the training "
                "captions, such as document_frequencies.npz of a run; without them scores would "
                "depend on who else asks"
            )
    return reward
