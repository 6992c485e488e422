"""The torchvision remedy: acts on the one failure it is for, and on nothing else.

The hook runs in new processes with stand-ins for torch and torchvision, so these tests mean the same with every torch
build.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "torchvision_remedy.py"
SPEC = importlib.util.spec_from_file_location("torchvision_remedy", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
torchvision_remedy: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(torchvision_remedy)
ABSENT, BROKEN, NATIVE = torchvision_remedy.ABSENT, torchvision_remedy.BROKEN, torchvision_remedy.NATIVE
NEEDED, REMEDIED = torchvision_remedy.NEEDED, torchvision_remedy.REMEDIED
FILES, OFF_SWITCH = torchvision_remedy.FILES, torchvision_remedy.OFF_SWITCH

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
MISSING = "RuntimeError: operator torchvision::nms does not exist"
LOADS = "import torch; torch.library.defined.nms = torch.library.defined.qnms = 'native'"


def run_python(
    code: str, site: Path | None = None, extension: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process: with the hook, stand-ins for torch and torchvision, whose ``extension`` loads its
    library or not, in ``site``, and no site-packages."""
    environment = {name: value for name, value in os.environ.items() if name != OFF_SWITCH}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    if site is not None:
        sources = {**FILES, "torch/__init__.py": TORCH, "torch/library.py": TORCH_LIBRARY}
        if extension is not None:
            sources["torchvision/__init__.py"] = "from . import _meta_registrations"
            sources |= {"torchvision/extension.py": extension, "torchvision/_meta_registrations.py": NEEDS_OPERATORS}
        for name, source in sources.items():
            (site / name).parent.mkdir(exist_ok=True)
            (site / name).write_text(source)
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, *(["-S"] if site else []), "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("extension", "switch", "end"),
    [
        ("", "on", "repaired: 1"),
        ("", "off", MISSING),
        (LOADS, "on", "repaired: 0"),
        ("raise RuntimeError('different CUDA major versions')", "on", "RuntimeError: different CUDA major versions"),
        (None, "on", "No module named 'torchvision'"),
    ],
    ids=["no library", "switched off", "native", "another failure", "not installed"],
)
def test_the_missing_operators_are_defined_and_nothing_else(extension, switch, end, tmp_path):
    code = """
        import os, sys  # the site module, switched off here, has always loaded both
        before = set(sys.modules)
        import _rl_caption_torchvision_remedy as hook
        assert set(sys.modules) - before == {"_rl_caption_torchvision_remedy"}
        import torchvision
        raise SystemExit(f"repaired: {len(hook.libraries)}")
        """
    done = run_python(code, tmp_path, extension, **{OFF_SWITCH: switch})
    assert done.stderr.strip().endswith(end), done.stderr


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site-packages beside a torchvision that needs the remedy, by which it loads."""
    (tmp_path / "site").mkdir()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path / "site")})
    fails_with(monkeypatch, MISSING)
    return tmp_path / "site"


def fails_with(monkeypatch: pytest.MonkeyPatch, native: str, remedied: str = "") -> None:
    def import_error(remedy: str) -> str:
        return remedied if remedy == "on" and all(path.exists() for path in torchvision_remedy.paths()) else native

    monkeypatch.setattr(torchvision_remedy, "import_error", import_error)


def test_install_where_needed_replaces_an_older_hook_and_is_removed(site: Path, capsys: Any) -> None:
    assert torchvision_remedy.main("status") == 1
    assert torchvision_remedy.status() == NEEDED
    for before in ("", "old = True\n"):
        if before:
            (site / next(iter(FILES))).write_text(before)
        assert torchvision_remedy.main("install") == 0
        assert torchvision_remedy.status() == REMEDIED
        assert {path.name: path.read_text() for path in site.iterdir()} == FILES
    for _ in range(2):
        assert torchvision_remedy.main("remove") == 0
        assert list(site.iterdir()) == []
    assert torchvision_remedy.main("uninstall") == 2
    assert "install|status|remove" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("native", "remedied", "found"),
    [
        ("", "", NATIVE),
        ("ModuleNotFoundError: No module named 'torchvision'", "", ABSENT),
        ("ImportError: libjpeg.so.62", "", BROKEN + "ImportError: libjpeg.so.62"),
        (MISSING, "RuntimeError: something else", BROKEN + "RuntimeError: something else"),
    ],
)
def test_install_leaves_nothing_where_it_is_of_no_use(site, monkeypatch, native, remedied, found):
    fails_with(monkeypatch, native, remedied)
    assert torchvision_remedy.install() == found
    assert list(site.iterdir()) == []
    assert torchvision_remedy.main("install") == found.startswith(BROKEN)


def test_the_script_needs_nothing_that_is_installed():
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT, "no command"], capture_output=True, check=False)
    assert done.returncode == 2, done.stderr


def test_unwritable_site_packages_is_named(site: Path, capsys: Any) -> None:
    site.rmdir()
    site.write_text("a file, where a folder should be")
    assert torchvision_remedy.main("install") == 1
    assert str(site) in capsys.readouterr().err
