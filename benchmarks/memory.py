"""Peak memory of a self-critical step against both baselines of ``scst_step``.

    python -m benchmarks.memory [--precision no bf16] [--device cuda] [--json FILE]

On a CPU the bytes of all tensors are counted: the running sum of every allocation and
release that the profiler saw during a step, plus weights, Adam's moments and inputs.
The count depends neither on the load of the machine nor on its threads; it leaves out
what libraries allocate for themselves. Attention is the fused kernel in bf16 too, as on
a GPU. On a GPU it is ``torch.cuda.max_memory_allocated``.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Measurement, Timing, command
from benchmarks.scst_step import (
    SIZES,
    Bench,
    Shapes,
    build_bench,
    generate_step,
    lengths_of,
    our_step,
    prefix_step,
    shapes_of,
)
from rl_caption.runtime.types import CaptionBatch

Step = Callable[[Bench, CaptionBatch], object]
PRECISIONS = {"no": "float32", "bf16": "bf16"}
MIB = 2**20


@dataclass(frozen=True)
class Peak:
    """Largest number of bytes at one moment of a step."""

    held: int
    """Weights, moments and inputs."""
    step: int
    """Activations, logits, gradients so far."""

    @property
    def total(self) -> int:
        return self.held + self.step


def count_peak(step: Step, bench: Bench, batch: CaptionBatch) -> Peak:
    """Run a step and count its memory. Adam's moments must exist: a step was run before."""
    if bench.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(bench, batch)
        return Peak(before, torch.cuda.max_memory_allocated() - before)
    gc.collect()  # garbage of before would be counted as released by the step
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else it prints a line at every start and end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(bench, batch)
    found = allocations(profiler)
    live = np.cumsum([event.typed[1].alloc_size for event in found])
    if live[-1]:
        raise RuntimeError(
            f"the step ended with {live[-1]} bytes more than it began with: a tensor was kept"
        )
    return Peak(held_bytes(bench, batch), int(live.max()))


def allocations(profiler: profile) -> list[Any]:
    """Events of the CPU's allocator by time; sizes of releases are negative."""
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    waiting: list[Any] = list(results.experimental_event_tree())
    found = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            found.append(event)
    return sorted(found, key=lambda event: event.start_time_ns)


def held_bytes(bench: Bench, batch: CaptionBatch) -> int:
    """Bytes of weights, moments and inputs."""
    moments = [
        value for state in bench.optimizer.state.values() for value in state.values()
    ]
    return sum(
        tensor.nbytes
        for tensor in [*bench.policy.parameters(), *moments, *batch.inputs.values()]
    )


def prepared(shapes: Shapes, precision: str, device: str) -> Bench:
    """A model that has taken a step, so that Adam's moments exist."""
    bench = build_bench(shapes, device, precision)
    torch.backends.cuda.enable_flash_sdp(True)
    our_step(bench, bench.part(1))
    return bench


def measure(
    timing: Timing, precision: Sequence[str] = tuple(PRECISIONS), **sizes: Any
) -> Iterator[Measurement]:
    """Peaks against both baselines, at the usual lengths of captions and at the limit."""
    shapes = shapes_of(timing, **sizes)
    for name in precision[: 1 if timing.tiny else None]:
        for length in sorted({min(shapes.length, shapes.tokens), float(shapes.tokens)}):
            bench = prepared(replace(shapes, length=length), name, timing.device)
            few = bench.part(shapes.prefix_images)
            kind = f"{PRECISIONS[name]}, {lengths_of(bench, bench.batch)}"
            for batch, baseline, label in (
                (bench.batch, generate_step, "generate twice"),
                (few, prefix_step, "prefix with gradient"),
            ):
                ours, theirs = (
                    count_peak(step, bench, batch) for step in (our_step, baseline)
                )
                yield against(
                    ours, theirs, label, f"step, {len(batch.rows)} images", kind
                )
    AcceleratorState._reset_state()  # the next benchmark may have another precision


def against(
    ours: Peak, theirs: Peak, baseline: str, step: str, kind: str
) -> Measurement:
    """The step's peak against a baseline's."""
    detail = (
        f"{ours.total / MIB:.0f} MiB against {theirs.total / MIB:.0f} MiB; weights, "
        f"moments and inputs are {ours.held / MIB:.0f} MiB of both; {kind}"
    )
    return Measurement(
        f"{step}: peak memory", baseline, theirs.total / ours.total, "x less", detail
    )


if __name__ == "__main__":
    command(__doc__, measure, **{**SIZES, "precision": tuple(PRECISIONS)})
