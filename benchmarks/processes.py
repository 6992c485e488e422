"""Self-critical steps of two processes that train together on one machine, against one process.

    python -m benchmarks.processes [--processes 2] [--images 20] [--json FILE]

The steps are the trainer's, on the CPU, with the captioner and the reward of ``benchmarks.scst_step``; processes are
started and joined (DDP over gloo) as the programs do it. Every process has one thread and ``--images`` images, whether
it is alone or not, so that twice the images in the same time would be twice as fast. For information: one process with
as many threads. Where the rest goes is told by the same processes without the exchange of gradients, and by processor
time, which other programs on the machine touch little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.engine_memory import free_port, launched
from benchmarks.harness import Measurement, Timing, add_timing, faster, paired, report, timing_of
from benchmarks.scst_step import Bench, Shapes, build_bench
from rl_caption.training.accumulation import Averages
from rl_caption.types import CaptionBatch

IMAGES = 20
"""Images of each process."""
ANSWER = 600.0
"""Seconds that a process may take for a step."""


@dataclass
class Watched:
    """A task whose log is also kept as this process has it, before averages over processes are taken."""

    task: Any
    name: str = "scst"
    own: dict[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> list[dict[str, Any]]:
        return self.task.samples

    def training_step(self, batches: Sequence[CaptionBatch], step: int) -> Averages:
        averages = self.task.training_step(batches, step)
        self.own = dict(averages.sums)
        return averages


def work(rank: int, processes: int, threads: int, shapes: Shapes, port: int, pipe: Any) -> None:
    """One process: answer each word from ``pipe`` (together, apart, exchange) with what it took, until None."""
    bench = build_bench(shapes, "cpu", "no")
    if processes > 1:
        os.environ.update(launched(rank, processes, port))
    with tempfile.TemporaryDirectory() as folder:
        steps = build_steps(bench, threads, Path(folder))
        each = shapes.images // processes
        rows = slice(rank * each, (rank + 1) * each)
        inputs = {name: values[rows] for name, values in bench.batch.inputs.items()}
        batch = CaptionBatch(bench.batch.rows[rows], inputs)
        while (word := pipe.recv()) is not None:
            started, computed = time.perf_counter(), time.process_time()
            details = steps[word](batch)
            took = {"seconds": time.perf_counter() - started, "computed": time.process_time() - computed}
            pipe.send(took | details)
    if processes > 1:
        torch.distributed.destroy_process_group()


def build_steps(bench: Bench, threads: int, folder: Path) -> dict[str, Any]:
    """The trainer's step, the same without an exchange of gradients, and the exchange of as many numbers alone."""
    from accelerate.state import AcceleratorState

    from rl_caption.build import build_accelerator
    from rl_caption.config import RunConfig, XeConfig, XeTrainConfig
    from rl_caption.engines import prepare
    from rl_caption.scst.advantages import greedy
    from rl_caption.scst.step import SelfCriticalTask
    from rl_caption.training.loop import Trainer
    from rl_caption.training.setup import Context
    from rl_caption.types import TrainState

    AcceleratorState._reset_state(reset_partial_state=True)  # the benchmark's model was built alone
    train = XeTrainConfig(max_steps=1, micro_batch_size=1, lr=0, threads=threads)
    config = XeConfig(train=train, run=RunConfig(dir=str(folder)))
    accelerator = build_accelerator(config.train, config.run)
    config.train.batch_size = accelerator.num_processes
    context = Context(config, accelerator, train_rows=[], val_rows=[], micro_batch_size=1)
    policy, decoding = bench.policy, bench.decoding
    policy._is_accelerate_prepared = False  # else it would stay alone
    model, optimizer = prepare(accelerator, policy, torch.optim.Adam(policy.parameters()))

    def step(model: nn.Module, batch: CaptionBatch) -> dict[str, float]:
        task = Watched(SelfCriticalTask(accelerator, bench.captioner, model, bench.reward, greedy, decoding))
        nothing: Any = None  # of the loop only steps are taken
        trainer = Trainer(context, task, model, optimizer, list, TrainState(), validate=nothing, export=nothing)
        trainer._step([batch])
        return task.own | {"gradient": float(policy.get_output_embeddings().weight.grad.norm())}

    numbers = torch.zeros(sum(parameter.numel() for parameter in policy.parameters()))

    def exchange(batch: CaptionBatch) -> dict[str, float]:
        torch.distributed.all_reduce(numbers)
        return {}

    return {"together": partial(step, model), "apart": partial(step, policy), "exchange": exchange}


