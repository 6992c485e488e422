"""ms-swift: a reward that asks ``rl-caption serve`` at ``RL_CAPTION_URL`` (docs/serve.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_caption.integrations.client import RewardClient


class ServedReward:
    """Reward function with ms-swift's arguments. Local images are sent to the server."""

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.client = RewardClient()
        self.columns = {"finished", *self.client.health()["columns"]}

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """Return N rewards. Raises ``ServerError``."""
        if "images" in columns:
            columns.setdefault(
                "image", [_image_of(images) for images in columns["images"]]
            )
        reasons = columns.get("finish_reason", [None])
        if None not in reasons:
            columns["finished"] = [reason != "length" for reason in reasons]
        sent = {name: rows for name, rows in columns.items() if name in self.columns}
        return self.client.score(completions, **sent).total


def _image_of(images: Sequence[Any]) -> Any:
    (image,) = images
    if isinstance(image, dict):
        image = image["bytes"] or image["path"]
    return Path(image) if isinstance(image, str) else image
