"""Configuration of ``serve``."""

import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl_caption.config.schema import RewardConfig, TrustConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Range

TOKEN_VARIABLE = "RL_CAPTION_TOKEN"
"""Environment variable with the token of requests: everybody on a machine reads command lines."""


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only programs of this machine reach."""


@dataclass
class ServeConfig(TrustConfig):
    """``serve``: a reward behind HTTP, for workers that cannot hold it (docs/serve.md).

    The token that every request must bring is the environment variable ``RL_CAPTION_TOKEN``; a host
    other than the loopback address needs one.

    Args:
        reward: the reward; ``--reward mix.yaml`` reads this section from a file. CIDEr-D needs
            ``reward.df``.
        tokenizer: of n-gram rewards: ``ptb`` (English), ``unicode``, ``char`` or ``none``.
        images: folders of images by name, such as ``{coco: /data/coco}``: a request names an image
            as ``coco/val2014/1.jpg``.
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which is printed.
        workers: processes that share the port, each with its own copy of the reward; with several
            GPUs, they take them in turn.
        max_batch: captions scored by one call of the reward; a larger request has its own call.
        window_ms: milliseconds that a request waits for others when the reward is idle.
        max_pending: captions that may wait in a worker; further requests are answered with 503.
        max_mb: largest body of a request, in MiB.
        max_megapixels: largest image, in millions of pixels.
    """

    reward: RewardConfig = field(default_factory=RewardConfig)
    tokenizer: Literal["ptb", "unicode", "char", "none"] = "ptb"
    images: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: Annotated[int, Range(min=0, max=65535)] = 8400
    workers: Annotated[int, Range(min=1, max=256)] = 1
    max_batch: Annotated[int, Range(min=1, max=10**6)] = 512
    window_ms: Annotated[float, Range(min=0, max=10000)] = 2.0
    max_pending: Annotated[int, Range(min=1, max=10**7)] = 8192
    max_mb: Annotated[float, Range(above=0, max=4096)] = 64.0
    max_megapixels: Annotated[float, Range(above=0, max=1000)] = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host not in LOOPBACK and not os.environ.get(TOKEN_VARIABLE):
            raise ConfigError(
                f"host is {self.host!r}, which other machines reach: set the environment variable "
                f"{TOKEN_VARIABLE} to the token of requests, or leave host at 127.0.0.1"
            )