@dataclass(frozen=True)
class Team:
    """Processes that train together, and the ends of their pipes."""

    processes: Sequence[Any]
    pipes: Sequence[Any]

    @classmethod
    def start(cls, processes: int, threads: int, shapes: Shapes, start: str = "spawn") -> Team:
        """Start them. ``shapes.images`` is for each; ``start`` is how multiprocessing starts them."""
        context: Any = multiprocessing.get_context(start)
        shapes, port = replace(shapes, images=shapes.images * processes), free_port()
        ends = [context.Pipe() for _ in range(processes)]
        started = [
            context.Process(target=work, args=(rank, processes, threads, shapes, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(started, ends, strict=True):
            process.start()
            theirs.close()
        return cls(started, [ours for ours, _ in ends])

    def end(self) -> None:
        """Tell all of them, then wait."""
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(30)

    def take(self, word: str) -> list[dict[str, float]]:
        """What every process took for the same work at the same time.

        Raises:
            RuntimeError: one has ended or does not answer.
        """
        found: list[dict[str, float]] = []
        try:
            for pipe in self.pipes:
                pipe.send(word)
            for pipe in self.pipes:
                if not pipe.poll(ANSWER):
                    raise TimeoutError(f"no answer within {ANSWER:g} s")
                found.append(pipe.recv())
        except (EOFError, OSError) as error:  # its own message is on stderr
            raise RuntimeError(f"{word!r}: one of {len(self.pipes)} processes ended or hangs: {error}") from error
        return found


Round = dict[str, list[dict[str, float]]]
"""Variant -> what each of its processes took, in seconds."""


def measure(shapes: Shapes, timing: Timing, processes: int = 2) -> list[Measurement]:
    """Images/s of processes together against one; ``shapes.images`` is for each process."""
    return table_of(take_rounds(shapes, timing.repeats, processes), shapes, processes)


def take_rounds(shapes: Shapes, repeats: int, processes: int, start: str = "spawn") -> list[Round]:
    """Every variant in turn within a round; a first round, which is not counted, warms up."""
    with ExitStack() as stack:

        def team(count: int, threads: int) -> Team:
            started = Team.start(count, threads, shapes, start)
            stack.callback(started.end)
            return started

        several = team(processes, 1)
        variants = {
            "one process, 1 thread": (team(1, 1), "together"),
            f"one process, {processes} threads": (team(1, processes), "together"),
            f"{processes} processes": (several, "together"),
            "without exchange": (several, "apart"),
            "exchange alone": (several, "exchange"),
        }
        return [
            {name: workers.take(word) for name, (workers, word) in variants.items()}
            for _ in tqdm(range(repeats + 1), "processes", leave=False, disable=None)
        ][1:]


def table_of(rounds: Sequence[Round], shapes: Shapes, processes: int) -> list[Measurement]:
    """Ratios within each round; a step is as long as its slowest process."""
    names = list(rounds[0])
    times = {name: [max(took["seconds"] for took in one[name]) for one in rounds] for name in names}
    one, threaded, several, apart, alone = names
    each = {  # as though every variant had one process's images
        name: [value / (processes if name in (several, apart) else 1) for value in values]
        for name, values in times.items()
    }
    note = f"; {shapes.images} images a process, seconds for them"
    rows = [
        faster(each, name, baseline, note) for name, baseline in ((several, one), (several, threaded), (apart, one))
    ]
    work = [statistics.fmean(took["computed"] for took in found[several]) for found in rounds]
    ratios = paired(work, [found[one][0]["computed"] for found in rounds])
    detail = (
        f"{statistics.median(work):.3g} s for {shapes.images} images; rounds {min(ratios):.2f} to {max(ratios):.2f}"
    )
    rows.append(Measurement(f"{several}: processor time of each", one, statistics.median(ratios), "x the time", detail))
    lost = [(a - b) / a for a, b in zip(times[several], times[apart], strict=True)]
    bare, size = paired(times[alone], times[several]), statistics.median(times[alone])
    waits = [spread([took["time/rollout"] + took["time/reward"] for took in found[several]]) for found in rounds]
    shares = paired(waits, times[several])
    step = statistics.median(times[several])
    for name, values, detail in (
        ("exchange of gradients", lost, f"{step:.3g} s less {statistics.median(times[apart]):.3g} s"),
        ("sum of as many numbers, nothing else", bare, f"{size:.3g} s"),
        ("waiting for the slowest rollout", shares, f"{statistics.median(waits):.3g} s"),
    ):
        between = f"; rounds {min(values):.3f} to {max(values):.3f}"
        rows.append(Measurement(name, f"step of {several}", statistics.median(values), "of the time", detail + between))
    return rows


def spread(values: Sequence[float]) -> float:
    """Largest less smallest."""
    return max(values) - min(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    parser.add_argument("--images", type=int, default=IMAGES, help="images of each process")
    parser.add_argument("--processes", type=int, default=2, help="processes that train together")
    chosen = parser.parse_args(arguments)
    timing = timing_of(parser, chosen)
    if chosen.device != "cpu" or chosen.cpu_time or chosen.threads:
        parser.error("--device, --threads and --cpu-time do not go with several processes, which are on the CPU")
    if chosen.processes < 2:
        parser.error(f"--processes is {chosen.processes}: expected at least 2")
    rows = measure(replace(Shapes(), images=chosen.images), timing, chosen.processes)
    report([rows], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
