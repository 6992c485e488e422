"""Plant faults in a copy of the package, and see which of them the tests catch.

``python -m tests.planted check`` plants the faults of ``faults.jsonl`` one after the
other; ``python -m tests.planted draw FILE ... --number 50 --seed 0`` draws some at
random. A fault is caught if a test fails: one that runs its line (``--coverage``), or
one that ``tests.json`` names.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tests.planted.mutants import draw
from tests.planted.run import HERE, ROOT, Selection, copy_of_project, tests_pass

PRELOADED = ("torch", "transformers", "datasets", "accelerate", "scipy.stats", "pytest")


@dataclass
class Fault:
    """A fault in a line of a file of the package, and the file's text with the fault."""

    file: str
    line: int
    what: str
    text: str


def listed(only: str) -> Iterator[Fault]:
    """Yield the faults of ``faults.jsonl`` in files that begin with ``only``."""
    for row in (HERE / "faults.jsonl").read_text(encoding="utf-8").splitlines():
        fault = json.loads(row)
        file, before = fault["file"], fault["before"]
        if not file.startswith(only):
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise SystemExit(f"{file}: not there once: {before!r}")
        line = 1 + text[: text.index(before)].count("\n")
        changed = text.replace(before, fault["after"])
        yield Fault(file, line, f"{before!r} -> {fault['after']!r}", changed)


def drawn(files: list[str], number: int, seed: int) -> Iterator[Fault]:
    """Yield ``number`` faults drawn from ``files``, in proportion to their lengths."""
    rng = random.Random(seed)
    weights = [len((ROOT / file).read_text()) for file in files]
    counts = Counter(rng.choices(files, weights, k=number))
    for file, count in sorted(counts.items()):
        for line, name, text in draw(ROOT / file, count, rng):
            yield Fault(file, line, name, text)


def is_caught(fault: Fault, folder: Path, select: Selection, limit: float) -> bool:
    """Whether a test fails, or takes more than ``limit`` seconds, with ``fault``."""
    tests = select(fault.file, fault.line)
    if not tests:
        return False
    path = folder / fault.file
    original = path.read_text(encoding="utf-8")
    write(path, fault.text)
    try:
        return not tests_pass(folder, tests, limit, folder / "log.txt")
    finally:
        write(path, original)


MOMENTS = itertools.count(1_000_000_000)


def write(path: Path, text: str) -> None:
    """Write ``text`` with a new modification time, by which Python detects stale .pyc
    files.
    """
    path.write_text(text, encoding="utf-8")
    moment = next(MOMENTS)
    os.utime(path, (moment, moment))


def main() -> int:
    """Run; return 1 if fewer than 95 % of the faults are caught."""
    parser = argparse.ArgumentParser(prog="tests.planted", description=__doc__)
    parser.add_argument("mode", choices=("check", "draw"))
    parser.add_argument("files", nargs="*", help="draw: Python files")
    parser.add_argument("--only", default="", help="check: files that begin like this")
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=300, help="seconds for a fault")
    parser.add_argument("--coverage", type=Path, help="of pytest --cov-context=test")
    parser.add_argument("--junit", type=Path, help="durations, of pytest --junitxml")
    parser.add_argument("--seconds", type=float, default=60, help="tests for a fault")
    args = parser.parse_args()
    faults = list(
        listed(args.only)
        if args.mode == "check"
        else drawn(args.files, args.number, args.seed)
    )
    for name in PRELOADED:  # not the package: the forked process imports its own copy
        __import__(name)
    select = Selection(args.coverage, args.junit, args.seconds)
    caught: Counter[str] = Counter()
    total = Counter(str(Path(fault.file).parent) for fault in faults)
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_of_project(Path(temporary))
        for fault in tqdm(faults, unit="fault"):
            if is_caught(fault, folder, select, args.limit):
                caught[str(Path(fault.file).parent)] += 1
            else:
                tqdm.write(f"NOT CAUGHT {fault.file}:{fault.line} {fault.what}")
    for subject in sorted(total):
        print(f"{subject:32} {caught[subject]:4} of {total[subject]:4} caught")
    share = caught.total() / max(1, total.total())
    print(f"{'all':32} {caught.total():4} of {total.total():4} caught, {share:.1%}")
    return int(share < 0.95)


if __name__ == "__main__":
    sys.exit(main())
