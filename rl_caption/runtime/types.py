"""Data types of a training step and its validation. B images, K samples each, L tokens,
EOS included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

if TYPE_CHECKING:
    from rl_caption.data.base import Row

LOSS = "val/loss"
"""The one metric of validation that is better when it is lower."""


class Batch(Protocol):
    """A micro-batch as the loop sees it."""

    def to(self, device: torch.device) -> Batch: ...


@dataclass(frozen=True)
class Validation:
    """Result of a validation."""

    metrics: dict[str, float]
    """``val/*`` and whatever else is to be logged; every process has the same."""
    messages: Sequence[str] = ()
    """Plain sentences for the log, such as an alarm with its evidence."""
    stop: str | None = None
    """Why the run is to end now; None lets it go on."""


@dataclass(frozen=True)
class CaptionBatch:
    """A micro-batch of B images."""

    rows: Sequence[Row]
    inputs: dict[str, Tensor]
    """Inputs of the captioner; every tensor has B rows."""
    targets: Tensor | None = None
    """Reference captions as token ids [B, C, L], padded after EOS; only where
    cross-entropy is trained.
    """
    target_mask: Tensor | None = None
    """[B, C, L], True for the tokens to learn: no padding, and nothing that the
    captioner may not emit (UNK).
    """

    @property
    def image_ids(self) -> list[str]:
        """Ids of the B images."""
        return [row["image_id"] for row in self.rows]

    def to(self, device: torch.device) -> CaptionBatch:
        """The batch with its tensors on ``device``."""
        return self._with(lambda value: value.to(device, non_blocking=True))

    def pin_memory(self) -> CaptionBatch:
        """The batch in page-locked memory, from where a GPU copies while it computes;
        called by the loader.
        """
        return self._with(lambda value: value.pin_memory())

    def _with(self, change: Callable[[Any], Any]) -> CaptionBatch:
        tensors = (self.inputs, self.targets, self.target_mask)
        # Some inputs are lists of tensors in a class with the same two methods.
        changed = recursively_apply(
            change, tensors, test_type=lambda value: hasattr(value, "pin_memory")
        )
        return CaptionBatch(self.rows, *changed)


@dataclass(frozen=True)
class Rollout:
    """Sampled captions, and greedy captions if a baseline needs them."""

    token_ids: Tensor
    """[B, K, L] sampled tokens, padded after EOS."""
    mask: Tensor
    """[B, K, L], True up to and including EOS: the tokens that were sampled and that
    the loss counts.
    """
    finished: Tensor
    """[B, K], True where the caption ended with EOS before the length limit."""
    texts: list[list[str]]
    """B lists of K captions."""
    greedy_texts: list[str] | None = None
    """B greedy captions; None where no baseline needs them."""
    greedy_finished: Tensor | None = None
    """[B], True where the greedy caption ended with EOS."""
    temperature: float = 1.0
    """Temperature of the softmax that the samples were drawn from; the loss computes
    log-probabilities at it, too.
    """


class Scores(NamedTuple):
    """Rewards of a rollout."""

    samples: Tensor
    """Rewards of the samples, [B, K] float32."""
    greedy: Tensor | None
    """Rewards of the greedy captions, [B] float32; None without greedy captions."""
    terms: dict[str, list[float]] = {}
    """Raw scores of each reward term for the B·K samples."""


@dataclass
class TrainState:
    """Progress of a run; saved with every checkpoint as JSON."""

    global_step: int = 0
    """Steps done: a step is one rollout in self-critical training, and one optimizer
    update elsewhere.
    """
    metric: str = ""
    """Which metric of validation chose the best model."""
    measured: str = ""
    """On which images, and how, ``metric`` was measured."""
    best_metric: float | None = None
    best_step: int | None = None
    best_model: str = ""
    """Hash of the files of ``export/best``; empty before there is one."""
    evaluations_without_gain: int = 0
    stopped: str | None = None
    """Why a validation ended the run early; None if it did not."""
    skipped: int = 0
    """Updates whose gradient overflowed fp16: they changed no weight."""
    processes: int = 1
    """Processes that trained together; the random states of dropout belong to them."""
    signature: str = ""
    """Everything that the numbers of the reward (or teacher) depend on; a resumed run
    must have the same.
    """
    vocabulary: str = ""
    """Hash of the model's tokens and their ids; empty where they are unknown."""
    data: dict[str, str] = field(default_factory=dict)
    """``data.fingerprint`` of the training and validation images."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration, without keys that do not change what is computed."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Values of the task that outlive a restart, such as the starting policy's caption statistics.
    """
