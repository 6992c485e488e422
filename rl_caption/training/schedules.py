"""Learning-rate schedules as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

Schedule = Callable[[int], float]
"""Optimizer step (from 0) to a factor of the peak learning rate."""


def schedule_factor(
    step: int, kind: str, warmup_steps: int, max_steps: int, decay: float = 0.8, decay_every: int = 1000
) -> float:
    """Factor of the peak learning rate at ``step``, in [0, 1].

    Linear warm-up over ``warmup_steps``, then: ``constant``; ``linear`` or ``cosine`` to 0 at ``max_steps``; ``step``,
    times ``decay`` every ``decay_every`` steps; ``noam``, the inverse square root (Vaswani et al. 2017), 1 at the end
    of the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    if kind == "constant":
        return 1.0
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if kind == "step":
        return decay ** ((step - warmup_steps) // decay_every)
    if kind == "noam":
        return math.sqrt(max(warmup_steps, 1) / (step + 1))
    raise ValueError(f"schedule {kind!r} is not one of constant, linear, cosine, step, noam")


def make_schedule(kind: str, warmup_steps: int, max_steps: int, decay: float, decay_every: int) -> Schedule:
    """``schedule_factor`` with everything but the step filled in."""
    schedule_factor(0, kind, warmup_steps, max_steps, decay, decay_every)
    return partial(
        schedule_factor,
        kind=kind,
        warmup_steps=warmup_steps,
        max_steps=max_steps,
        decay=decay,
        decay_every=decay_every,
    )


def steps_between_decays(decay_every: int, decay_epochs: float | None, steps_per_epoch: int) -> int:
    """Optimizer steps between two decays of ``step``: ``decay_every``, or those of ``decay_epochs``, at least 1."""
    return decay_every if decay_epochs is None else max(round(decay_epochs * steps_per_epoch), 1)
