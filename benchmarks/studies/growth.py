"""What a step costs as each size grows, against the smallest size of the same run.

    python -m benchmarks.studies.growth [--only samples images length limit] [--json FILE]

The captioner has half the layers, width, words and features of that in ``benchmarks.scst_step``, so that the shares of
its parts stay the same. All sizes of a curve are timed in turn within a round. ``CURVES`` says what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import Bench, Shapes, build_bench, our_step

HALF = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "ffn_dim": 1024}
SHAPES = Shapes(captioner=HALF, words=5000, region_dim=1024, images=10)
Calls = dict[int, Callable[[], object]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of every curve, smallest first."""

    samples: Sequence[int] = (1, 2, 3, 5, 7, 10)
    images: Sequence[int] = (5, 10, 20, 40)
    length: Sequence[int] = (10, 20, 30, 40)
    limit: Sequence[int] = (16, 20, 24, 28)
    shapes: Shapes = field(default_factory=lambda: SHAPES)


def step(bench: Bench, **sizes: int) -> None:
    """A step with other sizes."""
    bench.shapes = replace(bench.shapes, **sizes)
    our_step(bench, bench.batch)


def by_samples(sizes: Sizes, device: str) -> Calls:
    """Steps with K samples."""
    bench = build_bench(sizes.shapes, device, "no")
    return {samples: partial(step, bench, samples=samples) for samples in sizes.samples}


def by_images(sizes: Sizes, device: str) -> Calls:
    """Steps with so many images."""
    bench = build_bench(replace(sizes.shapes, images=max(sizes.images)), device, "no")
    return {images: partial(our_step, bench, bench.part(images)) for images in sizes.images}


def by_length(sizes: Sizes, device: str) -> Calls:
    """Steps whose captions are all as long as the limit."""
    longest = max(sizes.length)
    bench = build_bench(replace(sizes.shapes, tokens=longest, length=float(longest)), device, "no")
    return {tokens: partial(step, bench, tokens=tokens) for tokens in sizes.length}


def by_limit(sizes: Sizes, device: str) -> Calls:
    """Steps whose captions end where people's do, below the limit."""
    bench = build_bench(replace(sizes.shapes, tokens=max(sizes.limit)), device, "no")
    return {tokens: partial(step, bench, tokens=tokens) for tokens in sizes.limit}


CURVES: dict[str, tuple[str, str, Callable[[Sizes, str], Calls]]] = {
    "samples": ("Step, samples an image", "less than linear: one encoding and one greedy caption an image", by_samples),
    "images": ("Step, images", "a little less than linear: the update costs the same for any batch", by_images),
    "length": ("Step, tokens of every caption", "about linear: self-attention of captions is small", by_length),
    "limit": ("Step, limit of tokens (captions of 11)", "constant: ended captions leave the batch", by_limit),
}
"""Name -> title, expectation, and a function that makes a call for each size."""


def measure(timing: Timing, only: Sequence[str] = tuple(CURVES), sizes: Sizes | None = None) -> Iterator[Measurement]:
    """One row for each size but the smallest."""
    for title, expected, calls in map(CURVES.__getitem__, only):
        by_size = calls(sizes or Sizes(), timing.device)
        times = timed({f"{size:,}": call for size, call in by_size.items()}, timing, title)
        first, *others = times
        for size in others:
            row = compared(times, size, first, "x the time", f"; expected: {expected}")
            yield replace(row, name=f"{title}: {size}")


if __name__ == "__main__":
    command(__doc__, measure, only=tuple(CURVES))
