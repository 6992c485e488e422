"""The tutorials run from top to bottom, as a reader would run them, at a tiny size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training_for_tests import LONGEST

ROOT = Path(__file__).parents[2]
TINY = {"IMAGES": 8, "XE_STEPS": 10, "SCST_STEPS": 6, "BATCH_SIZE": 4, "WIDTH": 16, "RESAMPLES": 10}
LEAVES = {
    "own_photos": "evaluation/both/comparison.json",
    "reward_of_your_own": "ablation/table.md",
    "judging_a_metric": "people/agreement.json",
}
"""Tutorial -> a file that it leaves."""


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.py")))
def test_tutorial(name: str, tmp_path: Path) -> None:
    source = (ROOT / f"docs/tutorials/{name}.py").read_text(encoding="utf-8")
    sizes = re.compile(rf"^({'|'.join(TINY)}) = \d+", re.MULTILINE)
    (tmp_path / "tutorial.py").write_text(sizes.sub(lambda size: f"{size[1]} = {TINY[size[1]]}", source))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tutorial.py"]
    longest = 4 * LONGEST  # a tutorial is several runs
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=longest)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / LEAVES[name]).stat().st_size > 0
    if name == "own_photos":
        assert len(json.loads((tmp_path / "evaluation/scst/predictions.json").read_text())) == 20
    if name == "reward_of_your_own":
        rows = re.findall(r"^\| *([\w-]+)", (tmp_path / "ablation/table.md").read_text(), re.MULTILINE)
        assert {"CIDEr-D", "mixture", "colours"} <= set(rows)
