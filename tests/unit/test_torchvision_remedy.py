"""The torchvision remedy: acts on the one failure it is for, and on nothing else.

The hook runs in new processes with stand-ins for torch and torchvision, so these tests mean the same with every torch
build. The last test looks at the environment that the tests run in.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rl_caption import torchvision_remedy
from rl_caption.torchvision_remedy import ABSENT, BROKEN, FILES, NATIVE, NEEDED, OFF_SWITCH, REMEDIED

FAKE_TORCH_LIBRARY = """
defined = []
class Library:
    def __init__(self, namespace, kind):
        assert (namespace, kind) == ("torchvision", "DEF"), (namespace, kind)
    def define(self, schema):
        name = schema.split("(")[0]
        assert name not in defined, f"{name} is defined twice"
        defined.append(name)
"""
NEEDS_OPERATORS = """
import torchvision.extension
from torch.library import defined
if defined != ["nms", "qnms"]:
    raise RuntimeError("operator torchvision::nms does not exist")
loaded = True
"""
MISSING = "RuntimeError: operator torchvision::nms does not exist"


def run_python(
    code: str, site: Path | None = None, torchvision: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the hook, a stand-in for torch and one for torchvision in ``site``, and no site-packages."""
    environment = {name: value for name, value in os.environ.items() if name != OFF_SWITCH}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    if site is not None:
        sources = {**FILES, "torch/__init__.py": "", "torch/library.py": FAKE_TORCH_LIBRARY}
        if torchvision is not None:
            count = "import sys\nsys.extension_runs = getattr(sys, 'extension_runs', 0) + 1\n"
            sources |= {"torchvision/__init__.py": torchvision, "torchvision/extension.py": count}
        for name, source in sources.items():
            (site / name).parent.mkdir(exist_ok=True)
            (site / name).write_text(source)
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, *(["-S"] if site else []), "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_missing_operator_is_repaired(tmp_path: Path) -> None:
    code = """
        import _rl_caption_torchvision_remedy as hook, sys
        import torchvision
        assert torchvision.loaded, vars(torchvision)
        assert sys.extension_runs == 2, "half-imported submodules must be imported again"
        assert torchvision.extension is sys.modules["torchvision.extension"]
        assert type(torchvision.__spec__.loader).__name__ == "SourceFileLoader", torchvision.__spec__
        assert len(hook.libraries) == 1
        """
    done = run_python(code, tmp_path, NEEDS_OPERATORS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "variables"),
    [("import torchvision", {}), ("import _rl_caption_torchvision_remedy, torchvision", {OFF_SWITCH: "off"})],
    ids=["not installed", "switched off"],
)
def test_without_the_hook_the_stand_in_fails(code: str, variables: dict[str, str], tmp_path: Path) -> None:
    assert MISSING in run_python(code, tmp_path, NEEDS_OPERATORS, **variables).stderr


@pytest.mark.parametrize(
    ("torchvision", "last"),
    [
        ("raise RuntimeError('compiled with different CUDA major versions')", "different CUDA major versions"),
        ("raise ImportError('libjpeg.so.62')", "libjpeg.so.62"),
        (None, "No module named 'torchvision'"),
        ("", "assert False"),
    ],
)
def test_other_imports_are_left_alone(torchvision: str | None, last: str, tmp_path: Path) -> None:
    code = """
        import os, sys  # the site module, switched off here, has always loaded both
        before = set(sys.modules)
        import _rl_caption_torchvision_remedy as hook
        assert set(sys.modules) - before == {"_rl_caption_torchvision_remedy"}
        try:
            import torchvision
        finally:
            assert not hook.libraries and "torch" not in sys.modules
        raise RuntimeError("assert False")  # it loaded
        """
    done = run_python(code, tmp_path, torchvision)
    assert done.returncode == 1
    assert done.stderr.strip().endswith(last), done.stderr


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


def test_unwritable_site_packages_is_named(site: Path, capsys: Any) -> None:
    site.rmdir()
    site.write_text("a file, where a folder should be")
    assert torchvision_remedy.main("install") == 1
    assert str(site) in capsys.readouterr().err


def test_this_environment_imports_what_the_package_is_built_on() -> None:
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("the extra `clip` is not installed")
    code = """
        import accelerate.commands.accelerate_cli, torchvision, open_clip, timm, transformers
        from transformers import AutoImageProcessor, BlipProcessor
        """
    done = run_python(code)
    assert done.returncode == 0, f"run `python -m rl_caption.torchvision_remedy install`\n{done.stderr}"
