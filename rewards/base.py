"""The seam every reward is written to: one call, N captions in, N finite scores out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


class RewardError(RuntimeError):
    """A reward could not score its input, or returned something that is not a score.

    A failing reward raises this; it never becomes 0.0 or NaN, because a policy learns from either.
    """


@runtime_checkable
class Reward(Protocol):
    """A plain picklable object (never an ``nn.Module``; it may hold one) that scores captions.

    The call has the signature of TRL's reward functions, so every reward also drives ``GRPOTrainer`` and
    ``RLOOTrainer``: ``prompts`` and ``completions`` have N items, and so has every column. A column that the reward
    does not know (``completion_ids``, ``trainer_state``, ``log_extra``, ``log_metric``, ...) is absorbed by
    ``**columns``.

    Columns that this package's own loop passes to every reward:

    - ``references`` (``list[list[str]]``): the captions people wrote for the row's image, as they wrote them;
    - ``image_id`` (``list[str]``), ``image`` (``list`` of paths or PIL images);
    - ``finished`` (``list[bool]``): whether the caption ended with EOS before the length limit. A reward for which EOS
      is a token appends it to finished captions only. Absent means that all are finished.
    """

    __name__: str
    """Log key, such as ``cider``."""
    columns: frozenset[str]
    """Columns it cannot work without, such as ``{"references"}``."""
    bounds: tuple[float, float]
    """Smallest and largest possible score, such as (0, 10) for CIDEr-D."""
    signature: str
    """Everything that a published score depends on (variant, parameters, EOS, document frequencies, backbone)."""

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return N scores within ``bounds``, in the order of ``completions``."""
        ...


def as_texts(completions: Sequence[Any]) -> list[str]:
    """Turn completions into strings: strings stay, TRL message lists become the text of their last message.

    Raises:
        RewardError: an item is neither a string nor a list of ``{"role", "content"}`` messages.
    """
    if set(map(type, completions)) == {str}:
        return list(completions)
    return [_as_text(completion, row) for row, completion in enumerate(completions)]


def _as_text(completion: Any, row: int) -> str:
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict) and "content" in completion[-1]:
        content = completion[-1]["content"]
        if isinstance(content, str):
            return content
        if isinstance(content, list):
            return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    raise RewardError(
        f"completion {row} is {completion!r:.80}: expected a string or a list of messages with 'role' and 'content'"
    )


def checked_scores(reward: Any, scores: Any, count: int) -> list[float]:
    """Return ``scores`` as a list of ``count`` finite floats.

    Raises:
        RewardError: wrong count, None, or a non-finite score; the message names the reward and the first bad row.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    values = list(scores) if scores is not None else []
    if len(values) != count:
        raise RewardError(f"reward {name!r} returned {len(values)} scores for {count} captions")
    for row, value in enumerate(values):
        if value is None or not math.isfinite(value):
            raise RewardError(f"reward {name!r} returned {value!r} for caption {row}: every score must be finite")
    return [float(value) for value in values]


def required_column(columns: dict[str, Any], name: str, reward: str, count: int) -> Sequence[Any]:
    """Return column ``name`` with ``count`` items.

    Where there is no ``image``, TRL's ``images`` is taken; an item of either may be a list of one image.

    Raises:
        RewardError: the column is missing or has another length, or a row has several images or none.
    """
    column = columns.get(name)
    if column is None and name == "image":
        column = columns.get("images")
    if column is None:
        raise RewardError(f"reward {reward!r} needs the column {name!r}; the batch has {sorted(columns)}")
    if len(column) != count:
        raise RewardError(f"reward {reward!r}: column {name!r} has {len(column)} items for {count} captions")
    return [_only_image(item, row, reward) for row, item in enumerate(column)] if name == "image" else column


def _only_image(item: Any, row: int, reward: str) -> Any:
    if not isinstance(item, list | tuple):
        return item
    if len(item) != 1:
        raise RewardError(f"reward {reward!r}: row {row} has {len(item)} images: expected one for a caption")
    return item[0]
