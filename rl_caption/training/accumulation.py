"""One optimizer step over several micro-batches and processes: gradients, counts, and averages for the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rl_caption.training.distributed.engines import backward, no_sync


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


class Averages:
    """Named averages of one step. Names are the log keys of docs/metrics.md; every process must add the same ones."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, values: Tensor | Iterable[float] | float) -> None:
        """Count every element of ``values`` once."""
        tensor = values.detach() if isinstance(values, Tensor) else torch.tensor(_flat(values), dtype=torch.float64)
        self.add_sum(name, tensor.double().sum().item(), tensor.numel())

    def add_sum(self, name: str, total: float, count: float) -> None:
        """Add ``count`` values whose sum is ``total``."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Averages over all processes. Called by every process."""
        names = sorted(self.sums)
        table = torch.tensor([[self.sums[name], self.counts[name]] for name in names], dtype=torch.float64)
        if accelerator.num_processes > 1:
            dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
            table = accelerator.reduce(table.to(accelerator.device, dtype), reduction="sum").cpu().double()
        return {name: total / count for name, (total, count) in zip(names, table.tolist(), strict=True) if count > 0}


def _flat(values: Iterable[float] | float) -> list[float]:
    if isinstance(values, bool | int | float):
        return [float(values)]
    return [float(value) for value in values]
