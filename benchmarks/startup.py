"""Seconds until a program can begin: imports and ``--help``, as processes of their own, against Python alone.

python -m benchmarks.startup [--json FILE]
"""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.harness import Measurement, Timing, command, compared, timed

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


def measure(timing: Timing) -> Iterator[Measurement]:
    """Elapsed time of each command."""
    variants = {
        name: partial(subprocess.run, [sys.executable, *arguments], check=True, capture_output=True)
        for name, arguments in COMMANDS.items()
    }
    times = timed(variants, Timing("cpu", timing.repeats), "starting")
    yield from (compared(times, name, NOTHING, "x the time") for name in COMMANDS if name != NOTHING)


if __name__ == "__main__":
    command(__doc__, measure)
