"""Configuration of ``serve``."""

import os
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_caption.config.schema import RewardConfig, TrustConfig
from rl_caption.runtime.errors import ConfigError

TOKEN_VARIABLE = "RL_CAPTION_TOKEN"
"""Environment variable with the token of requests. Not an option: every user of a
machine can read command lines.
"""


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only programs of this machine reach."""


class ServeConfig(TrustConfig):
    """``serve``: a reward behind HTTP, for workers that cannot hold it (docs/serve.md).

    The token that every request must bring is the environment variable
    ``RL_CAPTION_TOKEN``; a host other than the loopback address needs one.
    """

    reward: RewardConfig = Field(default_factory=RewardConfig)
    """The reward. CIDEr-D needs ``reward.df``."""
    tokenizer: Literal["ptb", "unicode", "char", "none"] = "ptb"
    """Tokenizer of n-gram rewards: ``ptb`` (English), ``unicode``, ``char`` or
    ``none``.
    """
    images: dict[str, str] = {}
    """Folders of images by name, such as ``{coco: /data/coco}``: a request names an
    image as ``coco/val2014/1.jpg``.
    """
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8400
    """Port to listen on; 0 takes a free one, which is printed."""
    max_batch: Annotated[int, Field(ge=1)] = 512
    """Captions scored by one call of the reward; a larger request has its own call."""
    max_pending: Annotated[int, Field(ge=1)] = 8192
    """Captions that may wait; further requests are answered with 503."""
    max_mb: Annotated[float, Field(gt=0)] = 64.0
    """Largest body of a request, in MiB."""
    max_megapixels: Annotated[float, Field(gt=0)] = 50.0
    """Largest image, in millions of pixels."""

    @model_validator(mode="after")
    def _check_serve(self) -> Self:
        if self.host not in LOOPBACK and not os.environ.get(TOKEN_VARIABLE):
            raise ConfigError(
                f"host is {self.host!r}, which other machines reach: set the environment variable "
                f"{TOKEN_VARIABLE} to the token of requests, or leave host at 127.0.0.1"
            )
        return self
