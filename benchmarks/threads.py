"""A self-critical step whose threads soon sleep while they wait, as programs set it, against libgomp's default.

    python -m benchmarks.threads [--others 2] [--images 2] [--json FILE]

By default threads that wait for another one spin for milliseconds. Both variants take the same steps in turn, each in a
process of its own with as many threads as there are cores: first alone, then beside ``--others`` processes that do
nothing but count, which this program starts and ends. The step is that of ``benchmarks.scst_step`` on a CPU, with two
layers each. No other program should run at the same time.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import Bench, Shapes, build_bench, our_step
from rl_caption.runtime.threads import WAIT_VARIABLES, granted_cores, wait_variables

SLEEP, SPIN = "waiting threads sleep", "they spin, as by default"
SMALL = {"encoder_layers": 2, "decoder_layers": 2}
benches: list[Bench] = []
"""In a process that trains: its bench."""


def begin(shapes: Shapes) -> None:
    """Prepare the step in a process that trains."""
    torch.set_num_threads(granted_cores())
    benches[:] = [build_bench(shapes, "cpu", "no")]


def step() -> None:
    """A step in a process that trains."""
    (bench,) = benches
    our_step(bench, bench.batch)


def start(variables: Mapping[str, str], shapes: Shapes) -> ProcessPoolExecutor:
    """A process that trains, with these environment variables when it loads torch; one step is taken."""
    with patch.dict(os.environ):
        for name in WAIT_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin, (shapes,))
        pool.submit(step).result()
    return pool


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Inside the ``with``, so many processes count without end."""
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(
    timing: Timing, images: int = 2, others: int = os.cpu_count() or 1, shapes: Shapes | None = None
) -> Iterator[Measurement]:
    """Time of a step, alone and beside other work."""
    if timing.device != "cpu":
        raise SystemExit("threads: expected --device cpu")
    size = shapes or Shapes(SMALL, words=2000, images=images)
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(start(variables, size))
            for name, variables in {SLEEP: wait_variables({}), SPIN: {}}.items()
        }
        variants = {
            name: lambda pool=pool: pool.submit(step).result() for name, pool in pools.items()
        }
        for where, count in (("alone", 0), (f"beside {others} busy processes", others)):
            with other_work(count):
                times = timed(variants, timing, where)
            note = f"; a step of {size.images} images, {granted_cores()} threads, {where}"
            yield compared(times, SLEEP, SPIN, note=note)


if __name__ == "__main__":
    command(__doc__, measure, images=2, others=os.cpu_count() or 1)
