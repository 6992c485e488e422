"""Lets torchvision load beside a CPU-only torch in this Python's environment: ``rl-caption doctor
--mend``.

Where an index has torchvision only as a CUDA build, its import ends in ``operator torchvision::nms
does not exist``. Then ``torchvision_hook.py`` is copied to site-packages, with a
``.pth`` file that loads it in every program. This file needs the standard library
alone, and runs as a script, too.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = Path(sysconfig.get_paths()["purelib"]) / "_rl_caption_torchvision_remedy.py"
LOADER = HOOK.with_name("rl_caption_torchvision_remedy.pth")
FAULT = "operator torchvision::"


def import_error() -> str:
    """The last line of what ``import torchvision`` prints in a new process; empty when it succeeds."""
    # -P: not a folder of that name here
    command = [sys.executable, "-Pc", "import torchvision"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = process.stderr.strip().splitlines() or [f"code {process.returncode}"]
    return lines[-1] if process.returncode else ""


def mend() -> str:
    """Install the hook where its fault is found, and take it out again if it does not
    help; return why torchvision does not load now.
    """
    error = import_error()
    if FAULT in error:
        HOOK.write_bytes(Path(__file__).with_name("torchvision_hook.py").read_bytes())
        LOADER.write_text(f"import {HOOK.stem}\n")
        if error := import_error():
            LOADER.unlink()
            HOOK.unlink()
    return "" if "No module named 'torchvision'" in error else error


if __name__ == "__main__":
    if still := mend():
        sys.exit(f"torchvision does not load beside this torch: {still}")
