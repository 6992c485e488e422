"""The recipes that the package brings: what there is, and one of them to read, copy and change."""

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rl_caption.cli.configuration import program_of, read_file
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import find_config, shipped_configs

WIDTH = 80
INDENT = 22
"""Columns of the names; a longer name has a line of its own."""


def main(argv: list[str] | None = None) -> int:
    """``configs list``, or ``configs show NAME > mine.yaml``."""
    parser = argparse.ArgumentParser(prog="rl-caption configs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | show NAME")
    commands.add_parser("list", help="print what there is for each program, and what it is")
    show = commands.add_parser("show", help="print the file that --config NAME reads")
    show.add_argument("name", metavar="NAME")
    options = parser.parse_args(argv)
    if options.command == "show":
        print(find_config(options.name).read_text(encoding="utf-8"), end="")
        return 0
    print("\n".join(_list_lines()))
    return 0


def _list_lines() -> Iterator[str]:
    """The recipes, program by program, at most ``WIDTH`` columns wide."""
    recipes: dict[str, list[str]] = {program: [] for program in ("run", "scst", *PROGRAMS)}
    files = shipped_configs()
    for name in sorted(files, key=lambda name: (name[:3] != "own", name[:4] != "demo", name)):
        recipes.setdefault(program_of(read_file(files[name])) or "", []).append(name)
    for program, names in recipes.items():
        if not names:
            continue
        is_launcher = program not in PROGRAMS
        if is_launcher:
            yield "accelerate launch --config_file FILE"
        else:
            yield (
                f"rl-caption {program} NAME"
                if program == "run"
                else f"rl-caption {program} --config NAME"
            )
        if is_launcher:
            yield "(FILE: rl-caption configs show NAME > FILE)"
        for name in names:
            text = f"  {name:<{INDENT - 1}} {describe(files[name])}"
            indent = " " * (INDENT + 2)
            yield textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        yield ""
    yield "rl-caption configs show NAME > mine.yaml copies one, to be changed."


def describe(file: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = " ".join(
        line[1:].strip()
        for line in lines[: next(i for i, line in enumerate(lines) if line[:1] != "#")]
    )
    return re.split(r"(?<=\.) +|:? +accelerate launch ", comment)[0]
