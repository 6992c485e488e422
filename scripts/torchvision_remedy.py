"""``python scripts/torchvision_remedy.py``: let torchvision load beside a CPU-only torch in this Python's environment.

Where an index has torchvision only as a CUDA build, its import ends in ``operator torchvision::nms does not exist``.
Then ``torchvision_hook.py`` is copied to site-packages, with a ``.pth`` file that loads it in every program.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK = Path(sysconfig.get_paths()["purelib"]) / "_rl_caption_torchvision_remedy.py"
LOADER = HOOK.with_name("rl_caption_torchvision_remedy.pth")


def import_error() -> str:
    process = subprocess.run(
        [sys.executable, "-Pc", "import torchvision"], capture_output=True, text=True, check=False
    )
    return (process.stderr.strip().splitlines() or ["no message"])[-1] if process.returncode else ""


if "operator torchvision::" in (error := import_error()):
    HOOK.write_bytes(Path(__file__).with_name("torchvision_hook.py").read_bytes())
    LOADER.write_text(f"import {HOOK.stem}\n")
    if error := import_error():
        LOADER.unlink()
        HOOK.unlink()
if error and not error.endswith("No module named 'torchvision'"):
    sys.exit(f"torchvision does not load beside this torch, with the remedy or without: {error}")
