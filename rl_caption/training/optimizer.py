"""The learning rate's schedule, and the optimizer's groups of parameters."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def schedule_factor(
    step: int,
    schedule: str,
    warmup_steps: int,
    max_steps: int,
    decay: float = 0.8,
    decay_every: int = 1000,
) -> float:
    """Factor of the peak learning rate at optimizer step ``step`` (from 0), in [0, 1].

    Linear warm-up over ``warmup_steps``, then: ``constant``; ``linear`` or ``cosine`` to 0 at
    ``max_steps``; ``step``, times ``decay`` every ``decay_every`` steps; ``noam``, the inverse
    square root (Vaswani et al. 2017), 1 at the end of the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    factors = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "step": decay ** ((step - warmup_steps) // decay_every),
        "noam": math.sqrt(max(warmup_steps, 1) / (step + 1)),
    }
    return factors[schedule]


def parameter_groups(
    model: nn.Module, weight_decay: float, decays: Callable[[str, Tensor], bool] | None
) -> list[dict[str, Any]]:
    """Optimizer groups of (name, parameter), with and without weight decay, none of them
    empty. ``decays`` tells by name and parameter whether it has decay; None: all have.
    """
    groups: dict[float, list[tuple[str, Tensor]]] = {}
    for name, value in model.named_parameters():
        if value.requires_grad:
            decay = weight_decay if decays is None or decays(name, value) else 0.0
            groups.setdefault(decay, []).append((name, value))
    return [{"params": group, "weight_decay": decay} for decay, group in groups.items()]
