"""Rows of this package's data as the dataset that TRL's trainers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_caption.data.base import Row, load_image
from rl_caption.scst.scoring import COLUMNS

if TYPE_CHECKING:
    from datasets import Dataset

Messages = list[dict[str, Any]]


def messages(row: Row, prompt: str) -> Messages:
    """What the model is asked about a row: its own ``prompt``, else ``prompt``, as one message of the user."""
    return [{"role": "user", "content": row.get("prompt") or prompt}]


class _OpenRows:
    """Turns numbers of rows into examples. Images are opened (or drawn) here, once for all samples of a batch.

    TRL reads a batch as often as it has micro-batches, and uses it once; so its images are kept until the next.
    """

    def __init__(self, rows: Sequence[Row], prompt: str) -> None:
        self.rows, self.prompt = rows, prompt
        self.opened: dict[int, Any] = {}

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        wanted, known = dict.fromkeys(batch["row"]), self.opened
        images = {row: known[row] if row in known else load_image(self.rows[row]["image"]) for row in wanted}
        self.opened = images
        rows = [self.rows[number] for number in batch["row"]]
        columns = {key: [row[key] for row in rows] for key in COLUMNS}  # type: ignore[literal-required]
        columns["prompt"] = [messages(row, self.prompt) for row in rows]
        columns["image"] = [images[number] for number in batch["row"]]
        return columns


def trl_dataset(rows: Sequence[Row], prompt: str) -> Dataset:
    """A dataset with the columns ``prompt`` (messages), ``image`` (PIL, RGB), ``references`` and ``image_id``.

    Rewards are told what this package's own training tells them (``rl_caption.scst.scoring``), the truth of a
    generated scene not. The table itself holds numbers of rows only: references stay lists of strings, and no pixel is
    in memory before its batch. Equal images of a batch are one object, so that rewards encode them once.

    Args:
        rows: at least one.
        prompt: for rows without their own.
    """
    from datasets import Dataset

    return Dataset.from_dict({"row": list(range(len(rows)))}).with_transform(_OpenRows(rows, prompt))
