"""Peak memory of a self-critical step against other loops, what it is made of, and the largest step that fits a card.

    python -m benchmarks.memory [--precision no bf16] [--device cuda] [--tensors 12] [--json FILE]

On a CPU the bytes of all tensors are counted: every allocation and release that the profiler saw between the start and
the end of a step, added up in order, on top of the weights, Adam's moments and the inputs. The count depends on neither
the load of the machine nor its number of threads. What libraries allocate for themselves is not in it, and on a GPU
neither would be its context and what the caching allocator holds back. Attention is the fused one in bf16 too, as on a
GPU. On a GPU the count is ``torch.cuda.max_memory_allocated``.

The peak grows linearly with images and captions: three small sizes give bytes for a step, an image and a caption, which
must predict the step of ``--images``. No caption ends before the limit there, because what fits must fit then; the step
is compared at the usual lengths too. Baselines are those of ``benchmarks.scst_step``.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.harness import Measurement, Timing, add_timing, report, timing_of
from benchmarks.scst_step import Bench, Shapes, add_sizes, build_bench, generate_step, lengths_of, our_step, prefix_step
from rl_caption.types import CaptionBatch

Step = Callable[[Bench, CaptionBatch], None]
STEPS: dict[str, Step] = {"step": our_step, "generate twice": generate_step, "prefix with gradient": prefix_step}
SMALL = ((11, 4), (16, 4), (11, 8))
"""Images and captions of each: enough that log-probabilities are taken in parts, as in large steps."""
CARDS = (24, 80, 141)
"""Sizes of cards in GB."""
PRECISIONS = {"no": "float32", "bf16": "bf16"}
MIB = 2**20


@dataclass(frozen=True)
class Peak:
    """Most bytes that are held at one moment of a step."""

    held: int
    """Before and after it too: weights, moments and inputs."""
    step: int
    """By the step: activations, logits, gradients so far."""
    tensors: Counter[str]
    """Bytes of the latter by the operator that made them; empty on a GPU."""

    @property
    def total(self) -> int:
        return self.held + self.step


@dataclass(frozen=True)
class Growth:
    """Bytes of a step: ``fixed`` + ``image`` for each image + ``caption`` for each sampled caption."""

    fixed: float
    image: float
    caption: float

    def at(self, images: int, samples: int) -> float:
        """Bytes at B images with K samples each."""
        return self.fixed + images * (self.image + samples * self.caption)

    def largest(self, room: float, samples: int) -> int:
        """Images, with K samples each, that fit ``room`` bytes."""
        return max(int((room - self.fixed) / (self.image + samples * self.caption)), 0)


def count_peak(step: Step, bench: Bench, batch: CaptionBatch) -> Peak:
    """Run a step and count what it holds. Moments must be there: a step was run before."""
    if bench.accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(bench, batch)
        return Peak(before, torch.cuda.max_memory_allocated() - before, Counter())
    gc.collect()  # what is released in the step should have been made in it
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints a line at every start and end otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        step(bench, batch)
    found = allocations(profiler)
    live = np.cumsum([event.typed[1].alloc_size for event in found])
    if live[-1]:
        raise RuntimeError(f"the step ended with {live[-1]} bytes more than it began with: a tensor was kept")
    at = int(live.argmax())
    alive: dict[int, Any] = {}
    for event in found[: at + 1]:
        if event.typed[1].alloc_size > 0:
            alive[event.typed[1].ptr] = event
        else:
            alive.pop(event.typed[1].ptr, None)
    tensors: Counter[str] = Counter()
    for event in alive.values():
        tensors[made_by(event)] += event.typed[1].alloc_size
    return Peak(held_bytes(bench, batch), int(live[at]), tensors)


def allocations(profiler: profile) -> list[Any]:
    """What the CPU's allocator gave and got back (negative sizes), by time."""
    results: Any = profiler.profiler and profiler.profiler.kineto_results
    waiting: list[Any] = list(results.experimental_event_tree())
    found = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            found.append(event)
    return sorted(found, key=lambda event: event.start_time_ns)


def made_by(event: Any) -> str:
    """Operator of an allocation; in the backward pass the node, too."""
    names: list[str] = []
    while (event := event.parent) is not None:
        names.append(event.name)
    backward = [name.split()[-1] for name in names if name.endswith(("Backward", "Backward0"))]
    return " in ".join([*names[:1], *backward[-1:]]) or "Python"


def held_bytes(bench: Bench, batch: CaptionBatch) -> int:
    """Bytes of weights, moments and inputs."""
    moments = [value for state in bench.optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in [*bench.policy.parameters(), *moments, *batch.inputs.values()])


def fit(sizes: Sequence[tuple[int, int]], bytes_of: Sequence[int]) -> Growth:
    """The plane through the peaks of three sizes (images, samples)."""
    terms = [[1, images, images * samples] for images, samples in sizes]
    return Growth(*np.linalg.solve(np.asarray(terms, dtype=float), np.asarray(bytes_of, dtype=float)))


