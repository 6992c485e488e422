"""Self-critical steps of two processes that train one model on one machine (DDP over gloo), against
one process.

    python -m benchmarks.processes [--processes 2] [--images 20] [--json FILE]

The step is that of ``benchmarks.scst_step`` on a CPU; processes are prepared as the programs do it.
Every process has one thread and ``--images`` images, so that twice the images in the same time
would be twice as fast. The second baseline is one process with as many threads.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engine_memory import launched
from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import Shapes, build_bench, our_step
from rl_caption.runtime.types import CaptionBatch

trained: list[Any] = []
"""In a process that trains: its bench and its part of the batch."""


def join(rank: int, processes: int, threads: int, shapes: Shapes, port: int) -> None:
    """Begin to train as one of several processes."""
    from accelerate.state import AcceleratorState

    from rl_caption.config.schema import RunConfig, TrainConfig
    from rl_caption.runtime.engines import build_accelerator, prepare

    bench = build_bench(shapes, "cpu", "no")
    if processes > 1:
        os.environ.update(launched(rank, processes, port))
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # the model was built before the process group
    bench.policy._is_accelerate_prepared = False
    bench.accelerator = build_accelerator(TrainConfig(threads=threads), RunConfig())
    bench.model, bench.optimizer = prepare(
        bench.accelerator, bench.policy, bench.optimizer
    )
    assert isinstance(bench.model, DistributedDataParallel) == (processes > 1)
    each = shapes.images // processes
    rows = slice(rank * each, (rank + 1) * each)
    inputs = {name: values[rows] for name, values in bench.batch.inputs.items()}
    trained[:] = [bench, CaptionBatch(bench.batch.rows[rows], inputs)]


def step() -> None:
    """A step in a process that trains."""
    our_step(*trained)


def step_of_all(workers: Sequence[Executor]) -> None:
    """One step of all processes, as long as the slowest takes."""
    for running in [worker.submit(step) for worker in workers]:
        running.result()


def measure(
    timing: Timing,
    images: int = 20,
    processes: int = 2,
    shapes: Shapes | None = None,
    method: str = "spawn",
) -> Iterator[Measurement]:
    """Time for ``images`` images; ``method`` is how multiprocessing starts processes."""
    if timing.device != "cpu" or processes < 2:
        raise SystemExit(
            "several processes: expected --device cpu and --processes of at least 2"
        )
    several = f"{processes} processes"
    single = "one process, 1 thread"
    threaded = f"one process, {processes} threads"
    variants = {}
    context = multiprocessing.get_context(method)
    with ExitStack() as stack:
        for name, (count, threads) in {
            several: (processes, 1),
            single: (1, 1),
            threaded: (1, processes),
        }.items():
            settings = (
                count,
                threads,
                replace(shapes or Shapes(), images=images * count),
                get_free_port(),
            )
            pools = [
                ProcessPoolExecutor(1, context, join, (rank, *settings))
                for rank in range(count)
            ]
            variants[name] = partial(
                step_of_all, [stack.enter_context(pool) for pool in pools]
            )
        times = timed(variants, timing, "processes")
    times[several] = [seconds / processes for seconds in times[several]]
    for baseline in (single, threaded):
        note = f"; seconds for {images} images, of which each process has as many"
        yield compared(times, several, baseline, note=note)


if __name__ == "__main__":
    command(__doc__, measure, images=20, processes=2)
