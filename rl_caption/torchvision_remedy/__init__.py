"""Installs, removes and reports the remedy for torchvision beside a CPU-only torch (see ``hook.py``).

The remedy has to be active before any program of the environment starts: the ``accelerate`` command imports
torchvision before it reads its first argument. So it is a ``.pth`` file in site-packages, which every interpreter of
the environment reads, and a module beside it with nothing but the standard library in it. Both stay harmless when this
package goes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rewards.files import atomic_write

MODULE_NAME = "_rl_caption_torchvision_remedy"
MODULE_FILE = f"{MODULE_NAME}.py"
PTH_FILE = "rl_caption_torchvision_remedy.pth"
PTH_TEXT = f"import {MODULE_NAME}\n"
HOOK_SOURCE = Path(__file__).with_name("hook.py")
OFF_SWITCH = "RL_CAPTION_TORCHVISION_REMEDY"
PROBE_TIMEOUT_S = 300


class RemedyError(RuntimeError):
    """The remedy could not be installed, or does not help."""


class TorchvisionState(Enum):
    """What ``import torchvision`` does in this environment; the value is a sentence for people."""

    ABSENT = "torchvision is not installed; nothing to do"
    NATIVE = "torchvision loads natively; the remedy is not needed"
    REMEDIED = "torchvision loads by means of the remedy"
    NEEDED = "torchvision does not load beside this torch build, and the remedy would help"
    BROKEN = "torchvision does not load, for a reason that the remedy does not cover"


@dataclass(frozen=True)
class RemedyStatus:
    """State of torchvision and of the remedy's files.

    Attributes:
        state: what ``import torchvision`` does.
        installed: whether both files of the remedy are in place, as this version writes them.
        error: last line of the failing import; empty when it does not fail.
    """

    state: TorchvisionState
    installed: bool
    error: str = ""


def site_packages() -> Path:
    """Return the folder of the running interpreter's environment that ``.pth`` files are read from."""
    return Path(sysconfig.get_paths()["purelib"])


def is_installed(folder: Path | None = None) -> bool:
    """Whether both files are in ``folder`` (default: :func:`site_packages`) with the content of this version."""
    folder = folder or site_packages()
    wanted = {folder / MODULE_FILE: HOOK_SOURCE.read_text(encoding="utf-8"), folder / PTH_FILE: PTH_TEXT}
    return all(path.is_file() and path.read_text(encoding="utf-8") == text for path, text in wanted.items())


def status() -> RemedyStatus:
    """Find out, by importing torchvision in new processes, what it does here. Takes 2 to 10 seconds."""
    installed = is_installed()
    error = _import_error(remedy=False)
    if error is None:
        return RemedyStatus(TorchvisionState.NATIVE, installed)
    if error.startswith("ModuleNotFoundError: No module named 'torchvision'"):
        return RemedyStatus(TorchvisionState.ABSENT, installed, error)
    if installed:
        remedied_error = _import_error(remedy=True)
        if remedied_error is None:
            return RemedyStatus(TorchvisionState.REMEDIED, installed)
        return RemedyStatus(TorchvisionState.BROKEN, installed, remedied_error)
    if "operator torchvision::" in error and "does not exist" in error:
        return RemedyStatus(TorchvisionState.NEEDED, installed, error)
    return RemedyStatus(TorchvisionState.BROKEN, installed, error)


def install() -> RemedyStatus:
    """Put the remedy into this environment if it is needed, and check that it helps. Does nothing otherwise.

    Raises:
        RemedyError: torchvision fails for another reason, the folder is not writable, or torchvision fails
            with the remedy too (whose files are then removed again).
    """
    before = status()
    if before.state is TorchvisionState.BROKEN and not before.installed:
        raise RemedyError(f"{before.state.value}: {before.error}")
    if before.state in (TorchvisionState.ABSENT, TorchvisionState.NATIVE, TorchvisionState.REMEDIED):
        return before
    folder = site_packages()
    # The module first: a .pth file without it would print an error at every start of the interpreter.
    try:
        for name, text in ((MODULE_FILE, HOOK_SOURCE.read_text(encoding="utf-8")), (PTH_FILE, PTH_TEXT)):
            with atomic_write(folder / name) as file:
                file.write(text.encode())
    except OSError as error:
        raise RemedyError(f"cannot write the remedy: {error}; use a virtual environment of your own") from error
    after = status()
    if after.state is not TorchvisionState.REMEDIED:
        remove()
        raise RemedyError(f"torchvision fails with the remedy too, so it was removed again: {after.error}")
    return after


def remove(folder: Path | None = None) -> list[Path]:
    """Delete the remedy's files from ``folder`` (default: :func:`site_packages`); return those that were there."""
    folder = folder or site_packages()
    found = [path for path in (folder / PTH_FILE, folder / MODULE_FILE) if path.exists()]
    for path in found:
        path.unlink()
    return found


def _import_error(remedy: bool) -> str | None:
    """Return the last line of what ``import torchvision`` prints in a new process; None when it succeeds."""
    environment = dict(os.environ)
    environment.pop(OFF_SWITCH, None)
    if not remedy:
        environment[OFF_SWITCH] = "off"
    command = [sys.executable, "-P", "-c", "import torchvision"]  # -P: not a folder of that name that lies here
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RemedyError(f"`import torchvision` took longer than {PROBE_TIMEOUT_S} s") from error
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with {done.returncode} without a message"


def main(argv: list[str] | None = None) -> int:
    """Run ``install``, ``status`` or ``remove``; return 0, or 1 when torchvision does not load afterwards."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0] not in ("install", "status", "remove"):
        print("usage: python -m rl_caption.torchvision_remedy install|status|remove", file=sys.stderr)
        return 2
    if arguments[0] == "remove":
        removed = remove()
        print("removed " + ", ".join(str(path) for path in removed) if removed else "nothing to remove")
        return 0
    try:
        result = install() if arguments[0] == "install" else status()
    except RemedyError as error:
        print(f"torchvision remedy: {error}", file=sys.stderr)
        return 1
    print(f"{result.state.value} ({'installed' if result.installed else 'not installed'})")
    if result.error:
        print(f"  {result.error}")
    return 1 if result.state in (TorchvisionState.NEEDED, TorchvisionState.BROKEN) else 0
