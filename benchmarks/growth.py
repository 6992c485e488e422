"""What a step, the reward and its start-up cost as each size grows, against the smallest size of the same run.

    python -m benchmarks.growth [--only samples references ...] [--svg FILE] [--json FILE]

The captioner has half the layers and half the width, words and features of that in ``benchmarks.scst_step``, so that
its parts keep their shares; the rest is as there. All sizes of a curve are timed in turn within a round. What should be
seen is said for each curve in ``CURVES``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path

import numpy as np

from benchmarks.harness import Measurement, Timing, add_timing, paired, report, timed, timing_of
from benchmarks.scst_step import Bench, Shapes, build_bench, our_step
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import _scan, tokenize
from rl_caption.report.charts import HEIGHT, WIDTH, Series, line_chart

TIMES = 20
"""Rewards of a step that are timed together: one is too short."""
HALF = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "ffn_dim": 1024}
SHAPES = Shapes(captioner=HALF, words=5000, region_dim=1024, images=10)


@dataclass(frozen=True)
class Sizes:
    """The sizes of every curve, smallest first."""

    samples: Sequence[int] = (1, 2, 3, 5, 7, 10)
    images: Sequence[int] = (5, 10, 20, 40)
    length: Sequence[int] = (10, 20, 30, 40)
    limit: Sequence[int] = (16, 20, 24, 28)
    references: Sequence[int] = (1, 2, 5, 10, 20)
    dataset: Sequence[int] = (1000, 2000, 4000, 8000, 16_000)
    shapes: Shapes = field(default_factory=lambda: SHAPES)


@dataclass(frozen=True)
class Curve:
    """One cost against one size."""

    title: str
    expected: str
    variants: Callable[[Sizes, str], dict[int, Callable[[], object]]]


def bench_of(shapes: Shapes, device: str) -> Bench:
    """Captions stop by length alone, so that other sizes leave their lengths as they are."""
    return build_bench(shapes, device, "no")


def by_samples(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Steps with K samples."""
    bench = bench_of(sizes.shapes, device)

    def step(samples: int) -> None:
        bench.shapes = replace(sizes.shapes, samples=samples)
        our_step(bench, bench.batch)

    return {samples: partial(step, samples) for samples in sizes.samples}


