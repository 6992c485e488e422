"""Configuration of ``serve``: dataclasses only."""

import ipaddress
import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl_caption.config.schema import RewardConfig, TrustConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Range

TOKEN_VARIABLE = "RL_CAPTION_TOKEN"
"""Environment variable with the token that requests must bring; everybody on a machine can read command lines."""


@dataclass
class ServeConfig(TrustConfig):
    """``serve``: a reward behind HTTP, for training frameworks that cannot hold it in their workers (docs/serve.md).

    The token that every request must bring is the environment variable ``RL_CAPTION_TOKEN``; a host other than the
    loopback address needs one.

    Args:
        reward: the reward; ``--reward mix.yaml`` reads this section from a file. CIDEr-D needs ``reward.df``.
        tokenizer: of n-gram rewards: ``ptb`` (English), ``unicode``, ``char`` or ``none``.
        images: folders of images by name, such as ``{coco: /data/coco}``: a request names an image as
            ``coco/val2014/1.jpg``. Files outside of them, also behind links, are refused.
        allow_urls: fetch images from http and https addresses that a request names.
        host: address to listen on.
        port: port to listen on; 0 takes a free one, which is printed.
        workers: processes that share the port, each with its own copy of the reward; with several GPUs, worker i gets
            GPU i modulo their number.
        max_batch: captions scored by one call of the reward; a larger request is scored by a call of its own.
        window_ms: milliseconds that the first request of a batch waits for others, unless the reward is still busy.
        max_pending: captions that may wait in a worker; a request beyond them is answered with status 503.
        max_mb: largest body of a request, in MiB.
        max_megapixels: largest image, in millions of pixels.
    """

    reward: RewardConfig = field(default_factory=RewardConfig)
    tokenizer: Literal["ptb", "unicode", "char", "none"] = "ptb"
    images: dict[str, str] = field(default_factory=dict)
    allow_urls: bool = False
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
        if not is_loopback(self.host) and not os.environ.get(TOKEN_VARIABLE):
            raise ConfigError(
                f"host is {self.host!r}, which other machines reach: set the environment variable {TOKEN_VARIABLE} to "
                "the token that requests must bring, or leave host at 127.0.0.1"
            )
        for name in self.images:
            if not name or "/" in name or name in (".", ".."):
                raise ConfigError(
                    f"images has the name {name!r}: expected one without a slash, such as coco"
                )


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
