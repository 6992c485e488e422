"""``rl-caption configs``: list the recipes of the package, or print one to copy."""

import re
from collections.abc import Sequence

from rl_caption.cli.configuration import command_of, read_file
from rl_caption.config.shipped import find_config, shipped_configs


def main(words: Sequence[str]) -> int:
    """Run ``configs list``, or ``configs show NAME > mine.yaml``.

    Raises ``FileNotFoundError`` where there is no recipe of this name.
    """
    if words and words != ["list"]:
        print(find_config(words[-1]).read_text(encoding="utf-8"), end="")
        return 0
    for name, file in shipped_configs().items():
        text = file.read_text(encoding="utf-8").removeprefix("# ")
        about, *_ = re.split(r"\.\s", text.replace("\n# ", " "), maxsplit=1)
        print(f"{command_of(read_file(file))} {name}\n     {about}")
    print("\nrl-caption configs show NAME > mine.yaml copies one, to be changed.")
    return 0
