"""Devices, processes, and the engine that trains: plain Accelerate (one process, or
DDP) or DeepSpeed (``zero.py``).

Functions take the accelerator and the model as it prepared it; functions that exchange
tensors are called by every process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
    set_seed,
)
from torch import Tensor, nn
from tqdm.auto import tqdm

from rewards.base import naming
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import (
    LaunchError,
    check_environment,
    check_processes,
    keep_freed_memory,
)
from rl_caption.runtime.threads import cpu_threads
from rl_caption.runtime.zero import (
    configure_deepspeed,
    deepspeed_plugin,
    uses_deepspeed,
)

if TYPE_CHECKING:
    from rl_caption.config.schema import RunConfig, TrainConfig


def print_main(accelerator: Any, text: str) -> None:
    """Print a line from the main process to standard error, above a progress bar."""
    if accelerator.is_main_process:
        tqdm.write(text, file=sys.stderr)


def build_accelerator(train: TrainConfig, run: RunConfig) -> Accelerator:
    """Set up devices, processes, precision and trackers, and seed random generators.

    Raises:
        LaunchError: another number of processes trains than was asked for, or as
            ``check_environment``.
        ConfigError: the mixed precision or the engine cannot do what ``train`` asks
            for, or a tracker is not installed.
    """
    check_environment()
    installed = list(map(str, get_available_trackers()))
    missing = [name for name in run.trackers if name not in ("all", *installed)]
    if missing:  # Accelerate would leave them out
        raise ConfigError(
            f"run.trackers names {missing}, but installed are {installed}"
        )
    # A pipeline trains several times, perhaps in two precisions; the process group stays.
    AcceleratorState._reset_state()
    precision = training_precision(train.mixed_precision)
    wants_deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    failures = (ValueError, torch.distributed.DistError)
    with naming("the processes cannot be set up", failures, LaunchError):
        accelerator = Accelerator(
            # DeepSpeed reads it from its own configuration.
            mixed_precision="no" if wants_deepspeed else precision,
            # Pinned, as environment variables would set them.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            dynamo_backend="no",
            log_with=run.trackers or None,
            project_dir=run.dir,
            **accelerator_kwargs(),
        )
    check_processes(accelerator.num_processes, train.num_processes)
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise ConfigError(
            "train.mixed_precision is fp16, which a CPU cannot train in: use no or bf16"
        )
    if wants_deepspeed:
        configure_deepspeed(accelerator, precision, train)
    if accelerator.device.type == "cpu":
        use_cpu(accelerator.num_processes, train.threads)
        # On a CPU the fused attention's backward pass is several times slower in bf16 than products
        # written out.
        torch.backends.cuda.enable_flash_sdp(precision != "bf16")
    if accelerator.device.type == "cuda":
        products = "tf32" if train.tf32 else "ieee"
        torch.backends.cuda.matmul.fp32_precision = products
        torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]
    set_seed(train.seed)
    return accelerator


def use_cpu(processes: int, threads: int | None) -> None:
    """Set the CPU threads of each of ``processes`` (None: a share of the cores), and
    keep freed memory for reuse.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    torch.set_num_threads(threads or cpu_threads(here))
    keep_freed_memory()


