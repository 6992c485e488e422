"""Bytes per parameter that each engine holds, counted in processes on the CPU of this
machine (gloo).

    python -m benchmarks.engine_memory [--processes 2] [--engines plain zero1 ...] [--json FILE]

A captioner with random weights takes two steps. At four moments of the second step the
storages of all tensors of a process and DDP's gradient buckets are added up and divided
by the number of parameters. Inputs and activations are freed by then or negligible.
Precision is float32; ``train.mixed_precision``, too, keeps weights, gradients and
moments in float32.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Measurement, Timing, command

ENGINES = ("plain", "zero1", "zero2", "zero3")
MOMENTS = (
    "between steps",
    "while sampling",
    "between micro-batches",
    "before the update",
)


def environment(engine: str) -> dict[str, str]:
    """The environment variables that ``accelerate launch`` sets for the configuration
    file of an engine.
    """
    if engine == "plain":
        return {}
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": engine[-1],
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    }


def launched(rank: int, processes: int, port: int) -> dict[str, str]:
    """The environment variables that a launcher sets for one of its processes on this machine."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
    }
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **{key: str(n) for key, n in numbers.items()},
    }


def record_buckets(model: Any) -> dict[int, int]:
    """A mapping from address to bytes of DDP's gradient buckets, updated by every
    all-reduce; empty without DDP.
    """
    buckets: dict[int, int] = {}

    def all_reduce(group, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        """DDP's own all-reduce, which notes the memory of each bucket."""
        if bucket.index() == 0:
            buckets.clear()
        storage = bucket.buffer().untyped_storage()
        buckets[storage.data_ptr()] = storage.nbytes()
        return allreduce_hook(group, bucket)

    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, all_reduce)
    return buckets


def held(buckets: dict[int, int]) -> int:
    """Bytes of the storages of all tensors of this process, with gradients and DDP's ``buckets``.

    The smallest of three counts, because a thread of gloo keeps the tensor of a
    collective for a moment after its end.
    """
    counts = [count_bytes(buckets)]
    for _ in range(2):
        time.sleep(0.1)
        counts.append(count_bytes(buckets))
    return min(counts)


def count_bytes(buckets: dict[int, int]) -> int:
    """Bytes of the storages of ``held``, counted a single time."""
    gc.collect()
    tensors: list[Tensor] = [
        item for item in gc.get_objects() if issubclass(type(item), Tensor)
    ]
    # Python sees a gradient only when it is asked for.
    tensors += [
        leaf.grad
        for leaf in tensors
        if leaf.is_leaf and leaf.requires_grad and leaf.grad is not None
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
    }
    storages.pop(0, None)  # of empty tensors
    return sum((storages | buckets).values())


def wide_policy() -> nn.Module:
    """A captioner of two wide layers, most of whose memory is parameters."""
    from rl_caption.captioners.modeling import (
        CaptionTransformer,
        CaptionTransformerConfig,
    )

    shape = CaptionTransformerConfig(
        vocab_size=64,
        d_model=512,
        encoder_layers=1,
        decoder_layers=1,
        ffn_dim=2048,
        image_size=32,
        max_positions=8,
    )
    return CaptionTransformer(shape)


def work(
    rank: int, processes: int, engine: str, port: int
) -> tuple[int, dict[str, float]]:
    """Run one of the processes; return the number of parameters, and bytes per
    parameter at each moment.
    """
    if processes > 1 or engine != "plain":  # a launcher; without one there is no DDP
        os.environ.update(environment(engine) | launched(rank, processes, port))
    from rl_caption.config.schema import RunConfig, TrainConfig
    from rl_caption.runtime.engines import backward_all, build_accelerator
    from rl_caption.runtime.zero import (
        deepspeed_step,
        engine_of,
        gathered_parameters,
        prepare,
    )

    train = TrainConfig(threads=1, batch_size=2 * processes, micro_batch_size=1)
    accelerator = build_accelerator(train, RunConfig())
    gc.collect()
    gc.freeze()  # objects of before are not counted
    policy = wide_policy()
    count = sum(parameter.numel() for parameter in policy.parameters())
    model, optimizer = prepare(
        accelerator, policy, torch.optim.AdamW(policy.parameters())
    )
    assert engine_of(accelerator) == engine
    buckets = record_buckets(model)
    inputs = {
        "pixel_values": torch.ones(1, 3, 32, 32),
        "decoder_input_ids": torch.ones(1, 2, dtype=torch.long),
    }
    seen = dict.fromkeys(MOMENTS, 0)

    def loss(moment: str | None = None) -> Tensor:
        """A loss; the memory of ``moment`` is noted before it."""
        if moment:
            seen[moment] = held(buckets)
        return model(**inputs).logits.float().mean()

    for _ in range(2):
        optimizer.zero_grad()
        seen["between steps"] = held(buckets)
        with gathered_parameters(accelerator, model), torch.no_grad():
            policy(**inputs)
            seen["while sampling"] = held(buckets)
        backward_all(accelerator, model, [loss, partial(loss, "between micro-batches")])
        seen["before the update"] = held(buckets)
        if engine.startswith("zero"):
            deepspeed_step(model)
        else:
            accelerator.clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()
    accelerator.wait_for_everyone()
    return count, {moment: value / count for moment, value in seen.items()}


def measure_engine(engine: str, processes: int, start: str = "spawn") -> dict[str, Any]:
    """Bytes per parameter at each moment, the maximum over processes. ``start`` is
    multiprocessing's start method.
    """
    port = get_free_port()
    with ProcessPoolExecutor(processes, multiprocessing.get_context(start)) as pool:
        ranks = [
            pool.submit(work, rank, processes, engine, port)
            for rank in range(processes)
        ]
        found = [rank.result() for rank in as_completed(ranks)]
    most = {moment: max(seen[moment] for _, seen in found) for moment in MOMENTS}
    return {"parameters": found[0][0]} | most


def measure(
    timing: Timing, engines: Sequence[str] = ENGINES, processes: int = 2
) -> Iterator[Measurement]:
    """One row for each engine and moment."""
    for engine in engines:
        row = measure_engine(engine, processes)
        detail = f"{processes} process(es), {row['parameters']:,} parameters"
        yield from (
            Measurement(
                f"{engine}, {key}", "parameters", row[key], "bytes each", detail
            )
            for key in MOMENTS
        )


if __name__ == "__main__":
    command(__doc__, measure, engines=ENGINES, processes=2)
