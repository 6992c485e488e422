"""Peak memory of a self-critical step against both baselines of ``scst_step``, and the largest step that fits a card.

    python -m benchmarks.memory [--precision no bf16] [--device cuda] [--json FILE]

On a CPU the bytes of all tensors are counted: the running sum of every allocation and release that the profiler saw
during a step, plus weights, Adam's moments and inputs. The count depends neither on the load of the machine nor on its
threads; it leaves out what libraries allocate for themselves. Attention is the fused kernel in bf16 too, as on a GPU.
On a GPU it is ``torch.cuda.max_memory_allocated``.

The peak is linear in images and captions: three small sizes give bytes for a step, an image and a caption, which must
predict the step of ``--images``. No caption ends before the limit there, the worst case.
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
)
from rl_caption.runtime.types import CaptionBatch

Step = Callable[[Bench, CaptionBatch], object]
SMALL = ((11, 4), (16, 4), (11, 8))
"""Images and captions of each: enough that log-probabilities are taken in parts, as in large steps."""
CARDS = (24, 80, 141)
"""Sizes of cards in GB."""
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


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of a step: ``fixed`` + ``image`` for each image + ``caption`` for each sampled caption."""

    fixed: float
    image: float
    caption: float

    def __str__(self) -> str:
        mib = [f"{value / MIB:.4g} MiB" for value in (self.fixed, self.image, self.caption)]
        return f"{mib[0]} + {mib[1]} an image + {mib[2]} a sampled caption"

    def at(self, images: int, samples: int) -> float:
        """Bytes at B images with K samples each."""
        return self.fixed + images * (self.image + samples * self.caption)

    def largest(self, available: float, samples: int) -> int:
        """Images, with K samples each, that fit ``available`` bytes."""
        return max(int((available - self.fixed) / (self.image + samples * self.caption)), 0)


def count_peak(step: Step, bench: Bench, batch: CaptionBatch) -> Peak:
    """Run a step and count its memory. Adam's moments must exist: a step was run before."""
    if bench.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(bench, batch)
        return Peak(before, torch.cuda.max_memory_allocated() - before)
    gc.collect()  # garbage of before would be counted as released by the step
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints a line at every start and end
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
    moments = [value for state in bench.optimizer.state.values() for value in state.values()]
    return sum(
        tensor.nbytes for tensor in [*bench.policy.parameters(), *moments, *batch.inputs.values()]
    )


def fit(sizes: Sequence[tuple[int, int]], bytes_of: Sequence[int]) -> UnitBytes:
    """The plane through the peaks of three sizes (images, samples)."""
    terms = [[1, images, images * samples] for images, samples in sizes]
    return UnitBytes(
        *np.linalg.solve(np.asarray(terms, dtype=float), np.asarray(bytes_of, dtype=float))
    )


def prepared(shapes: Shapes, precision: str, device: str) -> Bench:
    """A model that has taken a step, so that Adam's moments exist."""
    bench = build_bench(shapes, device, precision)
    torch.backends.cuda.enable_flash_sdp(True)
    our_step(bench, bench.part(1))
    return bench


def per_unit_bytes(step: Step, bench: Bench, small: Sequence[tuple[int, int]]) -> UnitBytes:
    """Count small steps of (images, samples) and fit the plane."""
    shapes, found = bench.shapes, []
    for images, samples in small:
        bench.shapes = replace(shapes, samples=samples)
        found.append(count_peak(step, bench, bench.part(images)).total)
    bench.shapes = shapes
    return fit(small, found)


def measure(
    timing: Timing,
    shapes: Shapes | None = None,
    precision: Sequence[str] = tuple(PRECISIONS),
    small: Sequence[tuple[int, int]] = SMALL,
    **sizes: Any,
) -> Iterator[Measurement]:
    """Peaks against both baselines, at the usual lengths and at the limit; the prediction; what fits."""
    shapes = replace(shapes or Shapes(), **sizes)
    images = max(shapes.images, *(images for images, _ in small))
    for name in precision:
        for length in sorted({min(shapes.length, shapes.tokens), float(shapes.tokens)}):
            bench = prepared(replace(shapes, images=images, length=length), name, timing.device)
            bench.shapes = replace(shapes, length=length)
            full, few = bench.part(shapes.images), bench.part(shapes.prefix_images)
            kind = f"{PRECISIONS[name]}, {lengths_of(bench, full)}"
            ours, theirs = (count_peak(step, bench, full) for step in (our_step, generate_step))
            yield against(ours, theirs, "generate twice", f"step, {shapes.images} images", kind)
            pair = (count_peak(step, bench, few) for step in (our_step, prefix_step))
            yield against(
                *pair, "prefix with gradient", f"step, {shapes.prefix_images} images", kind
            )
        steps: dict[str, Step] = {"step": our_step, "generate twice": generate_step}
        models = {loop: per_unit_bytes(step, bench, small) for loop, step in steps.items()}
        for (loop, model), peak in zip(models.items(), (ours, theirs), strict=True):
            what = f"{loop}, {shapes.images} images, {PRECISIONS[name]}: counted peak"
            ratio = peak.total / model.at(shapes.images, shapes.samples)
            yield Measurement(what, "predicted from small steps", ratio, "x", str(model))
        weights = sum(parameter.nbytes for parameter in bench.policy.parameters())
        yield from (fits(card, models, shapes.samples, PRECISIONS[name], weights) for card in CARDS)
    AcceleratorState._reset_state()  # the next benchmark may have another precision


def against(ours: Peak, theirs: Peak, baseline: str, step: str, kind: str) -> Measurement:
    """The step's peak against a baseline's."""
    detail = (
        f"{ours.total / MIB:.0f} MiB against {theirs.total / MIB:.0f} MiB; weights, moments and inputs are "
        f"{ours.held / MIB:.0f} MiB of both; {kind}"
    )
    return Measurement(
        f"{step}: peak memory", baseline, theirs.total / ours.total, "x less", detail
    )


def fits(
    card: int, models: dict[str, UnitBytes], samples: int, precision: str, gradients: int
) -> Measurement:
    """The largest micro-batch, with the gradients that earlier micro-batches have left."""
    available = card * 10**9 - gradients
    ours, theirs = (models[name].largest(available, samples) for name in ("step", "generate twice"))
    name = f"images x {samples} captions in {card} GB, {precision}, computed"
    detail = f"{ours:,} images against {theirs:,}"
    return Measurement(name, "generate twice", ours / max(theirs, 1), "x as many", detail)


if __name__ == "__main__":
    command(__doc__, measure, **{**SIZES, "precision": tuple(PRECISIONS)})
