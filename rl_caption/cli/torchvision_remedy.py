"""Lets torchvision load beside a CPU-only torch in this Python's environment: ``rl-caption doctor
--mend``.

Where an index has torchvision only as a CUDA build, its import ends in ``operator torchvision::nms
does not exist``. Then ``torchvision_hook.py`` is copied to site-packages, with a ``.pth`` file that
loads it in every program. This file needs the standard library alone, and runs as a script, too.
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
    command = [
        sys.executable,
        "-Pc",
        "import torchvision",
    ]  # -P: not a folder of that name here
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    message = (
        process.stderr.strip() or f"ended with {process.returncode} without a message"
    )
    return message.splitlines()[-1] if process.returncode else ""


def mend() -> tuple[str, str]:
    """Install the hook where its fault is found, and take it out again if it does not help.

    Returns:
        What was done, and why torchvision does not load now: either may be empty.
    """
    error = import_error()
    if error.endswith("No module named 'torchvision'"):
        return "", ""
    if FAULT not in error:
        return "", error
    HOOK.write_bytes(Path(__file__).with_name("torchvision_hook.py").read_bytes())
    LOADER.write_text(f"import {HOOK.stem}\n")
    if not (error := import_error()):
        return f"torchvision loads now; the remedy is {HOOK} and {LOADER}", ""
    LOADER.unlink()
    HOOK.unlink()
    return "", error


if __name__ == "__main__":
    done, still = mend()
    if done:
        print(done)
    if still:
        sys.exit(f"torchvision does not load beside this torch: {still}")