def training_precision(asked: str) -> str:
    """``no``, ``bf16`` or ``fp16``: ``train.mixed_precision``, or the precision of
    ``accelerate launch`` if ``train.mixed_precision`` is ``no`` or ``auto``.

    ``auto`` is bf16 where the device computes in it without emulation: NVIDIA GPUs from
    Ampere on, CPUs with AVX512-BF16 or AMX. Raises ConfigError if both ask for a
    precision and they differ, or if the launcher's is not supported.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() or "no"
    if launched not in ("no", asked):
        if asked not in ("no", "auto") or launched not in ("bf16", "fp16"):
            raise ConfigError(
                f"train.mixed_precision is {asked}, but accelerate launch was asked for "
                f"{launched!r}: set one, to no, bf16 or fp16"
            )
        return launched
    if asked != "auto":
        return asked
    if torch.cuda.is_available() and "cpu" not in accelerator_kwargs():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capable: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        has_bf16 = capable.get("avx512_bf16") or capable.get("amx_bf16")
    return "bf16" if has_bf16 else "no"


def accelerator_kwargs() -> dict[str, Any]:
    """Arguments for ``Accelerator``, by which a launcher's processes form a group
    without a GPU, too (Accelerate alone then ignores launchers, unless
    ``ACCELERATE_USE_CPU=true``), and DDP's gradients are views of its buckets.
    """
    if int(os.environ.get("LOCAL_RANK", "-1")) < 0:
        return {}
    device = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPU takes part in no process group, so several processes are on the CPU there too.
    on_cpu = device is None or device.type == "mps"
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        return {"kwargs_handlers": [views]} | ({"cpu": True} if on_cpu else {})
    if not on_cpu:
        return {}
    import deepspeed.ops

    # Or DeepSpeed would compile an extension for its first process group on a CPU: a minute, and a
    # compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # cpu=True would turn DeepSpeed into plain data parallelism without a word.
    return {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}


def autocast(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """Context of mixed precision for passes that bypass the prepared model, such as
    sampling.
    """
    if not uses_deepspeed(accelerator):
        return accelerator.autocast()
    enabled = "torch_autocast" in deepspeed_plugin(accelerator).deepspeed_config
    return torch.autocast(accelerator.device.type, torch.bfloat16, enabled=enabled)


def backward_all(
    accelerator: Accelerator, model: nn.Module, losses: Sequence[Callable[[], Tensor]]
) -> float:
    """Forward and backward pass of each micro-batch; gradients are all-reduced in the last one.

    Each loss is a sum over the micro-batch divided by a count over the global batch. So
    the losses of all micro-batches and processes add up, and the gradient does not
    depend on how the batch was split. Returns the sum of this process's losses.
    """
    engine: Any = model
    sharded, total = uses_deepspeed(accelerator), 0.0
    for index, loss_of in enumerate(losses):
        last = index == len(losses) - 1
        with nullcontext() if last or sharded else accelerator.no_sync(model):
            loss = loss_of()
            # Data parallelism averages gradients; these are to be added.
            scaled = loss * accelerator.num_processes
            if sharded:
                engine.set_gradient_accumulation_boundary(last)
                engine.backward(scaled, scale_wrt_gas=False)
            else:
                accelerator.backward(scaled)
        total += loss.item()
    return total


def global_count(accelerator: Accelerator, local_count: Tensor) -> Tensor:
    """Sum of a count over all processes, of the same shape; 0 becomes 1, to be divided
    by. All-reduces.
    """
    count = accelerator.reduce(local_count.to(accelerator.device, torch.float32))
    return torch.where(count == 0, 1, count)


@contextmanager
def dropout_off(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Put ``model`` into eval mode and back, so that the sampled and the scored distribution agree."""
    was_training = model.training
    if enabled:
        model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Averages:
    """Named averages of one step. Names are log keys of docs/metrics.md; every process
    must add the same names.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        """Name -> sum and count."""

    def add(self, name: str, values: Tensor | Sequence[float] | float) -> None:
        """Add every element of ``values`` to the average."""
        tensor = torch.as_tensor(values, dtype=torch.float64).detach()
        self.add_sum(name, tensor.sum().item(), tensor.numel())

    def add_sum(self, name: str, total: float, count: float) -> None:
        """Add ``count`` values whose sum is ``total``."""
        added = torch.tensor([total, count], dtype=torch.float64)
        self.sums[name] = self.sums.get(name, 0) + added

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Averages over all processes. All-reduces."""
        names = sorted(self.sums)
        table = torch.stack([self.sums[name] for name in names])
        if accelerator.num_processes > 1:
            table = accelerator.reduce(table.to(accelerator.device))
        sums = zip(names, table.tolist(), strict=True)
        return {name: total / count for name, (total, count) in sums if count > 0}
