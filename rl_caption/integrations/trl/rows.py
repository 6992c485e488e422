"""This package's rows as a dataset for TRL's trainers, and its rewards as their reward functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rewards.base import Reward, score_captions
from rl_caption.captioners.vlm_families import Messages, as_messages
from rl_caption.data.base import COLUMNS, Row, load_image

if TYPE_CHECKING:
    from datasets import Dataset


def trl_dataset(rows: Sequence[Row], prompt: str | Messages) -> Dataset:
    """A dataset with the columns ``prompt`` (messages), ``image`` (PIL, RGB),
    ``references``, ``image_id``, and ``questions`` where all rows have them.

    Rewards get the same columns in this package's own training (``data.base.COLUMNS``).
    The table itself holds row numbers; images are opened when their batch is read. TRL
    reads a batch once for each micro-batch, so the images of a batch are kept until the
    next one. The samples of an image share one image object, so that rewards encode it
    once.
    """
    from datasets import Dataset

    opened: dict[int, Any] = {}

    def examples(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        """The examples of a batch of row numbers."""
        nonlocal opened
        numbers = batch["row"]
        opened = {
            n: opened[n] if n in opened else load_image(rows[n]["image"])
            for n in dict.fromkeys(numbers)
        }
        present = [key for key in COLUMNS if all(key in rows[n] for n in numbers)]
        columns = {key: [rows[n][key] for n in numbers] for key in present}  # type: ignore[literal-required]
        asked = [as_messages(prompt, rows[n].get("prompt")) for n in numbers]
        return columns | {"prompt": asked, "image": [opened[n] for n in numbers]}

    return Dataset.from_dict({"row": list(range(len(rows)))}).with_transform(examples)


class FinishedAware:
    """A reward with the column ``finished``: whether a caption ended with EOS, from
    TRL's ``completion_ids``.

    TRL passes the token ids of a caption up to and including EOS; a caption that
    reached the length limit has no EOS. Without this column CIDEr-D would take every
    caption as finished (docs/trl.md).
    """

    def __init__(
        self, reward: Reward, eos_token_ids: Collection[int], name: str | None = None
    ) -> None:
        """Wrap ``reward``, which is logged as ``name`` or, by default, under its own name."""
        self.reward, self.eos_token_ids = reward, frozenset(eos_token_ids)
        self.__name__ = name or reward.__name__
        self.columns, self.bounds = reward.columns, reward.bounds
        self.signature = reward.signature

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Return N scores for N completions.

        Raises:
            RewardError: as ``score_captions``, also for None, which TRL would leave
                out.
        """
        ids = columns.get("completion_ids")
        if ids is not None and "finished" not in columns:
            columns["finished"] = [
                bool(row) and row[-1] in self.eos_token_ids for row in ids
            ]
        return score_captions(
            self.reward, f"reward term {self.__name__!r}", prompts, completions, columns
        )
