"""``rl-caption serve``: a reward behind HTTP, for captions of many workers."""

import os
from pathlib import Path

from rewards.base import leaf_rewards, optional
from rewards.mixed import MixedReward
from rl_caption.config.build import build_reward
from rl_caption.integrations.config import ServeConfig
from rl_caption.runtime.errors import ConfigError

KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
"""Number of kernels that torch caches on a CPU, unless the variable is set. Every size
of a call has kernels of its own; with torch's default of 1,024 the server's memory
grows by hundreds of MiB.
"""


def serve(config: ServeConfig) -> None:
    """Build the reward, listen, and answer until SIGTERM or Ctrl-C; accepted requests
    are still answered.

    Raises:
        ConfigError: the reward cannot be built or a folder is missing.
    """
    os.environ.setdefault(*KERNELS)
    uvicorn = optional("uvicorn", "serve needs", "'rl-caption[serve]'", ConfigError)
    from rl_caption.integrations.app import make_app

    for name, folder in config.images.items():
        if not Path(folder).is_dir():
            raise ConfigError(f"images.{name} is {folder!r}: there is no such folder")
    options = uvicorn.Config("", config.host, config.port, log_level="warning")
    with options.bind_socket() as listener:
        listener.listen(2048)
        config.port = listener.getsockname()[1]
        app = make_app(config, build_served_reward(config))
        print(f"http://{config.host}:{config.port}  (Ctrl-C ends it)", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


def build_served_reward(config: ServeConfig) -> MixedReward:
    """Build the mixture of rewards. Raises ``ConfigError``, also for CIDEr-D without
    document frequencies.
    """
    reward = build_reward(config.reward, [], tokenizer=config.tokenizer)
    for term in leaf_rewards(reward):
        if getattr(term, "df", term) is None:
            raise ConfigError(
                f"reward.df is not set: {term.__name__} needs document frequencies of the training "
                "captions, such as document_frequencies.npz of a run; without them scores would "
                "depend on who else asks"
            )
    return reward