def by_images(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Steps with so many images."""
    bench = bench_of(replace(sizes.shapes, images=max(sizes.images)), device)
    return {images: partial(our_step, bench, bench.part(images)) for images in sizes.images}


def by_length(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Steps whose captions are all as long as the limit."""
    bench = bench_of(replace(sizes.shapes, tokens=max(sizes.length), length=float(max(sizes.length))), device)
    return {tokens: partial(limited_step, bench, tokens) for tokens in sizes.length}


def by_limit(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Steps whose captions end where people's do, below the limit."""
    bench = bench_of(replace(sizes.shapes, tokens=max(sizes.limit)), device)
    return {tokens: partial(limited_step, bench, tokens) for tokens in sizes.limit}


def limited_step(bench: Bench, tokens: int) -> None:
    """A step with another limit."""
    bench.shapes = replace(bench.shapes, tokens=tokens)
    our_step(bench, bench.batch)


def random_captions(images: int, each: int, words: int = 5000) -> list[list[str]]:
    """Captions of 8 to 12 words, frequent ones more often."""
    draw = np.random.default_rng(0)
    numbers = np.minimum(draw.zipf(1.3, images * each * 12), words - 1).reshape(images, each, 12)
    lengths = draw.integers(8, 13, (images, each))
    return [
        [" ".join(f"word{n}" for n in row[:length]) for row, length in zip(rows, ends, strict=True)]
        for rows, ends in zip(numbers, lengths.tolist(), strict=True)
    ]


def scoring(captions: Sequence[Sequence[str]], corpus: Sequence[Sequence[str]], shapes: Shapes) -> Callable[[], object]:
    """CIDEr-D of a step's samples, ``TIMES`` times, with references that were scored before, as in training."""
    reward = CiderD(DocumentFrequencies.from_references(tokenised(corpus), eos=True))
    references = [own for own in captions for _ in range(shapes.samples)]
    samples = [captions[(row + 1) % len(captions)][0] for row in range(len(captions)) for _ in range(shapes.samples)]

    def score() -> None:
        for _ in range(TIMES):
            reward(None, samples, references=references)

    return score


def tokenised(corpus: Sequence[Sequence[str]]) -> list[list[list[str]]]:
    """Tokens of every caption."""
    return [[tokenize(caption) for caption in captions] for captions in corpus]


def by_references(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Rewards with so many references an image."""
    captions = random_captions(50, max(sizes.references))
    return {count: scoring([own[:count] for own in captions], captions, sizes.shapes) for count in sizes.references}


def by_dataset(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Rewards with document frequencies of so many images."""
    corpus = random_captions(max(sizes.dataset), 5)
    return {images: scoring(corpus[:50], corpus[:images], sizes.shapes) for images in sizes.dataset}


def start_up(sizes: Sizes, device: str) -> dict[int, Callable[[], object]]:
    """Counting document frequencies of so many images, their captions tokenised."""
    corpus = random_captions(max(sizes.dataset), 5)

    def count(images: int) -> object:
        _scan.cache_clear()  # a program that starts has tokenised nothing
        return DocumentFrequencies.from_references(tokenised(corpus[:images]), eos=True)

    return {images: partial(count, images) for images in sizes.dataset}


CURVES: dict[str, Curve] = {
    "samples": Curve(
        "Step, samples an image (K)", "less than linear: one encoding and one greedy caption an image",
        by_samples,
    ),
    "images": Curve(
        "Step, images", "a little less than linear: the update costs the same whatever the batch",
        by_images,
    ),
    "length": Curve(
        "Step, tokens of every caption", "about linear: attention among a caption's tokens is small",
        by_length,
    ),
    "limit": Curve(
        "Step, limit of tokens (captions of 11)", "flat: captions that have ended leave the batch",
        by_limit,
    ),
    "references": Curve(
        f"CIDEr-D of {TIMES} x 250 captions, references", "less than linear: references are looked up once",
        by_references,
    ),
    "dataset": Curve(
        f"CIDEr-D of {TIMES} x 250 captions, training images",
        "flat, or with the logarithm: frequencies are looked up",
        by_dataset,
    ),
    "start_up": Curve(
        "Document frequencies, training images", "linear: every caption is read once", start_up,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """A curve that was measured: for each size the ratios to the smallest one, round by round."""

    curve: Curve
    ratios: dict[int, list[float]]
    seconds: dict[int, float]

    @property
    def middle(self) -> dict[int, float]:
        """Medians of the rounds."""
        return {size: statistics.median(values) for size, values in self.ratios.items()}


def see(curve: Curve, sizes: Sizes, timing: Timing) -> Seen:
    """Time all sizes of a curve in turn."""
    variants = curve.variants(sizes, timing.device)
    times = timed({str(size): call for size, call in variants.items()}, timing, curve.title)
    first = str(min(variants))
    ratios = {size: paired(times[str(size)], times[first]) for size in variants}
    return Seen(curve, ratios, {size: statistics.median(times[str(size)]) for size in variants})


def rows_of(seen: Seen) -> list[Measurement]:
    """One row for each size but the smallest."""
    first, *others = seen.ratios
    rows = []
    for size in others:
        values = seen.ratios[size]
        detail = f"{seen.seconds[size]:.3g} s; rounds {min(values):.2f} to {max(values):.2f}; size x {size / first:.3g}"
        if size == others[-1]:
            detail += f"; expected: {seen.curve.expected}"
        name = f"{seen.curve.title}: {size:,}"
        rows.append(Measurement(name, f"{first:,}", seen.middle[size], "x the time", detail))
    return rows


def measure(sizes: Sizes, names: Sequence[str], timing: Timing, svg: Path | None = None) -> list[Measurement]:
    """All curves that were asked for, in one drawing where a file is named."""
    seen = [see(CURVES[name], sizes, timing) for name in names]
    if svg:
        svg.write_text(drawing(seen))
    return [row for one in seen for row in rows_of(one)]


STYLE = """
svg { --paper: #fff; --ink: #16181d; --pale: #5a6069; --line: #dfe2e7; --c0: #0068a8; --c6: #30343c; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14161a; --ink: #eceef1; --pale: #a2a9b4; --line: #343941; --c0: #5db8f2; --c6: #e4e6ea; }
}
text { font: 10.5px system-ui, sans-serif; fill: var(--pale); }
.title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.paper { fill: var(--paper); }
.grid { stroke: var(--line); fill: none; }
.axis { stroke: var(--pale); fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.line.c0 { stroke: var(--c0); } .line.c6 { stroke: var(--c6); stroke-width: 1.2; stroke-dasharray: 2 4; }
.dot { fill: var(--c0); stroke: var(--c0); }
"""
COLUMNS, HEADING, MARGIN = 2, 26, 14


def drawing(seen: Sequence[Seen]) -> str:
    """Every curve as a panel of one SVG; light or dark as the reader's pages are."""
    cell_width, cell_height = WIDTH + 2 * MARGIN, HEIGHT + HEADING + MARGIN
    rows = -(-len(seen) // COLUMNS)
    width, height = COLUMNS * cell_width, rows * cell_height + HEADING
    parts = [panel(one, (n % COLUMNS) * cell_width, (n // COLUMNS) * cell_height) for n, one in enumerate(seen)]
    key = "Time against that of the smallest size: median and range of the rounds. Dotted: in proportion."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(key)}"><style>{STYLE}</style><rect class="paper" width="100%" height="100%"/>'
        f'{"".join(parts)}<text x="{MARGIN}" y="{height - 10}">{escape(key)}</text></svg>\n'
    )


def panel(one: Seen, left: int, top: int) -> str:
    """One curve with its title."""
    first = min(one.ratios)
    reach = [max(abs(value - one.middle[size]) for value in values) for size, values in one.ratios.items()]
    line = Series("measured", list(one.middle.items()), 0, marks=True, errors=reach)
    plain = Series("in proportion", [(size, size / first) for size in one.ratios], 6)
    chart = str(line_chart([plain, line], one.curve.title, x_name="size"))
    placed = chart.replace(
        "<svg ", f'<svg x="{left + MARGIN}" y="{top + HEADING}" width="{WIDTH}" height="{HEIGHT}" ', 1
    )
    return f'<text class="title" x="{left + MARGIN}" y="{top + HEADING - 7}">{escape(one.curve.title)}</text>{placed}'


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    parser.add_argument("--only", nargs="+", choices=CURVES, default=list(CURVES), help="all by default")
    parser.add_argument("--svg", type=Path, help="file for a drawing of the curves")
    chosen = parser.parse_args(arguments)
    timing = timing_of(parser, chosen)
    if chosen.svg and not chosen.svg.parent.is_dir():
        parser.error(f"--svg: there is no folder {str(chosen.svg.parent)!r}")
    report([measure(Sizes(), chosen.only, timing, chosen.svg)], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
