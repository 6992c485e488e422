"""Steps of the demo with the package's wait of CPU threads (GOMP_SPINCOUNT) against libgomp's
default.

    python -m benchmarks.threads [--spin 3000] [--others 1] [--repeats 2] [--json FILE]

By default threads that wait for another one spin for milliseconds; programs of this package let
them sleep sooner. Both variants run the same command in turn, ``configs/demo_xe.yaml`` and then
``configs/demo_scst.yaml`` with few steps: first alone, then beside ``--others`` processes that do
nothing but count, which this program starts and ends. A time is the median of ``time/step`` over
the second half of the steps. ``--spin`` tries another count than the package's. No other program
should run at the same time; about five minutes on two cores.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import Measurement, Timing, Timings, command, compared

ROOT = Path(__file__).parents[1]
LIBGOMP = "300000"
"""Rounds that libgomp waits by default."""
STEPS = {"xe": 60, "scst": 24}
RECIPES = {"xe": "demo_xe", "scst": "demo_scst"}
FEW = {"num_train": 1000, "num_val": 8, "num_test": 0, "num_unseen": 0}


def demo_config(program: str, folder: Path, steps: int, **train: Any) -> Path:
    """Write a recipe of the demo with few steps and scenes; the self-critical run starts from
    ``folder/start``.
    """
    config = yaml.safe_load((ROOT / "configs" / f"{RECIPES[program]}.yaml").read_text())
    if program == "scst":
        config["model"] = {"init": str(folder / "start/export/last")}
    config["data"]["kwargs"] = FEW
    config["train"] |= {"max_steps": steps, **train}
    config["eval"] |= {"every": steps}
    config["run"] = {"dir": str(folder / "start"), "log_every": 1}
    file = folder / f"{program}.json"
    file.write_text(json.dumps(config))
    return file


def train(program: str, config: Path, run: Path, spin: str | None) -> float:
    """Train and return the seconds of a step; without ``spin`` the package chooses how threads
    wait.
    """
    environment = {
        key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"
    }
    environment |= {"GOMP_SPINCOUNT": spin} if spin else {}
    words = [sys.executable, "-m", "rl_caption", program, "--config", str(config)]
    words += ["--run.dir", str(run)]
    subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seconds = [line["time/step"] for line in lines if "time/step" in line]
    return statistics.median(seconds[len(seconds) // 2 :])


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Inside the ``with``, so many processes count without end."""
    busy = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(busy) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(
    timing: Timing,
    spin: int = 0,
    others: int = 1,
    steps: dict[str, int] = STEPS,
    **sizes: Any,
) -> Iterator[Measurement]:
    """Time of both steps, alone and beside other work; ``sizes`` replace options of training."""
    if timing.device != "cpu":
        raise SystemExit("threads: expected --device cpu")
    ours = f"GOMP_SPINCOUNT {spin}" if spin else "the package's wait"
    theirs = f"libgomp's default, {LIBGOMP}"
    variants = {ours: str(spin) if spin else None, theirs: LIBGOMP}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = {
            program: demo_config(program, folder, count, **sizes)
            for program, count in steps.items()
        }
        train("xe", configs["xe"], folder / "start", None)
        for program, config in configs.items():
            for count in (0, others):
                times: Timings = {variant: [] for variant in variants}
                for number in range(timing.repeats):
                    for variant, value in variants.items():
                        run = folder / f"{program}-{count}-{number}-{value}"
                        with other_work(count):
                            times[variant].append(train(program, config, run, value))
                where = f"beside {count} busy processes" if count else "alone"
                yield compared(
                    times, ours, theirs, note=f"; {RECIPES[program]}, {where}"
                )


if __name__ == "__main__":
    command(__doc__, measure, repeats=2, spin=0, others=1)
