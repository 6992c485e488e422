"""``python -m rl_caption NAME`` and ``rl-caption NAME``. Ctrl-C ends both in one line,
also while modules load.
"""

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "numpy")
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended: 128 + SIGINT, as in a shell."""


def main() -> int:
    """Run the program that the command line names."""
    return _run("main")


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one program, as a script does."""
    return _run("run", name, arguments)


def _run(function: str, *arguments: object) -> int:
    if hiding := [*hiding_files()]:
        print(
            f"error: {'; '.join(hiding)}: rename it, or work in another folder",
            file=sys.stderr,
        )
        return 1
    try:
        before = leave_on_interrupt()
        programs = importlib.import_module("rl_caption.cli.main")
        signal.signal(signal.SIGINT, before)
        code: int = getattr(programs, function)(*arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def hiding_files() -> Iterator[str]:
    """Yield a line for each file that is imported in place of a package that every program needs.

    ``python -m`` looks for modules in the working directory first.
    """
    home = Path(__file__).resolve().parents[1]
    here = Path(sys.path[0] or ".").resolve()
    for name in ("rewards", *LIBRARIES):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        file = Path(spec.origin).resolve()
        local = file.parent in (here, here / name)
        if file.parent != home / name if name == "rewards" else local and here != home:
            yield f"{file} hides the package {name!r}"


def leave_on_interrupt() -> Any:
    """Let Ctrl-C end the process at once, while there is nothing to be cleaned up;
    return the handler before.

    While a module is imported, an exception may be swallowed, or come out as another one.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        """Say so and end."""
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as under nohup
        signal.signal(signal.SIGINT, leave)
    return before


if __name__ == "__main__":
    sys.exit(main())
