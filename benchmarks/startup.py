"""Seconds until a program can begin: imports, ``--help``, tiny runs, as processes of
their own, against Python alone.

    python -m benchmarks.startup [--json FILE]

The tiny runs take one step: 8 generated images, a Transformer of one layer. They
measure the time to start, because the step, its validation and its checkpoint take
fractions of a second. The detail has the CPU seconds, too, which other programs on the
machine change less.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.harness import Measurement, Timing, command, compared, timed

NOTHING = "python -c pass"
COMMANDS = {
    NOTHING: ["-c", "pass"],
    "import rewards": ["-c", "import rewards"],
    "import rl_caption": ["-c", "import rl_caption"],
    "import rewards.text.cider": ["-c", "import rewards.text.cider"],
    "rl_caption --help": ["-m", "rl_caption", "--help"],
    "rl_caption scst --help": ["-m", "rl_caption", "scst", "--help"],
    "import torch": ["-c", "import torch"],
    "import transformers.modeling_utils": ["-c", "import transformers.modeling_utils"],
    "import rl_caption.programs.train": ["-c", "import rl_caption.programs.train"],
}
WORLD = {
    "format": "scenes",
    "kwargs": {
        "num_train": 4,
        "num_val": 2,
        "num_test": 2,
        "num_unseen": 0,
        "image_size": 32,
    },
}
SHAPE = {
    "image_size": 32, "patch_size": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2,
    "ffn_dim": 16, "max_positions": 24,
}  # fmt: skip
TRAIN = {"max_steps": 1, "batch_size": 4}
START = "start/export/best"
FILES: dict[str, Any] = {
    "captions.json": [
        {"image_id": "1", "caption": "a dog runs"},
        {"image_id": "2", "caption": "a red car"},
    ],
    "references.json": {
        "1": ["a dog runs", "the brown dog is running"],
        "2": ["a red car is parked", "a car"],
    },
    "xe.json": {
        "model": {"kwargs": SHAPE},
        "data": WORLD,
        "train": TRAIN,
        "run": {"dir": "start"},
    },
    "scst.json": {
        "model": {"init": START},
        "data": WORLD,
        "train": TRAIN,
        "reward": {"terms": {"cider": {}}},
    },
    "model.json": {"model": START, "data": WORLD, "metrics": ["cider"], "out": "out"},
}
"""Name -> content of the files of the tiny runs."""
RUNS = {
    "score, cider": "score --reward cider --captions captions.json --references references.json",
    "evaluate a file": "evaluate --predictions captions.json --references references.json --metrics cider --out out",
    "xe, 1 step": "xe --config xe.json --run.resume=false --run.dir xe{number}",
    "scst, 1 step": "scst --config scst.json --run.dir scst{number}",
    "evaluate a model": "evaluate --config model.json",
}
"""Name -> words of a program that is started in a folder with ``FILES`` and a trained captioner."""
cpu_seconds: dict[str, list[float]] = {}


def run(
    name: str, arguments: Sequence[str], folder: str, numbers: Iterator[int]
) -> None:
    """Start a Python process, wait for its end and note its CPU seconds; raises if it fails."""
    words = [
        word.format(number=next(numbers)) if "{" in word else word for word in arguments
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, *words],
        check=True,
        capture_output=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    cpu_seconds.setdefault(name, []).append(spent)


def measure(timing: Timing) -> Iterator[Measurement]:
    """Elapsed time of each command."""
    cpu_seconds.clear()
    commands = COMMANDS | {
        name: ["-m", "rl_caption", *words.split()] for name, words in RUNS.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        for file, content in FILES.items():
            Path(folder, file).write_text(json.dumps(content))
        if RUNS:
            run(
                "training",
                ["-m", "rl_caption", "xe", "--config", "xe.json"],
                folder,
                count(),
            )
        variants = {
            name: partial(run, name, words, folder, count())
            for name, words in commands.items()
        }
        times = timed(variants, Timing("cpu", timing.repeats), "starting")
    for name in commands:
        if name != NOTHING:
            note = f"; {statistics.median(cpu_seconds[name]):.2g} CPU seconds"
            yield compared(times, name, NOTHING, "x the time", note)


if __name__ == "__main__":
    command(__doc__, measure)
