"""What the maintainer of the core has to know, counted: the table of docs/design.md. No times.

    python -m benchmarks.counts

The smallest self-critical run of ``benchmarks.startup`` (CIDEr-D, 4 generated images, one step) under
``sys.setprofile``. A function of ``rl_caption`` or ``rewards`` counts once, also if it runs while its module is
imported; comprehensions and lambdas do not. From when the configuration is whole, a module is handed it where a
function of it is called with the whole or with a section; if it had been handed it
before, with others in between, that is a return.
"""

import ast
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Collection
from contextlib import chdir
from itertools import count
from pathlib import Path
from types import CodeType, FrameType

import rewards
import rl_caption
from benchmarks.startup import FILES
from benchmarks.startup import run as run_python
from rl_caption.__main__ import run

PACKAGES = tuple(Path(str(package.__file__)).parent for package in (rl_caption, rewards))
CONFIGURATIONS = {
    f"rl_caption.{name}" for name in ("config.schema", "captioners.config", "monitoring.config")
}
"""Modules of the classes of a run's configuration and of its sections."""
EMPTY_WORDS = "own found kind made given mine theirs each wanted taken known shown done part parts"
"""Names that do not say what a value is."""
PARTICIPLE = re.compile(r"_*(?!(embed|feed|need|seed|speed|shed|markdown)$)[a-z]*(ed|own|ten)")


class Calls:
    """The calls of a run until its first step ends, for ``sys.setprofile``."""

    def __init__(self) -> None:
        self.before, self.within = set[CodeType](), set[CodeType]()
        self.modules: list[str] = []  # which are handed the configuration before the step, in order
        self.step: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """A function is called or returns."""
        code, names = frame.f_code, frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if event == "return" and frame is self.step:
            self.step = None
        if event != "call" or not code.co_filename.startswith(
            tuple(f"{package}{os.sep}" for package in PACKAGES)
        ):
            return
        if code.co_qualname == "SelfCriticalTask.training_step":
            self.step = frame
        if code.co_name.startswith("<") or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # a module, a class or a comprehension
        if self.step is not None:
            self.within.add(code)
        elif not self.within:
            self.before.add(code)
            classes = {type(frame.f_locals.get(name)) for name in names}
            sections = {
                section.__name__ for section in classes if section.__module__ in CONFIGURATIONS
            } - {"Decoding"}
            if (
                sections
                and (self.modules or "ScstConfig" in sections)
                and self.modules[-1:] != [code.co_filename]
            ):
                self.modules.append(code.co_filename)


def calls_of_a_run() -> Calls:
    """Train a tiny captioner by cross-entropy in another process; the calls of its first self-critical step here."""
    calls = Calls()
    with tempfile.TemporaryDirectory() as folder:
        for file in ("xe.json", "scst.json"):
            Path(folder, file).write_text(json.dumps(FILES[file]))
        run_python("xe", ["-m", "rl_caption", "xe", "--config", "xe.json"], folder, count())
        with chdir(folder):
            sys.setprofile(calls)
            code = run("scst", ["--config", "scst.json", "--run.dir", "scst"])
            sys.setprofile(None)
    if code != 0:
        sys.exit("the run failed")
    return calls


def in_files(functions: Collection[CodeType]) -> str:
    """How many functions, and in how many files."""
    return f"{len(functions)} ({len({code.co_filename for code in functions})})"


def empty_names() -> tuple[int, int]:
    """How often an empty word is bound in both packages, and how many functions are named by one participle."""
    words, participles = 0, 0
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                words += node.id in EMPTY_WORDS.split()
            elif isinstance(node, ast.arg):
                words += node.arg in EMPTY_WORDS.split()
            elif isinstance(node, ast.FunctionDef):
                participles += PARTICIPLE.fullmatch(node.name) is not None
    return words, participles


def main() -> None:
    """Print the counts as rows of a table."""
    calls = calls_of_a_run()
    returns = len(calls.modules) - len(set(calls.modules))
    counts = {
        "functions of ours before the first self-critical step, and their files": in_files(
            calls.before
        ),
        "functions of ours in it, and their files": in_files(calls.within),
        "modules that are handed the configuration; returns": f"{len(set(calls.modules))}; {returns}",
        "bindings of empty words; functions named by one participle": "{}; {}".format(
            *empty_names()
        ),
    }
    print("\n".join(f"| {name} | {text} |" for name, text in counts.items()))


if __name__ == "__main__":
    main()
