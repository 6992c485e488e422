"""The torchvision remedy: acts on the one failure it is for, and on nothing else.

The hook runs in new processes with stand-ins for torch and torchvision, so these tests mean the same beside every torch
build. The last two tests look at the environment that the tests run in.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rl_caption import torchvision_remedy
from rl_caption.torchvision_remedy import RemedyError, RemedyStatus, TorchvisionState

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
runs = globals().get("runs", 0) + 1
import torchvision.extension
from torch.library import defined
if defined != ["nms", "qnms"]:
    raise RuntimeError("operator torchvision::nms does not exist")
loaded = True
"""


@pytest.fixture
def fake_site(tmp_path: Path) -> Path:
    """A folder with a stand-in for torch and the hook as it is installed; tests add their torchvision."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "library.py").write_text(FAKE_TORCH_LIBRARY)
    (tmp_path / torchvision_remedy.MODULE_FILE).write_text(torchvision_remedy.HOOK_SOURCE.read_text())
    return tmp_path


def add_torchvision(site: Path, source: str) -> None:
    (site / "torchvision").mkdir()
    (site / "torchvision" / "__init__.py").write_text(source)
    (site / "torchvision" / "extension.py").write_text(
        "import sys\nsys.extension_runs = getattr(sys, 'extension_runs', 0) + 1\n"
    )


def run_python(code: str, site: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` without site-packages when ``site`` is given, so that an installed remedy has no say."""
    command = [sys.executable, "-S", "-c"] if site else [sys.executable, "-c"]
    inherited = {name: value for name, value in os.environ.items() if name != torchvision_remedy.OFF_SWITCH}
    environment = {**inherited, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    if site:
        environment["PYTHONPATH"] = str(site)
    return subprocess.run(
        [*command, textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_missing_operator_is_repaired_and_no_trace_of_the_first_attempt_is_left(fake_site: Path) -> None:
    add_torchvision(fake_site, NEEDS_OPERATORS)
    done = run_python(
        """
        import _rl_caption_torchvision_remedy as hook, sys
        import torchvision
        assert torchvision.loaded and torchvision.runs == 1, vars(torchvision)
        assert sys.extension_runs == 2, "half-imported submodules must be imported again"
        assert torchvision.extension is sys.modules["torchvision.extension"]
        assert type(torchvision.__spec__.loader).__name__ == "SourceFileLoader", torchvision.__spec__
        assert len(hook.libraries) == 1
        """,
        fake_site,
    )
    assert done.returncode == 0, done.stderr


def test_without_the_hook_the_stand_in_fails(fake_site: Path) -> None:
    add_torchvision(fake_site, NEEDS_OPERATORS)
    done = run_python("import torchvision", fake_site)
    assert done.returncode == 1
    assert "operator torchvision::nms does not exist" in done.stderr


def test_off_switch(fake_site: Path) -> None:
    add_torchvision(fake_site, NEEDS_OPERATORS)
    done = run_python(
        "import _rl_caption_torchvision_remedy, torchvision", fake_site, **{torchvision_remedy.OFF_SWITCH: "off"}
    )
    assert "operator torchvision::nms does not exist" in done.stderr


def test_native_torchvision_is_left_alone(fake_site: Path) -> None:
    add_torchvision(fake_site, "loaded = True\n")
    done = run_python(
        """
        import _rl_caption_torchvision_remedy as hook, sys
        import torchvision
        assert torchvision.loaded and not hook.libraries and "torch" not in sys.modules
        """,
        fake_site,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "source",
    ["raise RuntimeError('compiled with different CUDA major versions')", "raise ImportError('libjpeg.so.62')"],
)
def test_another_failure_stays_a_failure(fake_site: Path, source: str) -> None:
    add_torchvision(fake_site, source)
    done = run_python(
        """
        import _rl_caption_torchvision_remedy as hook
        try:
            import torchvision
        except (RuntimeError, ImportError) as error:
            assert not hook.libraries
            raise
        """,
        fake_site,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(source.split("'")[1]), done.stderr


def test_absent_torchvision_stays_absent(fake_site: Path) -> None:
    done = run_python("import _rl_caption_torchvision_remedy, torchvision", fake_site)
    assert "No module named 'torchvision'" in done.stderr


def test_hook_imports_nothing_that_is_not_loaded_anyway(fake_site: Path) -> None:
    done = run_python(
        """
        import os, sys  # the site module, switched off here, has always loaded both
        before = set(sys.modules)
        import _rl_caption_torchvision_remedy
        print(sorted(set(sys.modules) - before))
        """,
        fake_site,
    )
    assert done.stdout.strip() == "['_rl_caption_torchvision_remedy']", done.stdout + done.stderr


@pytest.fixture
def empty_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(torchvision_remedy, "site_packages", lambda: folder)
    return folder


def probe(native: str | None, remedied: str | None = None):  # type: ignore[no-untyped-def]
    return lambda remedy: remedied if remedy else native


MISSING = "RuntimeError: operator torchvision::nms does not exist"


def test_install_where_needed_is_idempotent(empty_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(MISSING))
    assert torchvision_remedy.status().state is TorchvisionState.NEEDED
    for _ in range(2):
        assert torchvision_remedy.install() == RemedyStatus(TorchvisionState.REMEDIED, installed=True)
        assert {path.name for path in empty_site.iterdir()} == {
            torchvision_remedy.MODULE_FILE,
            torchvision_remedy.PTH_FILE,
        }


def test_install_replaces_an_older_hook(empty_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(MISSING))
    torchvision_remedy.install()
    (empty_site / torchvision_remedy.MODULE_FILE).write_text("old = True\n")
    assert not torchvision_remedy.is_installed()
    assert torchvision_remedy.install().installed


@pytest.mark.parametrize(
    ("native", "state"),
    [
        (None, TorchvisionState.NATIVE),
        ("ModuleNotFoundError: No module named 'torchvision'", TorchvisionState.ABSENT),
    ],
)
def test_install_does_nothing_where_not_needed(
    empty_site: Path, monkeypatch: pytest.MonkeyPatch, native: str | None, state: TorchvisionState
) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(native))
    assert torchvision_remedy.install().state is state
    assert list(empty_site.iterdir()) == []


def test_install_refuses_another_failure(empty_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe("ImportError: libjpeg.so.62"))
    with pytest.raises(RemedyError, match=r"libjpeg\.so\.62"):
        torchvision_remedy.install()
    assert list(empty_site.iterdir()) == []


def test_install_that_does_not_help_is_undone(empty_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(MISSING, remedied="RuntimeError: something else"))
    with pytest.raises(RemedyError, match="something else"):
        torchvision_remedy.install()
    assert list(empty_site.iterdir()) == []


def test_unwritable_site_packages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nowhere").write_text("a file, where a folder should be")
    monkeypatch.setattr(torchvision_remedy, "site_packages", lambda: tmp_path / "nowhere")
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(MISSING))
    with pytest.raises(RemedyError, match=r"cannot write .*nowhere"):
        torchvision_remedy.install()


def test_remove(empty_site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(MISSING))
    torchvision_remedy.install()
    assert torchvision_remedy.main(["remove"]) == 0
    assert list(empty_site.iterdir()) == []
    assert torchvision_remedy.main(["remove"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_exit_status(empty_site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torchvision_remedy, "_import_error", probe(MISSING))
    assert torchvision_remedy.main(["status"]) == 1
    assert torchvision_remedy.main(["install"]) == 0
    assert torchvision_remedy.main(["status"]) == 0
    assert torchvision_remedy.main(["uninstall"]) == 2
    assert "install|status|remove" in capsys.readouterr().err


def test_this_environment_imports_what_the_package_is_built_on() -> None:
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("the extra `clip` is not installed")
    done = run_python(
        "import torchvision, open_clip, timm, transformers\nfrom transformers import AutoImageProcessor, BlipProcessor"
    )
    assert done.returncode == 0, f"run `python -m rl_caption.torchvision_remedy install`\n{done.stderr}"


def test_the_accelerate_command_of_this_environment_starts() -> None:
    accelerate = Path(sys.executable).with_name("accelerate")
    if not accelerate.exists():
        pytest.skip("no accelerate command beside this interpreter")
    done = subprocess.run([accelerate, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"run `python -m rl_caption.torchvision_remedy install`\n{done.stderr}"
