"""``python -m rl_caption.torchvision_remedy install|status|remove``: ``import torchvision`` beside a CPU-only torch.

Where an index has torchvision only as a CUDA build, its import ends in ``operator torchvision::nms does not exist``:
operators lack the schemas that its library would have defined. Nobody here filters boxes, so schemas are enough. They
must be there before any program starts (the ``accelerate`` command imports torchvision itself): a ``.pth`` file in
site-packages imports a module that waits for that failure, defines them and imports torchvision again.
``RL_CAPTION_TORCHVISION_REMEDY=off`` switches it off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rewards.files import atomic_write

OFF_SWITCH = "RL_CAPTION_TORCHVISION_REMEDY"
MODULE = "_rl_caption_torchvision_remedy"
HOOK = '''\
"""Written by `python -m rl_caption.torchvision_remedy install`, which says what it is for."""
import os
import sys

libraries = []  # keeps the definitions alive; empty as long as nothing was repaired


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torchvision":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            native = spec.loader.exec_module
            spec.loader.exec_module = lambda module: import_twice(native, module)
        return spec


def import_twice(native, module):
    untouched = dict(vars(module))
    try:
        native(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or "does not exist" not in str(error):
            raise
        for name in [name for name in sys.modules if name.startswith("torchvision.")]:
            del sys.modules[name]
        vars(module).clear()
        vars(module).update(untouched)
        import torch.library

        libraries.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            libraries[0].define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        native(module)


if os.environ.get("RL_CAPTION_TORCHVISION_REMEDY", "").lower() not in ("off", "0", "false"):
    sys.meta_path.insert(0, Finder)
'''
FILES = {f"{MODULE}.py": HOOK, "rl_caption_torchvision_remedy.pth": f"import {MODULE}\n"}
"""In site-packages; the module is written first, as a ``.pth`` file without it prints an error at every start."""


class RemedyError(RuntimeError):
    """The remedy cannot be written."""


class TorchvisionState(Enum):
    """What ``import torchvision`` does in this environment."""

    ABSENT = "torchvision is not installed; nothing to do"
    NATIVE = "torchvision loads natively; the remedy is not needed"
    REMEDIED = "torchvision loads by means of the remedy"
    NEEDED = "torchvision does not load beside this torch build, and the remedy would help"
    BROKEN = "torchvision does not load, for a reason that the remedy does not cover"


class RemedyStatus(NamedTuple):
    """State of torchvision, whether this version's files are installed, and the last line of a failing import."""

    state: TorchvisionState
    installed: bool
    error: str = ""


def paths() -> dict[Path, str]:
    """The remedy's files in this environment, and what is written into each."""
    return {Path(sysconfig.get_paths()["purelib"]) / name: text for name, text in FILES.items()}


def status() -> RemedyStatus:
    """Import torchvision in new processes, without and with the remedy, and say what it does. Takes 2 to 10 seconds."""
    installed = all(path.is_file() and path.read_text(encoding="utf-8") == text for path, text in paths().items())
    error = _import_error("off")
    if not error:
        return RemedyStatus(TorchvisionState.NATIVE, installed)
    if error.startswith("ModuleNotFoundError: No module named 'torchvision'"):
        return RemedyStatus(TorchvisionState.ABSENT, installed, error)
    remedied = _import_error("on")
    if not remedied:
        return RemedyStatus(TorchvisionState.REMEDIED, installed)
    covered = not installed and "operator torchvision::" in error and "does not exist" in error
    return RemedyStatus(TorchvisionState.NEEDED if covered else TorchvisionState.BROKEN, installed, remedied)


def install() -> RemedyStatus:
    """Write the files where torchvision needs them, and remove them again where it fails with them too."""
    found = status()
    if found.installed or found.state not in (TorchvisionState.NEEDED, TorchvisionState.REMEDIED):
        return found
    try:
        for path, text in paths().items():
            with atomic_write(path) as file:
                file.write(text.encode())
    except OSError as error:
        raise RemedyError(f"cannot write the remedy: {error}; use a virtual environment of your own") from error
    found = status()
    if found.state is not TorchvisionState.REMEDIED:
        remove()
    return found


def remove() -> RemedyStatus:
    """Delete the files."""
    for path in reversed(paths()):
        path.unlink(missing_ok=True)
    return status()


def _import_error(remedy: str) -> str:
    """The last line of what ``import torchvision`` prints in a new process; empty when it succeeds."""
    command = [sys.executable, "-P", "-c", "import torchvision"]  # -P: not a folder of that name that lies here
    environment = os.environ | {OFF_SWITCH: remedy}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "it took longer than 300 s"
    message = done.stderr.strip() or f"ended with {done.returncode} without a message"
    return message.splitlines()[-1] if done.returncode else ""


def main(command: str = "") -> int:
    """Run a command; return 0, or 1 when torchvision does not load afterwards."""
    commands = {"install": install, "status": status, "remove": remove}
    if command not in commands:
        print("usage: python -m rl_caption.torchvision_remedy install|status|remove", file=sys.stderr)
        return 2
    try:
        found = commands[command]()
    except RemedyError as error:
        print(f"torchvision remedy: {error}", file=sys.stderr)
        return 1
    print(f"{found.state.value} {found.error}".strip())
    return int(command != "remove" and found.state in (TorchvisionState.NEEDED, TorchvisionState.BROKEN))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
