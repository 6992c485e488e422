"""The recipes that the package brings: what there is, and one of them to read, copy and change."""

import argparse

from rl_caption.config.shipped import find_config, shipped_configs


def main(argv: list[str] | None = None) -> int:
    """``configs list``, or ``configs show NAME > mine.yaml``."""
    parser = argparse.ArgumentParser(prog="rl-caption configs", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | show NAME")
    commands.add_parser("list", help="print the name of each, for --config, and the first line of its file")
    show = commands.add_parser("show", help="print the file that --config NAME reads")
    show.add_argument("name", metavar="NAME")
    given = parser.parse_args(argv)
    if given.command == "show":
        print(find_config(given.name).read_text(encoding="utf-8"), end="")
        return 0
    configs = shipped_configs()
    width = max(map(len, configs))
    for name, file in configs.items():
        line = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        print(f"{name:<{width}}  {line}{'' if line.endswith(('.', ':')) else ' ...'}")
    return 0
