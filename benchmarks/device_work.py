"""What a call would ask of a GPU, counted on a CPU: kernels, times the host waits for the device, bytes moved.

One kernel for each operator of PyTorch that makes or changes a tensor; views are free. Several operators start more
than one kernel on a GPU. A wait is a value, a shape or a copy that the host needs from a tensor on the device (one that
depends on tensors that are said to lie there), or a tensor that is made from Python numbers there, which waits too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten._unsafe_view, aten.lift_fresh}
"""Operators that start nothing, beside views."""
PART_READ = {aten.embedding, aten.index_select, aten.index, aten.gather}
"""Operators that read as much of their first tensor as they return."""
PART_WRITTEN = {
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten.index_copy_,
    aten.index_add_,
    aten.scatter_,
}
"""Operators that write as much of their first tensor as their last one has."""
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.unique_dim, aten.unique_consecutive,
    aten.masked_select, aten.equal,
}  # fmt: skip
"""Operators whose value or shape the host needs."""
TO_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


@dataclass
class Work:
    """Counts of one call."""

    kernels: int = 0
    waits: int = 0
    moved: int = 0
    """Bytes that kernels read and write."""
    operators: Counter[str] = field(default_factory=Counter)
    """Kernels by operator."""
    waited: Counter[str] = field(default_factory=Counter)


class _Operators(TorchDispatchMode):
    """Counts operators, and remembers which tensors would lie on the device."""

    def __init__(self, on_device: Sequence[Tensor]) -> None:
        super().__init__()
        self.work = Work()
        self.known: dict[int, StorageWeakRef] = {}
        self.remember(on_device)

    def remember(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            self.known[reference.cdata] = reference  # a held reference keeps its number from being given out again

    def is_on_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.known

    def wait(self, name: str) -> None:
        self.work.waits += 1
        self.work.waited[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        packet = func.overloadpacket
        if any(map(self.is_on_device, given)):
            self.remember(made)
            if packet in WAITING or (packet in PART_READ | PART_WRITTEN and _by_mask(args)):
                self.wait(str(packet))
        if not func.is_view and packet not in FREE and (made or packet in WAITING):
            self.work.kernels += 1
            self.work.operators[str(packet)] += 1
            self.work.moved += _moved(func, args, given, made)
        return result


class _Copies(TorchFunctionMode):
    """Tells of tensors that go to the host, and of Python numbers that go to the device."""

    def __init__(self, operators: _Operators) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TO_HOST and self.operators.is_on_device(args[0]):
            self.operators.wait(func.__name__)
        result = func(*args, **kwargs)
        if func is torch.tensor and kwargs.get("device") is not None and result.numel():
            self.operators.wait("torch.tensor")
        return result


def _by_mask(args: Sequence[Any]) -> bool:
    """Whether an index is a mask: where its entries are True has to be found first."""
    return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in tree_leaves(args[1:2]))


def _moved(func: Any, args: Sequence[Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Bytes that an operator reads and writes."""
    packet = func.overloadpacket
    written = [args[index] for index, each in enumerate(func._schema.arguments) if each.is_write and index < len(args)]
    fresh = sum(_bytes(tensor) for tensor in made if not any(tensor is other for other in written))
    if packet in PART_READ:
        return 2 * fresh
    if packet in PART_WRITTEN:
        return 2 * _bytes(given[-1])
    only_written = packet in (aten.copy_, aten.fill_, aten.zero_)
    read = sum(_bytes(tensor) for tensor in given if not (only_written and any(tensor is other for other in written)))
    return read + fresh + sum(map(_bytes, filter(torch.is_tensor, written)))


def _bytes(tensor: Tensor) -> int:
    """Of the numbers that differ: what ``expand`` repeats is read once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


@contextlib.contextmanager
def counting(on_device: Sequence[Tensor]) -> Iterator[Work]:
    """Count what happens inside; ``on_device`` are the tensors that would lie on a GPU before."""
    operators = _Operators(on_device)
    with operators, _Copies(operators):
        yield operators.work
