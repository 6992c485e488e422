"""One optimizer step over several micro-batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rl_caption.engines import backward, no_sync


def global_count(accelerator: Accelerator, local_count: Tensor) -> Tensor:
    """Sum of a count over all processes, at least 1; a scalar."""
    count = local_count.to(accelerator.device, torch.float32)
    return accelerator.reduce(count, reduction="sum").clamp(min=1)


def backward_all(accelerator: Accelerator, model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> float:
    """Forward and backward of each loss in turn; gradients are exchanged between processes once, in the last.

    Every loss is this process's share of the mean over the global batch (a local sum over a global count), so the
    shares add up to the loss, and the gradient does not depend on how the batch was split.

    Returns:
        The sum of this process's shares.
    """
    total = 0.0
    for index, loss_of in enumerate(losses):
        last = index == len(losses) - 1
        with nullcontext() if last else no_sync(accelerator, model):
            share = loss_of()
            backward(accelerator, model, share, last)
        total += share.item()
    return total


@contextmanager
def dropout_off(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Put ``model`` into eval mode and back, so that what is sampled is what is scored."""
    was_training = model.training
    if enabled:
        model.eval()
    try:
        yield
    finally:
        model.train(was_training)
