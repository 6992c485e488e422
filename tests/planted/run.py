"""Run tests on a copy of the package, in a fork of a process that has imported torch."""

import json
import os
import shutil
import signal
import sqlite3
import sys
import time
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FOLDERS = ("rl_caption", "rewards", "tests", "configs", "scripts", "docs", "benchmarks")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def copy_of_project(folder: Path) -> Path:
    """Copy what tests need into ``folder``."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for file in FILES:
        shutil.copy(ROOT / file, folder / file)
    return folder


class Selection:
    """Choose the tests of a fault: tests that run its line, or listed in
    ``tests.json``.

    ``coverage`` is the file that ``pytest --cov --cov-context=test`` writes, ``junit``
    the durations that ``pytest --junitxml`` writes with ``-o junit_family=xunit1``.
    """

    def __init__(self, coverage: Path | None, junit: Path | None, seconds: float):
        self.coverage = sqlite3.connect(coverage) if coverage else None
        self.durations: dict[str, float] = defaultdict(float)
        self.seconds = seconds
        self.table = json.loads((HERE / "tests.json").read_text(encoding="utf-8"))
        for case in xml.parse(junit).iter("testcase") if junit else ():
            test = f"{case.get('file')}::{case.get('name')}"
            self.durations[test] = float(case.get("time") or 0)

    def __call__(self, file: str, line: int) -> list[str]:
        """Tests for a fault in ``line`` of ``file``, the quickest first; empty where
        none covers it.
        """
        if self.coverage is None:
            return self._listed(file)
        chosen, total = [], 0.0
        tests = self._covering(file, line) or self._listed(file)  # a line of a module
        for test in sorted(tests, key=lambda test: (self.durations[test], test)):
            total += self.durations[test]
            if chosen and total > self.seconds:
                break
            chosen.append(test)
        return chosen

    def _listed(self, file: str) -> list[str]:
        beginnings = [key for key in self.table if file.startswith(key)]
        return self.table[max(beginnings, key=len)] if beginnings else []

    def _covering(self, file: str, line: int) -> set[str]:
        rows = self.coverage.execute(
            "select distinct context.context from arc join context on context.id = "
            "arc.context_id join file on file.id = arc.file_id where file.path like ? "
            "and (abs(arc.fromno) = ? or abs(arc.tono) = ?)",
            (f"%/{file}", line, line),
        )
        contexts = {context for (context,) in rows if context}
        return {context.rsplit("|", 1)[0] for context in contexts}


def tests_pass(folder: Path, tests: list[str], limit: float, log: Path) -> bool:
    """Whether ``tests`` pass in ``folder`` within ``limit`` seconds; the output goes to ``log``."""
    child = os.fork()
    if child == 0:
        _run(folder, tests, log)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run(folder: Path, tests: list[str], log: Path) -> None:
    """Run pytest in this process, which ends here."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.update(ENVIRONMENT, PYTHONPATH=str(folder))
    sys.path[:] = [str(folder)] + [
        path for path in sys.path if path not in ("", str(ROOT))
    ]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    status = 3
    try:
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        status = pytest.main([*options, f"--rootdir={folder}", *tests])
    finally:
        os._exit(int(status))
