"""``python scripts/torchvision_remedy.py install|status|remove``: ``import torchvision`` beside a CPU-only torch.

Where an index has torchvision only as a CUDA build, its import ends in ``operator torchvision::nms does not exist``:
its library, which defines the operators, does not load. Nobody here filters boxes, so their schemas are enough. They
must be defined in every program (the ``accelerate`` command imports torchvision itself): a ``.pth`` file in
site-packages installs an import hook that defines them where torchvision did not.
``RL_CAPTION_TORCHVISION_REMEDY=off`` switches it off. ``make install`` runs this script; it acts on the environment of
the Python that runs it, and needs nothing that is installed there.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

OFF_SWITCH = "RL_CAPTION_TORCHVISION_REMEDY"
HOOK = '''\
"""Written by `scripts/torchvision_remedy.py install` of rl-caption, which says what it is for."""
import os
import sys

libraries = []  # keeps the definitions alive; empty as long as nothing was repaired


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations":  # the first module that needs the operators
            import torch
            import torchvision.extension  # which loads torchvision's library, if that can be loaded

            if not hasattr(torch.ops.torchvision, "nms"):
                libraries.append(torch.library.Library("torchvision", "DEF"))
                for operator in ("nms", "qnms"):
                    libraries[0].define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # the module itself is found by the other finders


if os.environ.get("RL_CAPTION_TORCHVISION_REMEDY", "").lower() not in ("off", "0", "false"):
    sys.meta_path.insert(0, Finder)
'''
FILES = {
    "_rl_caption_torchvision_remedy.py": HOOK,
    "rl_caption_torchvision_remedy.pth": "import _rl_caption_torchvision_remedy\n",
}
"""In site-packages; the module is written first, as a ``.pth`` file without it prints an error at every start."""
ABSENT = "torchvision is not installed; nothing to do"
NATIVE = "torchvision loads natively; the remedy is not needed"
REMEDIED = "torchvision loads by means of the remedy"
NEEDED = "torchvision does not load beside this torch build: python scripts/torchvision_remedy.py install"
BROKEN = "torchvision does not load, for a reason that the remedy does not cover: "


def paths() -> dict[Path, str]:
    """The remedy's files in this environment, and what is written into each."""
    return {Path(sysconfig.get_paths()["purelib"]) / name: text for name, text in FILES.items()}


def status() -> str:
    """What ``import torchvision`` does here: one of the five sentences. Tried in new processes, 2 to 10 seconds."""
    error = import_error("off")
    if not error:
        return NATIVE
    if error.startswith("ModuleNotFoundError: No module named 'torchvision'"):
        return ABSENT
    remedied = import_error("on")
    if not remedied:
        return REMEDIED
    covered = "operator torchvision::" in error and "does not exist" in error
    return NEEDED if covered and not all(map(Path.exists, paths())) else BROKEN + remedied


def install() -> str:
    """Write the files where torchvision needs them; remove them again where it fails with them, too.

    Raises:
        OSError: they cannot be written.
    """
    outcome = status()
    if outcome in (NEEDED, REMEDIED):
        for path, text in paths().items():
            new = path.with_name(path.name + ".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        outcome = status()
        if outcome != REMEDIED:
            remove()
    return outcome


def remove() -> str:
    """Delete the files."""
    for path in reversed(paths()):
        path.unlink(missing_ok=True)
    return "removed"


def import_error(remedy: str) -> str:
    """The last line of what ``import torchvision`` prints in a new process; empty when it succeeds."""
    command = [sys.executable, "-P", "-c", "import torchvision"]  # -P: not a folder of that name that lies here
    environment = os.environ | {OFF_SWITCH: remedy}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    message = process.stderr.strip() or f"ended with {process.returncode} without a message"
    return message.splitlines()[-1] if process.returncode else ""


def main(command: str = "") -> int:
    """Run a command; return 0, or 1 when torchvision does not load afterwards."""
    commands = {"install": install, "status": status, "remove": remove}
    if command not in commands:
        print("usage: python scripts/torchvision_remedy.py install|status|remove", file=sys.stderr)
        return 2
    try:
        outcome = commands[command]()
    except OSError as error:
        print(f"torchvision remedy: {error}; use a virtual environment of your own", file=sys.stderr)
        return 1
    print(outcome)
    return int(outcome.startswith((NEEDED, BROKEN)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
