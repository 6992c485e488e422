"""``rl-caption serve``: a reward behind HTTP, which scores captions of many workers together."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from rewards.base import leaf_rewards, optional
from rewards.mixed import MixedReward
from rl_caption.config.build import build_reward
from rl_caption.integrations.batching import BatchingScorer
from rl_caption.integrations.config import ServeConfig
from rl_caption.runtime.errors import ConfigError

KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
"""How many kernels torch keeps on a CPU, unless the variable is set. Calls of each size have their
own; by default it keeps 1,024, and the server's memory grows by hundreds of MiB."""


def serve(config: ServeConfig) -> None:
    """Build the reward, listen, and answer until SIGTERM or Ctrl-C; then answer what was accepted.

    Raises:
        ConfigError: the reward cannot be built or a folder is missing.
    """
    os.environ.setdefault(*KERNELS)
    uvicorn = optional("uvicorn", "serve needs", "'rl-caption[serve]'", ConfigError)
    for name, folder in config.images.items():
        if not Path(folder).is_dir():
            raise ConfigError(f"images.{name} is {folder!r}: there is no such folder")
    context = multiprocessing.get_context("spawn")
    ready = context.Value("i", 0)
    with uvicorn.Config(
        "", config.host, config.port, log_level="warning"
    ).bind_socket() as listener:
        listener.listen(2048)
        config.port = listener.getsockname()[1]
        if config.workers == 1:
            work(config, listener, ready)
            return
        workers = [
            context.Process(target=work, args=(config, listener, ready, index))
            for index in range(config.workers)
        ]
        run_together(workers)


def run_together(workers: Sequence[BaseProcess]) -> None:
    """Run processes until SIGTERM, Ctrl-C or the end of one of them; then end all of them.

    Raises ``ConfigError`` if one has failed.
    """

    def end(*_: Any) -> None:
        for worker in workers:
            worker.terminate()

    for worker in workers:
        worker.start()
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    multiprocessing.connection.wait([worker.sentinel for worker in workers])
    end()
    for worker in workers:
        worker.join()
    codes = [worker.exitcode for worker in workers]
    if not set(codes) <= {0, -signal.SIGTERM}:
        raise ConfigError(f"workers ended with the codes {codes}")


def work(config: ServeConfig, listener: socket.socket, ready: Any, index: int = 0) -> None:
    """Answer requests as one worker; the last of them to be ready prints the address.

    ``ready`` is the number of workers that are ready, shared by all of them.
    """
    import uvicorn

    from rl_caption.integrations.app import make_app

    if config.workers > 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process passes it on
        if torch.cuda.is_available():
            torch.cuda.set_device(index % torch.cuda.device_count())
    scorer = make_scorer(config, build_served_reward(config))
    scorer.warm_up()
    with ready.get_lock():
        ready.value += 1
        if ready.value == config.workers:
            print(f"http://{config.host}:{config.port}  (Ctrl-C ends it)", flush=True)
    app = make_app(config, scorer)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


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
