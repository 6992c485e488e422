"""What importing the packages brings along."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "open_clip", "accelerate", "trl", "deepspeed", "pycocoevalcap", "PIL")


@pytest.mark.parametrize("modules", ["rewards", "rl_caption", "rewards.text.cider"])
def test_a_package_is_imported_without_its_heavy_libraries(modules: str) -> None:
    code = f"import sys, {modules}; print(*sorted(set(sys.modules) & set({HEAVY})))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
