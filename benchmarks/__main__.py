"""Every benchmark of speed and memory in one table.

    python -m benchmarks [--only NAME ...] [--device cuda] [--json FILE]

Each row is a ratio against a baseline of the same run. ``--json`` writes a list of objects: name, baseline, ratio,
unit, detail.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.harness import Measurement, Timing, add_timing, report, timing_of


def step(timing: Timing) -> list[Measurement]:
    """A self-critical step against two other loops."""
    from benchmarks import scst_step

    return scst_step.measure(scst_step.Shapes(), timing, "no")


def hf_step(timing: Timing) -> list[Measurement]:
    """A self-critical step of pretrained captioners against two other loops."""
    from benchmarks import hf_step as benchmark

    return benchmark.measure_all(timing)


def cider(timing: Timing) -> list[Measurement]:
    """CIDEr-D against the reference scorer."""
    from benchmarks import cider as benchmark

    return benchmark.measure(50, 5, None, timing)


def l_clip(timing: Timing) -> list[Measurement]:
    """L-CLIP against CLIP ViT-B/32, alone and as a reward."""
    from benchmarks import l_clip as benchmark

    return benchmark.measure(benchmark.Shapes(), benchmark.PARTS, timing)


def loading(timing: Timing) -> list[Measurement]:
    """Images a second."""
    from benchmarks import loading as benchmark

    return benchmark.measure(64, timing)


def launches(timing: Timing) -> list[Measurement]:
    """Kernels, waits and bytes of the step that a GPU would be asked for, counted on the CPU."""
    from benchmarks import launches as benchmark

    return benchmark.measure(benchmark.Shapes(), "no")


def memory(timing: Timing) -> list[Measurement]:
    """Peak memory of the step against two other loops, and what fits a card."""
    from benchmarks import memory as benchmark

    return benchmark.measure(benchmark.Shapes(), timing, ["no", "bf16"])


def evaluation(timing: Timing) -> list[Measurement]:
    """The Karpathy test table against pycocoevalcap with Java."""
    from benchmarks import evaluation as benchmark

    return benchmark.measure(timing)


def processes(timing: Timing) -> list[Measurement]:
    """Steps of two processes against one."""
    from benchmarks import processes as benchmark

    return benchmark.measure(replace(benchmark.Shapes(), images=benchmark.IMAGES), timing)


def startup(timing: Timing) -> list[Measurement]:
    """Imports and ``--help``."""
    from benchmarks import startup as benchmark

    return benchmark.measure(timing)


BENCHMARKS: dict[str, Callable[[Timing], list[Measurement]]] = {
    "step": step,
    "hf_step": hf_step,
    "cider": cider,
    "l_clip": l_clip,
    "evaluation": evaluation,
    "launches": launches,
    "memory": memory,
    "processes": processes,
    "loading": loading,
    "startup": startup,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run them in turn and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="all by default")
    chosen = parser.parse_args(arguments)
    timing = timing_of(parser, chosen)
    report((BENCHMARKS[name](timing) for name in chosen.only), chosen.json, chosen.device)


if __name__ == "__main__":
    main()