def prepared(shapes: Shapes, precision: str, device: str) -> Bench:
    """A model that has taken a step, so that its moments are there."""
    bench = build_bench(shapes, device, precision)
    torch.backends.cuda.enable_flash_sdp(True)
    our_step(bench, bench.part(1))
    return bench


def whole_peaks(bench: Bench) -> dict[str, Peak]:
    """Peak of every loop; that with the prefix has fewer images, and so has ``few``, the step beside it."""
    shapes = bench.shapes
    peaks = {}
    for name, step in tqdm(STEPS.items(), "memory", leave=False, disable=None):
        images = shapes.prefix_images if step is prefix_step else shapes.images
        peaks[name] = count_peak(step, bench, bench.part(images))
    peaks["few"] = count_peak(our_step, bench, bench.part(shapes.prefix_images))
    return peaks


def growth_of(step: Step, bench: Bench, small: Sequence[tuple[int, int]]) -> Growth:
    """Count small steps and fit the plane."""
    shapes, found = bench.shapes, []
    for images, samples in tqdm(small, "memory", leave=False, disable=None):
        bench.shapes = replace(shapes, samples=samples)
        found.append(count_peak(step, bench, bench.part(images)).total)
    bench.shapes = shapes
    return fit(small, found)


def measure(
    shapes: Shapes,
    timing: Timing,
    precisions: Sequence[str],
    small: Sequence[tuple[int, int]] = SMALL,
    tensors: int = 0,
) -> list[Measurement]:
    """Peaks against both loops, at the usual lengths and at the limit; the prediction; what fits."""
    rows: list[Measurement] = []
    images = max(shapes.images, *(images for images, _ in small))
    for precision in precisions:
        for length in sorted({min(shapes.length, shapes.tokens), float(shapes.tokens)}):
            bench = prepared(replace(shapes, images=images, length=length), precision, timing.device)
            bench.shapes = replace(shapes, length=length)
            peaks = whole_peaks(bench)
            kind = f"{PRECISIONS[precision]}, {lengths_of(bench, bench.part(shapes.images))}"
            rows += compared(peaks, shapes, kind)
            for name, size in peaks["step"].tensors.most_common(tensors):
                print(f"{size / MIB:8.1f} MiB at the peak of the step, {kind}: {name}")
        growths = {name: growth_of(STEPS[name], bench, small) for name in ("step", "generate twice")}
        rows += predicted(peaks, growths, shapes, PRECISIONS[precision])
        weights = sum(parameter.nbytes for parameter in bench.policy.parameters())
        rows += [fits(card, growths, shapes.samples, PRECISIONS[precision], weights) for card in CARDS]
    AcceleratorState._reset_state()  # what comes next may have another precision
    return rows


def compared(peaks: dict[str, Peak], shapes: Shapes, kind: str) -> list[Measurement]:
    """The step against both loops."""
    pairs = [
        (peaks["step"], "generate twice", shapes.images),
        (peaks["few"], "prefix with gradient", shapes.prefix_images),
    ]
    return [
        Measurement(
            f"step, {images} images: peak memory", name, peaks[name].total / ours.total, "x less",
            f"{ours.total / MIB:.0f} MiB against {peaks[name].total / MIB:.0f} MiB; weights, moments and inputs are "
            f"{ours.held / MIB:.0f} MiB of both; {kind}",
        )
        for ours, name, images in pairs
    ]  # fmt: skip


def predicted(peaks: dict[str, Peak], growths: dict[str, Growth], shapes: Shapes, precision: str) -> list[Measurement]:
    """Counted peak of the whole batch against what small ones predict."""
    return [
        Measurement(
            f"{name}, {shapes.images} images, {precision}: counted peak", "predicted from small steps",
            peaks[name].total / growth.at(shapes.images, shapes.samples), "x",
            f"{growth.fixed / MIB:.0f} MiB + {growth.image / MIB:.2f} MiB an image + {growth.caption / MIB:.2f} MiB a "
            "sampled caption",
        )
        for name, growth in growths.items()
    ]  # fmt: skip


def fits(card: int, growths: dict[str, Growth], samples: int, precision: str, gradients: int) -> Measurement:
    """The largest micro-batch; the gradients of the micro-batches before it count in full."""
    room = card * 10**9 - gradients
    ours, theirs = (growths[name].largest(room, samples) for name in ("step", "generate twice"))
    return Measurement(
        f"images x {samples} captions in {card} GB, {precision}, computed", "generate twice",
        ours / max(theirs, 1), "x as many", f"{ours:,} images against {theirs:,}",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None, shapes: Shapes | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    defaults = shapes or Shapes()
    add_sizes(parser, defaults)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="of autocast")
    parser.add_argument("--tensors", type=int, default=0, help="print so many operators that hold most at the peak")
    chosen = parser.parse_args(arguments)
    shapes = replace(defaults, images=chosen.images, prefix_images=chosen.prefix_images, samples=chosen.samples)
    rows = measure(shapes, timing_of(parser, chosen), chosen.precision, tensors=chosen.tensors)
    report([rows], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
