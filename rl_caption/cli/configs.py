"""The recipes that the package brings: what there is, and one of them to read, copy and change."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rl_caption.cli.configuration import USAGES, program_of, read_file
from rl_caption.config.shipped import find_config, shipped_configs
from rl_caption.runtime.errors import UsageError

WIDTH = 80


def main(words: Sequence[str]) -> int:
    """Run ``configs list``, or ``configs show NAME > mine.yaml``."""
    if len(words) == 2 and words[0] == "show":
        print(find_config(words[1]).read_text(encoding="utf-8"), end="")
        return 0
    if words and words != ["list"]:
        raise UsageError(
            "expected rl-caption configs list, or rl-caption configs show NAME"
        )
    lines = []
    for name, file in shipped_configs().items():
        program = program_of(read_file(file))
        command = USAGES.get(str(program), f"rl-caption {program} --config")
        lines.append(f"{command} {name}\n{describe(file)}")
    print("\n".join(sorted(lines)))
    print("\nrl-caption configs show NAME > mine.yaml copies one, to be changed.")
    return 0


def describe(file: Path) -> str:
    """The first sentence of the comment that a recipe begins with, indented."""
    comment = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment += line[1:]
    first = re.split(r"(?<=\.) +|:? +accelerate launch ", comment.strip())[0]
    return textwrap.fill(
        first, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
