"""Self-critical steps of two processes that train together on one machine (DDP over gloo), against one process.

    python -m benchmarks.processes [--processes 2] [--images 20] [--json FILE]

The step is that of ``benchmarks.scst_step`` on a CPU; processes are prepared as the programs do it. Every process has
one thread and ``--images`` images, so that twice the images in the same time would be twice as fast. The second
baseline is one process with as many threads.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.engine_memory import free_port, launched
from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import Shapes, build_bench, our_step
from rl_caption.types import CaptionBatch

TIME_LIMIT = 600.0
"""Seconds that a process may take for a step."""


def work(rank: int, processes: int, threads: int, shapes: Shapes, port: int, pipe: Any) -> None:
    """One process: take a step for each word from ``pipe``, answer when it is done, end at None."""
    from accelerate.state import AcceleratorState

    from rl_caption.config.schema import RunConfig, TrainConfig
    from rl_caption.training.engines import build_accelerator, prepare

    bench = build_bench(shapes, "cpu", "no")
    if processes > 1:
        os.environ.update(launched(rank, processes, port))
    AcceleratorState._reset_state(reset_partial_state=True)  # the model was built before the processes met
    bench.policy._is_accelerate_prepared = False
    with tempfile.TemporaryDirectory() as folder:
        bench.accelerator = build_accelerator(TrainConfig(threads=threads), RunConfig(dir=folder))
        bench.model, bench.optimizer = prepare(bench.accelerator, bench.policy, bench.optimizer)
        assert isinstance(bench.model, DistributedDataParallel) == (processes > 1)
        each = shapes.images // processes
        rows = slice(rank * each, (rank + 1) * each)
        inputs = {name: values[rows] for name, values in bench.batch.inputs.items()}
        batch = CaptionBatch(bench.batch.rows[rows], inputs)
        while (word := pipe.recv()) is not None:
            our_step(bench, batch)
            pipe.send(word)
    if processes > 1:
        torch.distributed.destroy_process_group()


def start_team(stack: ExitStack, processes: int, threads: int, shapes: Shapes, method: str) -> list[Any]:
    """Start processes that train together, ``shapes.images`` images each; return the ends of their pipes."""
    context: Any = multiprocessing.get_context(method)
    shapes, port, pipes = replace(shapes, images=shapes.images * processes), free_port(), []
    for rank in range(processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(rank, processes, threads, shapes, port, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        stack.callback(process.join, 30)
    stack.callback(end_team, pipes)
    return pipes


def end_team(pipes: Sequence[Any]) -> None:
    """Tell all processes to end."""
    for pipe in pipes:
        with suppress(BrokenPipeError):
            pipe.send(None)


def team_step(pipes: Sequence[Any]) -> None:
    """One step of all processes, as long as the slowest takes.

    Raises:
        RuntimeError: a process has ended or does not answer.
    """
    try:
        for pipe in pipes:
            pipe.send("step")
        for pipe in pipes:
            if not pipe.poll(TIME_LIMIT):
                raise TimeoutError(f"no answer within {TIME_LIMIT:g} s")
            pipe.recv()
    except (EOFError, OSError) as error:  # its own message is on stderr
        raise RuntimeError(f"one of {len(pipes)} processes ended or hangs: {error}") from error


def measure(
    timing: Timing, images: int = 20, processes: int = 2, shapes: Shapes | None = None, method: str = "spawn"
) -> Iterator[Measurement]:
    """Time for ``images`` images; ``method`` is how multiprocessing starts processes."""
    if timing.device != "cpu" or processes < 2:
        raise SystemExit("several processes: expected --device cpu and --processes of at least 2")
    shapes = replace(shapes or Shapes(), images=images)
    several, alone, threaded = f"{processes} processes", "one process, 1 thread", f"one process, {processes} threads"
    sizes = {several: (processes, 1), alone: (1, 1), threaded: (1, processes)}
    with ExitStack() as stack:
        teams = {name: partial(team_step, start_team(stack, *size, shapes, method)) for name, size in sizes.items()}
        times = timed(teams, Timing("cpu", timing.repeats), "processes")
    times[several] = [seconds / processes for seconds in times[several]]
    for baseline in (alone, threaded):
        yield compared(
            times, several, baseline, note=f"; seconds for {images} images, of which each process has as many"
        )


if __name__ == "__main__":
    command(__doc__, measure, images=20, processes=2)
