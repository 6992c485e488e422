"""What a step asks of a GPU, counted without one: kernels to start, times the host waits for the device, bytes moved.

    python -m benchmarks.launches [--precision bf16] [--images 50] [--json FILE]

A GPU is slowed down less by arithmetic than by what is counted here: small kernels cost some microseconds each to
start, a value that the host looks at empties the queue, and decoding is bound by the bytes that its kernels read and
write. The counts are those of operators of PyTorch on a CPU: one kernel for each operator that makes or changes a
tensor, views free, attention fused. Several operators start more than one kernel on a GPU, and the optimizer's update
is left out, which is the same for every loop. The loops are those of ``benchmarks.scst_step``.

A wait is a value, a shape or a copy that the host needs from a tensor on the device (one that depends on weights or
inputs), or a tensor that is made from Python numbers on the device, which waits too.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import Measurement, report
from benchmarks.scst_step import Bench, Shapes, add_sizes, build_bench, generate_step, our_step, prefix_step
from rl_caption.rollout import sample_captions
from rl_caption.types import CaptionBatch

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


def count(step: Callable[[Bench, CaptionBatch], object], bench: Bench, batch: CaptionBatch, *known: Tensor) -> Work:
    """Work of a step; ``known`` lie on the device too."""
    with counting([*bench.policy.parameters(), *batch.inputs.values(), *known]) as work:
        step(bench, batch)
    return work


def least_bytes(bench: Bench, batch: CaptionBatch, tokens: int) -> int:
    """What decoding cannot but read: each token the decoder's weights once, and keys and values once.

    Every caption is taken to be ``tokens`` long; no two begin alike. The images' states are given.
    """
    config, autocast = bench.policy.config, bench.accelerator.mixed_precision != "no"
    size = 2 if autocast else 4
    encoder = sum(parameter.numel() for parameter in bench.policy.encoder.parameters())
    weights = sum(parameter.numel() for parameter in bench.policy.parameters()) - encoder
    regions = batch.inputs["region_features"].shape[:2].numel()
    captions = len(batch.rows) * bench.decoding.captions_per_image
    states = tokens * regions + captions * tokens * (tokens + 1) // 2  # looked at, image and captions
    return size * (tokens * weights + states * 2 * config.d_model * config.decoder_layers)


def measure(shapes: Shapes, precision: str) -> list[Measurement]:
    """Counts of the three steps, and of decoding alone."""
    bench = build_bench(shapes, "cpu", precision)
    torch.backends.cuda.enable_flash_sdp(True)  # as on a GPU
    bench.updates = False
    whole, few = bench.part(shapes.images), bench.part(shapes.prefix_images)
    at, at_few = f"{shapes.images} images", f"{shapes.prefix_images} images"
    drawn = sample_captions(bench.captioner, bench.policy, whole, bench.decoding, 0, 0)
    tokens = torch.cat([drawn.token_ids, drawn.greedy_token_ids.unsqueeze(1)], 1)  # type: ignore[union-attr]
    replayed = partial(our_step, generate=lambda *_: tokens)  # one launch, which is not counted
    generate, prefix = count(generate_step, bench, whole), count(prefix_step, bench, few)
    return [
        *against(f"step, {at}", count(our_step, bench, whole), f"generate twice, {at}", generate),
        *against(
            f"step beside a replayed decode, {at}",
            count(replayed, bench, whole, tokens),
            f"generate twice, {at}",
            generate,
        )[:2],
        *against(f"step, {at_few}", count(our_step, bench, few), f"prefix with gradient, {at_few}", prefix),
        *decoding_rows(bench),
    ]


def decoding_rows(bench: Bench) -> list[Measurement]:
    """Kernels, waits and bytes of decoding, as a tree and at fixed shapes."""
    shapes, batch = bench.shapes, bench.batch
    rows, noise = [], torch.rand(shapes.images, shapes.samples, shapes.tokens)
    for name, decoding in (("", bench.decoding), (" at fixed shapes", replace(bench.decoding, fixed_shapes=True))):
        on_device = [*bench.policy.parameters(), *batch.inputs.values(), noise]
        with torch.no_grad(), bench.accelerator.autocast(), counting(on_device) as work:
            tokens = bench.captioner.generate(bench.policy, batch.inputs, decoding, noise).shape[-1]
        least = least_bytes(bench, batch, tokens)
        detail = (
            f"{work.moved / 1e6:,.0f} MB against {least / 1e6:,.0f} MB in {tokens} tokens; "
            f"{work.kernels / tokens:.0f} kernels and {work.waits / tokens:.1f} waits a token"
        )
        what = f"decode{name}, {shapes.images} images: bytes moved"
        rows.append(Measurement(what, "reading weights, keys and values once a token", work.moved / least, "x", detail))
    return rows


def against(name: str, ours: Work, baseline: str, theirs: Work) -> list[Measurement]:
    """Three rows: what each of two loops asks for."""
    counts = {
        "kernels": (ours.kernels, theirs.kernels, ""),
        "waits for the device": (ours.waits, theirs.waits, ""),
        "bytes moved": (ours.moved / 1e6, theirs.moved / 1e6, " MB"),
    }
    return [
        Measurement(
            f"{name}: {what}", baseline, before / max(after, 1), "x fewer", f"{after:,.0f} against {before:,.0f}{unit}"
        )
        for what, (after, before, unit) in counts.items()
    ]


def main(arguments: Sequence[str] | None = None, shapes: Shapes | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = shapes or Shapes()
    add_sizes(parser, defaults)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no", help="of autocast")
    parser.add_argument("--json", type=Path, help="file for the rows, a list of objects")
    chosen = parser.parse_args(arguments)
    names = ("images", "prefix_images", "samples")
    shapes = replace(defaults, **{name: getattr(chosen, name) for name in names})
    report([measure(shapes, chosen.precision)], chosen.json, "cpu")


if __name__ == "__main__":
    main()
