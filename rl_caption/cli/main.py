"""The programs: ``rl-caption NAME --config FILE --section.key value``, or ``python -m
rl_caption NAME``.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rewards.base import nearest
from rl_caption import __version__
from rl_caption.__main__ import INTERRUPTED, leave_on_interrupt
from rl_caption.cli.programs import PROGRAMS
from rl_caption.runtime.errors import UsageError, user_errors
from rl_caption.runtime.threads import set_threads


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``NAME ARGUMENTS...``; expected errors end with one clear message and code 1."""
    words = sys.argv[1:] if arguments is None else arguments
    name, *rest = words or ["--help"]
    if name == "--version":
        print(__version__)
    elif name in ("-h", "--help"):
        print(
            "usage: rl-caption NAME ...    (rl-caption NAME --help lists its options)"
        )
        for program, one in PROGRAMS.items():
            print(f"  {program:<16} {one.summary}")
    else:
        return run(name, rest)
    return 0


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one program; errors that a user can mend are printed without a traceback, and
    the package's own log lines (level INFO and above) to standard error.
    """
    set_threads()
    if (Path(sys.path[0]) / "scst.py").is_file():
        del sys.path[0]  # the folder of the scripts: its evaluate.py hides a package
    if name not in PROGRAMS:
        raise UsageError(
            f"there is no program {name}: did you mean {nearest(name, PROGRAMS)}?"
        )
    # At the root: a library that logs there would otherwise put up a handler of its own, and every
    # line come twice.
    root, handler = logging.getLogger(), logging.StreamHandler()
    root.addHandler(handler)
    for package in ("rl_caption", "rewards"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        with user_errors():
            result = run_program(name, list(arguments))
            if isinstance(result, str) and result:
                print(result)
            training = sys.modules.get("rl_caption.training.run")
            if training is not None:  # not every program trains, or needs torch
                training.leave_process_group()
            return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        root.removeHandler(handler)


def run_program(name: str, arguments: list[str]) -> Any:
    """Run one program and return what it returns; errors are raised.

    Its modules are imported after its configuration is read and checked.
    """
    program = PROGRAMS[name]
    if program.config is None:
        return resolve_name(program.function)(arguments)
    before = leave_on_interrupt()
    from rl_caption.cli.preflight import preflight, refuse
    from rl_caption.cli.stages import Stage

    signal.signal(signal.SIGINT, before)
    stage = Stage(name, name, arguments)
    refuse(preflight([stage], rows=False))
    return stage.start()
