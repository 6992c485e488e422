"""The core where ``rl_caption.lab`` cannot be imported."""

import subprocess
import sys

from tests.conftest import REPOSITORY

WITHOUT_LAB = """
import sys

sys.modules["rl_caption.lab"] = None
import rl_caption.programs.report.page, rl_caption.programs.train
from rl_caption.cli.main import main

assert main(["configs", "list"]) == 0
sys.exit(main(["judge", "--set", "scenes"]))
"""


def test_the_core_runs_without_the_lab_and_knows_none_of_its_programs():
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_LAB],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    assert "demo_scst" in ended.stdout
    assert "there is no program judge" in ended.stderr
