"""What a step costs as each size grows, against the smallest size of the same run.

    python -m benchmarks.studies.growth [--only samples images length limit] [--json FILE]

The captioner has half the layers, width, words and features of that in ``benchmarks.scst_step``, so that its parts take
the same fractions of a step. All sizes of a curve are timed in turn within a round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import Bench, Shapes, build_bench, our_step

HALF = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "ffn_dim": 1024}
SHAPES = Shapes(captioner=HALF, words=5000, region_dim=1024, images=10)


class Curve(NamedTuple):
    """Sizes of one field of ``Shapes``, smallest first, and how the cost of a step should grow with them."""

    title: str
    field: str
    sizes: Sequence[int]
    expected: str


LESS = "less than linear: one encoding and one greedy caption an image"
CURVES = {
    "samples": Curve("samples an image", "samples", (1, 2, 3, 5, 7, 10), LESS),
    "images": Curve(
        "images", "images", (5, 10, 20, 40), "a little less than linear: one update for any batch"
    ),
    "length": Curve("tokens of every caption", "tokens", (10, 20, 30, 40), "about linear"),
    "limit": Curve(
        "limit of tokens (captions of 11)",
        "tokens",
        (16, 20, 24, 28),
        "constant: ended captions leave",
    ),
}


def step(bench: Bench, field: str, size: int) -> None:
    """A step with another size."""
    bench.shapes = replace(bench.shapes, **{field: size})
    our_step(bench, bench.part(bench.shapes.images))


def measure(
    timing: Timing,
    only: Sequence[str] = tuple(CURVES),
    shapes: Shapes = SHAPES,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> Iterator[Measurement]:
    """One row for each size but the smallest; ``sizes`` replace those of ``CURVES``."""
    for name in only:
        title, field, usual, expected = CURVES[name]
        own = (sizes or {}).get(name, usual)
        largest = replace(shapes, **{field: max(own)})
        if name == "length":  # every caption is as long as the limit
            largest = replace(largest, length=float(max(own)))
        bench = build_bench(largest, timing.device, "no")
        times = timed(
            {f"{size:,}": partial(step, bench, field, size) for size in own}, timing, title
        )
        first, *others = times
        for size in others:
            row = compared(times, size, first, "x the time", f"; expected: {expected}")
            yield replace(row, name=f"Step, {title}: {size}")


if __name__ == "__main__":
    command(__doc__, measure, only=tuple(CURVES))
