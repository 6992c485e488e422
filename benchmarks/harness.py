"""Common to all benchmarks: variants timed in turn, their ratio to a baseline within
each round, one table.

Only ratios between variants of one run are reported: times of a machine that other
programs use say little.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

HEAD = "| what | against | ratio | unit | detail |\n| --- | --- | ---: | --- | --- |"
Timings = dict[str, list[float]]
"""Variant -> seconds of each round."""


@dataclass(frozen=True)
class Timing:
    """Device and number of rounds of timings; one more round before them warms up."""

    device: str = "cpu"
    repeats: int = 5
    tiny: bool = False
    """A rehearsal: small models, whose times say nothing."""


@dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    name: str
    baseline: str
    ratio: float
    unit: str
    detail: str

    def __str__(self) -> str:
        return f"| {self.name} | {self.baseline} | {self.ratio:.3g} | {self.unit} | {self.detail} |"


def timed(
    variants: Mapping[str, Callable[[], object]], timing: Timing, title: str
) -> Timings:
    """Seconds of each call, variants in turn within a round; the first round warms up
    and is not counted.
    """
    seconds: Timings = {name: [] for name in variants}
    for number in tqdm(range(timing.repeats + 1), title, leave=False, disable=None):
        for name, call in variants.items():
            synchronise(timing.device)
            start = time.perf_counter()
            call()
            synchronise(timing.device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronise(device: str) -> None:
    """Wait until a GPU has finished all work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def compared(
    times: Timings, name: str, baseline: str, unit: str = "x as fast", note: str = ""
) -> Measurement:
    """Median over rounds of the speedup over the baseline, or of time / baseline's time
    for other units.
    """
    ratios = [
        own / other for own, other in zip(times[name], times[baseline], strict=True)
    ]
    if unit == "x as fast":
        ratios = [1 / ratio for ratio in ratios]
    seconds = statistics.median(times[name])
    before = statistics.median(times[baseline])
    detail = f"{seconds:.3g} s against {before:.3g} s; rounds {min(ratios):.2f} to {max(ratios):.2f}"
    return Measurement(name, baseline, statistics.median(ratios), unit, detail + note)


def report(rows: Iterable[Measurement], path: Path | None, device: str) -> None:
    """Print the machine and each row when it is measured; write all rows to ``path`` as
    a JSON list of objects.
    """
    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"torch {torch.__version__}, {name}\n")
    print(HEAD, flush=True)
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(asdict(row))
        if path:
            path.write_text(json.dumps(found, indent=2) + "\n")


def timing_parser(
    description: str | None, repeats: int = Timing.repeats
) -> argparse.ArgumentParser:
    """A parser of the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        help="counted rounds (default %(default)s)",
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads; torch's choice by default"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a rehearsal: small models, one round"
    )
    parser.add_argument(
        "--json", type=Path, help="file for the rows, a list of objects"
    )
    return parser


def parsed_timing(
    parser: argparse.ArgumentParser, chosen: argparse.Namespace
) -> Timing:
    """Check the options of ``timing_parser`` and set the threads; exits with a message
    where they do not fit.
    """
    if chosen.repeats < 1:
        parser.error(f"--repeats is {chosen.repeats}: expected at least 1")
    if chosen.json and not chosen.json.parent.is_dir():
        parser.error(f"--json: there is no folder {str(chosen.json.parent)!r}")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    return Timing(chosen.device, 1 if chosen.tiny else chosen.repeats, chosen.tiny)


def command(
    description: str | None,
    measure: Callable[..., Iterable[Measurement]],
    arguments: Sequence[str] | None = None,
    repeats: int = Timing.repeats,
    **defaults: Any,
) -> None:
    """Run one benchmark as a program: ``measure`` gets the timing and, by keyword, the
    value of each option.

    Args:
        description: text of ``--help``.
        measure: yields rows.
        arguments: of the command line; ``sys.argv`` by default.
        repeats: default of ``--repeats``.
        **defaults: option -> default. False makes a switch, a tuple takes several values.
    """
    parser = timing_parser(description, repeats)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(
                option,
                nargs="+",
                choices=default,
                default=default,
                help="all by default",
            )
        else:
            parser.add_argument(
                option, type=type(default), default=default, help=f"default: {default}"
            )
    chosen = parser.parse_args(arguments)
    timing = parsed_timing(parser, chosen)
    options = {name: getattr(chosen, name) for name in defaults}
    report(measure(timing, **options), chosen.json, chosen.device)
