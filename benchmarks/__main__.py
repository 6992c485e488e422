"""All benchmarks of speed and memory in one table.

    python -m benchmarks [--only NAME ...] [--device cuda] [--repeats N] [--json FILE]

Each row is a ratio to a baseline of the same run. ``--json`` writes a list of objects:
name, baseline, ratio, unit, detail. A module of this folder run by itself (``python -m
benchmarks.scst_step``) has more options.
"""

from collections.abc import Sequence
from importlib import import_module

from benchmarks.harness import parsed_timing, report, timing_parser

BENCHMARKS = {
    "step": "scst_step",
    "hf_step": "hf_step",
    "l_clip": "l_clip",
    "cider": "cider",
    "memory": "memory",
    "startup": "startup",
}
"""Name on the command line -> module of this folder; its ``measure(timing)`` yields rows."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and print one table."""
    parser = timing_parser(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=list(BENCHMARKS),
        help="all by default",
    )
    chosen = parser.parse_args(arguments)
    timing = parsed_timing(parser, chosen)
    modules = (import_module(f"benchmarks.{BENCHMARKS[name]}") for name in chosen.only)
    report(
        (row for module in modules for row in module.measure(timing)),
        chosen.json,
        chosen.device,
    )


if __name__ == "__main__":
    main()
