"""Averages over micro-batches and processes, kept as sums and counts: they do not depend on how work is split."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor


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
