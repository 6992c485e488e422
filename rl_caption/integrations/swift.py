"""ms-swift: a reward by a server. In the file of ``--external_plugins``:

    from swift.rewards import ORM, orms          # the module of your version of ms-swift
    from rl_caption.integrations.swift import ServedReward
    orms["rl_caption"] = type("RLCaption", (ServedReward, ORM), {})

and ``--reward_funcs rl_caption``. Columns of the data set that the reward needs have their names here: ``image`` or
ms-swift's ``images``, ``references``, ``image_id``. ``finish_reason`` says which captions ended.
"""

from collections.abc import Sequence
from typing import Any

from rl_caption.integrations.client import RewardClient


class ServedReward:
    """Rewards of completions by the server at ``RL_CAPTION_URL``, in ms-swift's order of arguments.

    Args:
        args: those of the training, which are not read.
        url: of the server; None takes the environment variable ``RL_CAPTION_URL``.
    """

    def __init__(self, args: Any = None, url: str | None = None, **_: Any) -> None:
        self.client = RewardClient(url)
        self.columns = frozenset(self.client.health()["columns"])

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """Return N rewards. Raises ``ServerError``."""
        if "image" not in columns and "images" in columns:
            columns["image"] = [_path_of(images) for images in columns["images"]]
        reasons = columns.get("finish_reason") or [None]
        if "finished" not in columns and None not in reasons:
            columns["finished"] = [reason != "length" for reason in reasons]
        sent = {name: rows for name, rows in columns.items() if name in self.columns | {"finished"}}
        return self.client.score(completions, **sent).total


def _path_of(images: Any) -> Any:
    """The only image of a row of ms-swift's column ``images``, items of which may be ``{"path", "bytes"}``."""
    image = images[0] if isinstance(images, list | tuple) and len(images) == 1 else images
    return image.get("bytes") or image.get("path") if isinstance(image, dict) else image
