"""Plant faults in a copy of the package, and see which of them the tests catch.

``python -m tests.planted check`` plants the faults of ``faults.jsonl`` one after the other;
``python -m tests.planted draw FILE ... --number 50 --seed 0`` draws some at random. A fault is
caught if the tests named beside it fail.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from tests.planted.mutants import draw

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
FOLDERS = ("rl_caption", "rewards", "tests", "configs", "scripts", "docs", "benchmarks")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def tests_of(file: str) -> list[str]:
    """The tests that ``tests.json`` names for the longest beginning of ``file``."""
    table = json.loads((HERE / "tests.json").read_text())
    beginnings = [key for key in table if file.startswith(key)]
    if not beginnings:
        raise SystemExit(f"{file}: tests.json names no tests for it")
    return table[max(beginnings, key=len)]


def copy_of_project(folder: Path) -> Path:
    """Copy what tests need into ``folder``."""
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip
    for file in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
    ):
        shutil.copy(ROOT / file, folder / file)
    return folder


def is_caught(folder: Path, file: str, text: str, tests: list[str], limit: int) -> bool:
    """Whether ``tests`` fail, or pass ``limit`` seconds, where ``file`` reads ``text``."""
    original = (folder / file).read_text(encoding="utf-8")
    (folder / file).write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(folder)}
    try:
        result = subprocess.run(
            [*command, "-m", "not slow"], cwd=folder, env=environment, timeout=limit,
            capture_output=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        (folder / file).write_text(original, encoding="utf-8")
    return result.returncode != 0


def listed(only: str) -> Iterator[tuple[str, str, str]]:
    """Yield (file, what, text) of the faults of ``faults.jsonl`` in files that begin ``only``."""
    for line in (HERE / "faults.jsonl").read_text(encoding="utf-8").splitlines():
        fault = json.loads(line)
        if not fault["file"].startswith(only):
            continue
        text = (ROOT / fault["file"]).read_text(encoding="utf-8")
        if text.count(fault["before"]) != 1:
            raise SystemExit(f"{fault['file']}: not there once: {fault['before']!r}")
        yield (
            fault["file"],
            fault["before"],
            text.replace(fault["before"], fault["after"]),
        )


def drawn(files: list[str], number: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield (file, what, text) of ``number`` faults drawn from ``files``, by their lengths."""
    rng = random.Random(seed)
    weights = [len((ROOT / file).read_text()) for file in files]
    counts = Counter(rng.choices(files, weights, k=number))
    for file, count in sorted(counts.items()):
        for line, name, text in draw(ROOT / file, count, rng):
            yield file, f"line {line}: {name}", text


def main() -> int:
    """Run; return 1 if fewer than 95 % of the faults are caught."""
    parser = argparse.ArgumentParser(prog="tests.planted", description=__doc__)
    parser.add_argument("mode", choices=("check", "draw"))
    parser.add_argument("files", nargs="*", help="draw: Python files")
    parser.add_argument("--only", default="", help="check: files that begin like this")
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=300, help="seconds for a fault")
    args = parser.parse_args()
    faults = list(
        listed(args.only)
        if args.mode == "check"
        else drawn(args.files, args.number, args.seed)
    )
    caught: Counter[str] = Counter()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_of_project(Path(temporary))
        for file in sorted({file for file, _, _ in faults}):
            text = (ROOT / file).read_text(encoding="utf-8")
            if is_caught(folder, file, text, tests_of(file), args.limit):
                raise SystemExit(f"{file}: its tests fail without a fault")
        for file, what, text in tqdm(faults, unit="fault"):
            subject = str(Path(file).parent)
            total[subject] += 1
            if is_caught(folder, file, text, tests_of(file), args.limit):
                caught[subject] += 1
            else:
                tqdm.write(f"NOT CAUGHT {file} {what}")
    for subject in sorted(total):
        print(f"{subject:32} {caught[subject]:4} of {total[subject]:4} caught")
    share = caught.total() / max(1, total.total())
    print(f"{'all':32} {caught.total():4} of {total.total():4} caught, {share:.1%}")
    return int(share < 0.95)


if __name__ == "__main__":
    sys.exit(main())
