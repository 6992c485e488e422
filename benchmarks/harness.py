"""What every benchmark shares: variants timed in turn, ratios within a round, one table.

Ratios are taken between variants of one run, because times on a machine that others use say little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm


@dataclass(frozen=True)
class Timing:
    """Where and how times are taken."""

    device: str = "cpu"
    repeats: int = 5
    """Rounds that are counted; one before them warms up."""
    cpu_time: bool = False
    """Count processor time instead of time: for a CPU that others use, with one thread."""


@dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    name: str
    baseline: str
    ratio: float
    unit: str
    detail: str


Timings = dict[str, list[float]]


def timed(variants: Mapping[str, Callable[[], object]], settings: Timing, title: str) -> Timings:
    """Seconds of each call, variants in turn within a round; a first round warms up and fills caches."""
    clock = time.process_time if settings.cpu_time else time.perf_counter
    seconds: Timings = {name: [] for name in variants}
    rounds = [(number, name) for number in range(settings.repeats + 1) for name in variants]
    if not sys.stderr.isatty():
        print(f"{title}: {len(variants)} variants, {settings.repeats + 1} rounds", file=sys.stderr, flush=True)
    for number, name in tqdm(rounds, title, leave=False, disable=None):
        synchronise(settings.device)
        start = clock()
        variants[name]()
        synchronise(settings.device)
        if number:
            seconds[name].append(clock() - start)
    return seconds


def synchronise(device: str) -> None:
    """Wait for what was started on a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def paired(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    """Ratios of two variants' times, round by round."""
    return [a / b for a, b in zip(upper, lower, strict=True)]


def faster(times: Timings, name: str, baseline: str, note: str = "") -> Measurement:
    """How many times as fast as the baseline."""
    ratios = paired(times[baseline], times[name])
    seconds, before = statistics.median(times[name]), statistics.median(times[baseline])
    detail = f"{seconds:.3g} s against {before:.3g} s; rounds {min(ratios):.2f} to {max(ratios):.2f}"
    return Measurement(name, baseline, statistics.median(ratios), "x as fast", detail + note)


HEADER = "| what | against | ratio | unit | detail |\n| --- | --- | ---: | --- | --- |"


def lines(rows: Iterable[Measurement]) -> str:
    """Markdown, one line a row."""
    return "\n".join(f"| {row.name} | {row.baseline} | {row.ratio:.3g} | {row.unit} | {row.detail} |" for row in rows)


def machine(device: str) -> str:
    """What the figures were measured on."""
    name = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    return f"torch {torch.__version__}, {name}"


def add_timing(parser: argparse.ArgumentParser, repeats: int = Timing.repeats) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds that are counted")
    parser.add_argument("--threads", type=int, help="threads of the CPU; torch's choice by default")
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1 on a busy machine: processor time")
    parser.add_argument("--json", type=Path, help="file for the rows, a list of objects")


def timing_of(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Timing:
    """Check those options and set the threads; ends the program where they do not go together."""
    if chosen.repeats < 1:
        parser.error(f"--repeats is {chosen.repeats}: expected at least 1")
    if chosen.json and not chosen.json.parent.is_dir():
        parser.error(f"--json: there is no folder {str(chosen.json.parent)!r}")
    if chosen.cpu_time and (chosen.device != "cpu" or chosen.threads != 1):
        parser.error("--cpu-time counts every thread and no GPU: it needs --device cpu and --threads 1")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    return Timing(chosen.device, chosen.repeats, chosen.cpu_time)


def report(groups: Iterable[Sequence[Measurement]], path: Path | None, device: str) -> None:
    """Print the machine and the table, and write the rows as JSON where a file is named: each group once it is there.

    Args:
        groups: what some benchmarks found, one after the other.
        path: of the JSON file.
        device: that was measured.
    """
    print(machine(device))
    print(HEADER, flush=True)
    rows: list[Measurement] = []
    for group in groups:
        rows += group
        print(lines(group), flush=True)
        if path:
            path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
