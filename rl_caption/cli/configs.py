"""The recipes that the package brings: what there is, and one of them to read, copy and change."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_caption.cli.configuration import program_of, read_file
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import find_config, shipped_configs
from rl_caption.runtime.errors import UsageError

WIDTH = 80
INDENT = 22
"""Columns of the names; a longer name has a line of its own."""


def main(words: Sequence[str]) -> int:
    """Run ``configs list``, or ``configs show NAME > mine.yaml``."""
    if len(words) == 2 and words[0] == "show":
        print(find_config(words[1]).read_text(encoding="utf-8"), end="")
    elif words and words != ["list"]:
        raise UsageError("expected rl-caption configs list, or rl-caption configs show NAME")
    else:
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
