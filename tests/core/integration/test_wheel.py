"""The wheel, without the repository: built, installed and used from an empty folder.

``RL_CAPTION_INSTALLED=BIN`` tests an environment in which a wheel is installed already
(``make release``); BIN is its folder of programs.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_caption import __version__
from rl_caption.config.shipped import shipped_configs
from tests.captioners_for_tests import tiny_captioner, tiny_rows

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
Run = Callable[..., str]


def call(*command: str | Path, folder: Path) -> str:
    """Output of a program that ends well and does not find the repository by PYTHONPATH."""
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }
    how = {
        "cwd": folder,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    done = subprocess.run(command, check=False, **how)
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """The wheel of the source distribution of a copy: what an earlier build left in the
    repository is not packed.
    """
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / name)
    for name in ("rl_caption", "rewards", "configs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, symlinks=True, ignore=ignore)
    call(
        sys.executable,
        "-c",
        "from setuptools import build_meta; build_meta.build_sdist('dist')",
        folder=folder,
    )
    (archive,) = (folder / "dist").glob("*.tar.gz")
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist")
    call(sys.executable, "-m", "pip", "wheel", *offline, archive, folder=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install(wheel: Path, environment: Path) -> Path:
    """A new environment with the wheel and the packages of this one; returns its folder
    of programs.
    """
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    # Of folders that a .pth file names, .pth files are not read: an editable rl_caption is not
    # there, nor the remedy.
    packages = dict.fromkeys(sysconfig.get_path(key) for key in ("purelib", "platlib"))
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in packages))
    for file in Path(sysconfig.get_path("purelib")).glob(
        "*rl_caption_torchvision_remedy.p*"
    ):  # where it was needed
        shutil.copy(file, site)
    programs = environment / "bin"
    options = ("--no-deps", "--no-index", "--no-compile", "--ignore-installed")
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        *options,
        wheel,
        folder=environment,
    )
    return programs


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """``run(PROGRAM, ARGUMENTS...)`` in a folder that was empty, with the wheel installed."""
    if (installed := os.environ.get("RL_CAPTION_INSTALLED")) is not None:
        programs = Path(installed).resolve()
    else:
        programs = install(
            build_wheel(tmp_path_factory.mktemp("build")),
            tmp_path_factory.mktemp("environment"),
        )
    folder = tmp_path_factory.mktemp("empty")

    def run(program: str, *arguments: str | Path) -> str:
        return call(programs / program, *arguments, folder=folder)

    return run


def test_what_is_imported_is_the_wheel(run):
    code = (
        "import importlib.metadata, sysconfig, rl_caption, rewards, rl_caption.programs.report as "
        "report\n"
        "from pathlib import Path\n"
        "for package in (rl_caption, rewards):\n"
        "    assert Path(package.__file__).is_relative_to(sysconfig.get_path('purelib')), "
        "package.__file__\n"
        "    assert (Path(package.__file__).parent / 'py.typed').is_file()\n"
        "assert (Path(report.__file__).parent / 'templates' / 'style.css').is_file()\n"
        "assert (Path(rl_caption.__file__).parent / 'lab' / 'papers.yaml').is_file()\n"
        "print(rl_caption.__version__, importlib.metadata.version('rl-caption'))\n"
    )
    assert run("python", "-c", code).split() == [__version__, __version__]


def test_recipes(run):
    listed = run("rl-caption", "configs", "list").split()
    assert set(shipped_configs()) <= set(listed)
    assert (
        run("rl-caption", "configs", "show", "demo")
        == (REPOSITORY / "configs" / "demo.yaml").read_text()
    )
    code = (
        "from rl_caption.cli.configuration import parse\n"
        "from rl_caption.config.schema import ScstConfig\n"
        "print(parse(ScstConfig, ['--config', 'demo_scst'], 'test').run.dir)\n"
    )
    assert run("python", "-c", code) == "runs/demo/scst\n"


def test_programs(run, tmp_path):
    assert "It can run here: rl-caption run demo" in run("rl-caption", "doctor")
    captioner, (row,) = tiny_captioner(), tiny_rows(1)
    captioner.save_pretrained(captioner.policy, tmp_path / "model")
    row["image"].save(tmp_path / "photo.png")
    printed = run(
        "rl-caption", "caption", "--model", tmp_path / "model", tmp_path / "photo.png"
    )
    path, _, caption = printed.partition("\t")
    assert path == str(tmp_path / "photo.png")
    assert set(caption.split()) <= set(captioner.tokenizer.get_vocab())
