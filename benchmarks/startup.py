"""How long it takes until a program can begin: imports and ``--help``, against Python alone.

python -m benchmarks.startup [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import Measurement, Timing, add_timing, paired, report, timed, timing_of

NOTHING = "python -c pass"
COMMANDS = {
    NOTHING: ["-c", "pass"],
    "import rewards": ["-c", "import rewards"],
    "import rl_caption": ["-c", "import rl_caption"],
    "import rewards.text.cider": ["-c", "import rewards.text.cider"],
    "rl_caption --help": ["-m", "rl_caption", "--help"],
    "rl_caption scst --help": ["-m", "rl_caption", "scst", "--help"],
    "import torch": ["-c", "import torch"],
}


def start(arguments: Sequence[str]) -> None:
    """Run a Python process to its end."""
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def measure(timing: Timing) -> list[Measurement]:
    """Elapsed time of whole processes."""
    variants: dict[str, Callable[[], object]] = {name: partial(start, found) for name, found in COMMANDS.items()}
    times = timed(variants, Timing("cpu", timing.repeats), "starting")
    rows = []
    for name in list(COMMANDS)[1:]:
        seconds, ratios = statistics.median(times[name]), paired(times[name], times[NOTHING])
        detail = f"{seconds:.3g} s; rounds {min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(Measurement(name, NOTHING, statistics.median(ratios), "x the time", detail))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    chosen = parser.parse_args(arguments)
    report([measure(timing_of(parser, chosen))], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
