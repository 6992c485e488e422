"""The torchvision remedy: acts on the one failure it is for, and on nothing else.

The script runs in environments with stand-ins for torch and torchvision, so these tests
mean the same with every torch build.
"""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from rl_caption.cli import torchvision_remedy

SCRIPT = Path(torchvision_remedy.__file__)
TORCH = """
import torch.library
class ops:
    torchvision = torch.library.defined
"""
TORCH_LIBRARY = """
class defined:
    pass
class Library:
    def __init__(self, namespace, kind):
        assert (namespace, kind) == ("torchvision", "DEF"), (namespace, kind)
    def define(self, schema):
        setattr(defined, schema.split("(")[0], True)
"""
NEEDS_OPERATORS = """
import torchvision.extension
from torch.library import defined
if not (hasattr(defined, "nms") and hasattr(defined, "qnms")):
    raise RuntimeError("operator torchvision::nms does not exist")
"""
LOADS = (
    "import torch; torch.library.defined.nms = torch.library.defined.qnms = 'native'"
)
OTHER = "raise RuntimeError('different CUDA major versions')"
STUBBORN = "raise RuntimeError('operator torchvision::roi_align does not exist')"


def environment_with(extension, folder):
    """Python and site-packages of a new environment, in which ``extension`` loads
    torchvision's library or not.
    """
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    sources = {"torch/__init__.py": TORCH, "torch/library.py": TORCH_LIBRARY}
    if extension is not None:
        sources["torchvision/__init__.py"] = "from . import _meta_registrations"
        sources |= {
            "torchvision/extension.py": extension,
            "torchvision/_meta_registrations.py": NEEDS_OPERATORS,
        }
    for name, source in sources.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(source)
    return folder / "bin" / "python", site


def run(*command):
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("extension", "files", "error"),
    [
        (
            "",
            {"_rl_caption_torchvision_remedy.py", "rl_caption_torchvision_remedy.pth"},
            "",
        ),
        (LOADS, set(), ""),
        (OTHER, set(), "different CUDA major versions"),
        (STUBBORN, set(), "operator torchvision::roi_align"),
        (None, set(), ""),
    ],
)
def test_the_missing_operators_are_defined_and_nothing_else(
    extension, files, error, tmp_path
):
    python, site = environment_with(extension, tmp_path / "environment")
    for _ in range(2):  # and a second time it changes nothing
        done = run(python, SCRIPT)
        assert done.returncode == bool(error)
        assert error in done.stderr
        assert {path.name for path in site.glob("*rl_caption*")} == files
    imported = run(python, "-c", "import torchvision")
    assert (imported.returncode == 0) == (extension is not None and not error), (
        imported.stderr
    )
