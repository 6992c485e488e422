"""A user's file with the name of a package: named in one line, however a program is started."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY


def started(words, folder):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("rewards.py", "rewards"),
        ("rewards/__init__.py", "rewards"),
        ("datasets.py", "datasets"),
    ],
)
def test_a_file_that_hides_a_package_is_named_in_one_line(file, package, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("class Brevity:\n    pass\n")
    ended = started(["-m", "rl_caption", "scst", "--help"], tmp_path)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert line.startswith(f"error: {tmp_path / file} hides the package {package!r}")
