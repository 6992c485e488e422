"""This package's rows as a dataset for TRL's trainers, and the terms of a mixed reward as their reward functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rewards.base import Reward, RewardError, checked_scores
from rewards.mixed import MixedReward
from rl_caption.data.base import COLUMNS, Row, load_image

if TYPE_CHECKING:
    from datasets import Dataset


def messages(row: Row, prompt: str) -> list[dict[str, Any]]:
    """The prompt of a row, its own or else ``prompt``, as one message of the user."""
    return [{"role": "user", "content": row.get("prompt") or prompt}]


def trl_dataset(rows: Sequence[Row], prompt: str) -> Dataset:
    """A dataset with the columns ``prompt`` (messages), ``image`` (PIL, RGB), ``references`` and ``image_id``.

    Rewards get the columns of this package's own training (``data.base.COLUMNS``), not the truth of a generated
    scene. The table itself holds indices of rows; an image is opened when its batch is read. TRL reads a batch as often
    as it has micro-batches, so the images of one batch are kept until the next; equal images of a batch are one object,
    so that rewards encode them a single time.
    """
    from datasets import Dataset

    opened: dict[int, Any] = {}

    def examples(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        """A batch of rows as TRL reads it; images are opened here."""
        nonlocal opened
        numbers = batch["row"]
        opened = {n: opened[n] if n in opened else load_image(rows[n]["image"]) for n in dict.fromkeys(numbers)}
        columns = {key: [rows[n][key] for n in numbers] for key in COLUMNS}  # type: ignore[literal-required]
        asked = [messages(rows[n], prompt) for n in numbers]
        return columns | {"prompt": asked, "image": [opened[n] for n in numbers]}

    return Dataset.from_dict({"row": list(range(len(rows)))}).with_transform(examples)


class FinishedAware:
    """A reward that gets the column ``finished`` from TRL's ``completion_ids``.

    TRL passes the token ids of a caption up to and including EOS; a caption that ran into the length limit has none.
    Without the column CIDEr-D would give such captions an EOS (docs/trl.md).
    """

    def __init__(self, reward: Reward, eos_token_ids: Collection[int], name: str | None = None) -> None:
        """Wrap ``reward``; ``name`` is its log key, by default its own."""
        self.reward, self.eos_token_ids = reward, frozenset(eos_token_ids)
        self.__name__ = name or reward.__name__
        self.columns, self.bounds, self.signature = reward.columns, reward.bounds, reward.signature

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return N scores.

        Raises:
            RewardError: as the reward does; also for a score that is None or not finite, which TRL would leave out.
        """
        ids = columns.get("completion_ids")
        if ids is not None and "finished" not in columns:
            columns["finished"] = [bool(row) and row[-1] in self.eos_token_ids for row in ids]
        try:
            return checked_scores(self, self.reward(prompts, completions, **columns), len(completions))
        except RewardError as error:
            raise RewardError(f"reward term {self.__name__!r}: {error}") from error


def reward_functions(mixed: MixedReward, eos_token_ids: Collection[int]) -> tuple[list[FinishedAware], list[float]]:
    """The terms of ``mixed`` for ``reward_funcs``, and their weights for ``reward_weights``."""
    terms = [FinishedAware(reward, eos_token_ids, name) for name, reward in mixed.rewards.items()]
    return terms, [mixed.weights[name] for name in mixed.rewards]
