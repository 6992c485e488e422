"""Devices, processes, and the engine that trains: plain Accelerate (one process, or DDP) or
DeepSpeed ZeRO-1, 2, 3.

Functions take the accelerator and the model as it prepared it; those that exchange tensors are
called by every process. Attributes of Accelerate and DeepSpeed without a public name are read in
this file alone, which was tested with Accelerate 1.15 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
    set_seed,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm

from rewards.base import naming
from rl_caption.runtime.errors import ConfigError, UserError
from rl_caption.runtime.launch import (
    LaunchError,
    check_environment,
    check_processes,
    keep_freed_memory,
)
from rl_caption.runtime.threads import cpu_threads

if TYPE_CHECKING:
    from rl_caption.config.schema import RunConfig, TrainConfig

Engine = Literal["plain", "zero0", "zero1", "zero2", "zero3"]
OWNED_BY_TRAIN = ("optimizer", "scheduler", "fp16", "bf16", "amp", "torch_autocast")
"""Sections of a DeepSpeed configuration that follow from ``train``."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = Mapping[str, Mapping[str, Tensor]]
"""Parameter name -> ``step`` (a scalar), ``exp_avg`` and ``exp_avg_sq`` (of the parameter's shape).
"""
BUCKET_SIZE = 50_000_000
"""Elements of a gradient bucket: 200 MB of float32."""


class EngineError(UserError, ValueError):
    """An engine cannot do what the configuration asks for; the message names both and says what
    would be right.
    """


def print_main(accelerator: Any, text: str) -> None:
    """Print a line from the main process to standard error, above a progress bar."""
    if accelerator.is_main_process:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


def build_accelerator(train: TrainConfig, run: RunConfig) -> Accelerator:
    """Devices and processes, seeded.

    Raises:
        LaunchError: another number of processes trains than was asked for, or
            ``check_environment``.
        ConfigError: the mixed precision does not run here, or a tracker is not installed.
        EngineError: the engine cannot do what ``train`` asks for.
    """
    check_environment(tf32=train.tf32)
    installed = list(map(str, get_available_trackers()))
    missing = [name for name in run.trackers if name not in ("all", *installed)]
    if missing:  # Accelerate would leave them out
        command = "rl-caption[tensorboard]" if "tensorboard" in missing else missing[0]
        raise ConfigError(
            f"run.trackers names {', '.join(missing)}, not installed here (installed: "
            f"{', '.join(installed) or 'none'}): "
            f"pip install '{command}', or leave it out"
        )
    # With warm_start a program trains twice, perhaps in two precisions; the process group stays.
    AcceleratorState._reset_state()
    precision = usable_precision(requested_precision(train.mixed_precision))
    wants_deepspeed = parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
    with naming(
        "the processes cannot be set up", (ValueError, torch.distributed.DistError), LaunchError
    ):
        accelerator = Accelerator(
            mixed_precision="no"
            if wants_deepspeed
            else precision,  # DeepSpeed reads it from its own configuration
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
        configure_deepspeed(accelerator, precision, train.grad_clip_value)
    if accelerator.device.type == "cpu":
        use_cpu(accelerator.num_processes, train.threads)
        # On a CPU the fused attention's backward pass is several times slower in bf16 than products
        # written out.
        torch.backends.cuda.enable_flash_sdp(precision != "bf16")
    if accelerator.device.type == "cuda":
        precision_of_products = "tf32" if train.tf32 else "ieee"
        torch.backends.cuda.matmul.fp32_precision = precision_of_products
        torch.backends.cudnn.conv.fp32_precision = precision_of_products  # type: ignore[attr-defined]
    set_seed(train.seed)
    if train.mixed_precision != precision:
        print_main(
            accelerator,
            f"train.mixed_precision {train.mixed_precision} means {precision!r} on this device "
            f"({accelerator.device})",
        )
    return accelerator


def use_cpu(processes: int, threads: int | None) -> None:
    """Set the CPU threads of each of ``processes`` (None: a share of the cores), and keep freed
    memory for reuse.
    """
    torch.set_num_threads(
        threads or cpu_threads(int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    )
    keep_freed_memory()


def requested_precision(train: str, environment: Mapping[str, str] = os.environ) -> str:
    """``train.mixed_precision``, or the precision of ``accelerate launch`` if the former is ``no``
    or ``auto``.

    Raises ConfigError if both ask for a precision and they differ, or if the launcher's is not
    supported.
    """
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched in ("", "no", train):
        return train
    if launched not in ("bf16", "fp16"):
        raise ConfigError(
            f"mixed_precision {launched!r} of accelerate launch is not supported: use no, bf16 or "
            f"fp16"
        )
    if train not in ("no", "auto"):
        raise ConfigError(
            f"train.mixed_precision is {train}, but accelerate launch was asked for {launched}: "
            f"set one"
        )
    return launched


def usable_precision(precision: str) -> str:
    """Resolve ``auto``: ``bf16`` where the device computes in it without emulation, else ``no``.

    NVIDIA GPUs compute in bf16 from Ampere on, CPUs with AVX512-BF16 or AMX. Other values are
    returned unchanged.
    """
    if precision != "auto":
        return precision
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type == "cuda" and "cpu" not in accelerator_kwargs():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "no"


def engine_of(accelerator: Accelerator) -> Engine:
    """The engine that trains."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return "plain"
    return f"zero{deepspeed_plugin(accelerator).zero_stage}"  # type: ignore[return-value]


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed trains."""
    return engine_of(accelerator) != "plain"


def deepspeed_plugin(accelerator: Accelerator) -> Any:
    """Accelerate's settings of DeepSpeed; its ``deepspeed_config`` is DeepSpeed's own
    configuration.
    """
    return accelerator.state.deepspeed_plugin


def accelerator_kwargs() -> dict[str, Any]:
    """Arguments for ``Accelerator``, by which a launcher's processes form a group without a GPU,
    too (Accelerate alone then ignores launchers, unless ``ACCELERATE_USE_CPU=true``), and DDP's
    gradients are views of its buckets.
    """
    if int(os.environ.get("LOCAL_RANK", "-1")) < 0:
        return {}
    device = torch.accelerator.current_accelerator(check_available=True)
    # Apple's GPU takes part in no process group, so several processes are on the CPU there too.
    on_cpu = device is None or device.type == "mps"
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        handlers = {
            "kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
        }
        return handlers | {"cpu": True} if on_cpu else handlers
    if not on_cpu:
        return {}
    import deepspeed.ops

    # Or DeepSpeed would compile an extension for its first process group on a CPU: a minute, and a
    # compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # cpu=True would turn DeepSpeed into plain data parallelism without a word.
    return {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}


def configure_deepspeed(
    accelerator: Accelerator, precision: str, grad_clip_value: float | None
) -> None:
    """Set DeepSpeed's precision: autocast over float32 weights. Raises EngineError for what it
    cannot do.
    """
    engine = engine_of(accelerator)
    if engine == "plain":
        wrong = "DeepSpeed was asked for, but plain Accelerate runs: unset ACCELERATE_USE_CPU, which turns it off"
    elif engine == "zero0":
        wrong = (
            "zero_stage is 0, which shards nothing: take configs/accelerate/multi_gpu.yaml instead"
        )
    elif precision == "fp16":
        wrong = f"train.mixed_precision is fp16 under {engine}, which has no loss scaling here: use bf16"
    elif grad_clip_value is not None:
        wrong = f"train.grad_clip_value is {grad_clip_value} under {engine}, which clips by norm only: set it to null"
    else:
        wrong = ""
    if wrong:
        raise EngineError(wrong)
    from transformers.integrations import unset_hf_deepspeed_config

    # or Transformers would shard a teacher, a judge, the reference policy as it loads them
    unset_hf_deepspeed_config()
    config: dict[str, Any] = deepspeed_plugin(accelerator).deepspeed_config
    for section in OWNED_BY_TRAIN:
        value = config.get(section)
        if value and (not isinstance(value, dict) or value.get("enabled", True)):
            raise EngineError(
                f"the DeepSpeed configuration has a section {section!r}: leave it out, train.* "
                f"sets it"
            )
    for section in ("offload_optimizer", "offload_param"):
        device = (config.get("zero_optimization", {}).get(section) or {}).get("device")
        if device not in (None, "none"):
            raise EngineError(
                f"the DeepSpeed configuration offloads to {device!r} ({section}): this is not "
                f"supported"
            )
    if precision == "bf16":
        # No module exchanges gradients in bf16: they are added up in float32, as DDP does.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }


def fill_deepspeed_config(
    config: dict[str, Any],
    batch_size: int,
    micro_batch_size: int,
    processes: int,
    grad_clip_norm: float | None,
) -> None:
    """Set batch sizes and clipping of a DeepSpeed configuration to those of ``train``.

    Raises EngineError if the configuration has others.
    """
    settings = (
        ("train_batch_size", "train.batch_size", batch_size),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size", micro_batch_size),
        ("gradient_clipping", "train.grad_clip_norm", grad_clip_norm or 0.0),
    )
    for key, name, value in settings:
        setting = config.get(key, "auto")
        if setting not in ("auto", value):
            raise EngineError(
                f"the DeepSpeed configuration sets {key} to {setting}, {name} needs {value}: leave "
                f"it out, or use auto"
            )
        config[key] = value
    config["gradient_accumulation_steps"] = batch_size // (micro_batch_size * processes)


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Accelerate's ``prepare``, and what DeepSpeed needs in addition. Called by every process.

    Raises EngineError if DeepSpeed would have to shard a 0-dimensional parameter.
    """
    if uses_deepspeed(accelerator):
        scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
        if scalars:
            raise EngineError(
                f"{scalars[0]} is a parameter without dimensions, which {engine_of(accelerator)} "
                f"cannot shard: give "
                "it the shape [1], or take configs/accelerate/multi_gpu.yaml"
            )
        config = deepspeed_plugin(accelerator).deepspeed_config
        accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        size_buckets(config, model)
        # DeepSpeed calls functions of torch by deprecated names.
        warnings.filterwarnings(
            "ignore", message="`torch.distributed.* is deprecated", category=FutureWarning
        )
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer


def size_buckets(config: dict[str, Any], model: nn.Module) -> None:
    """Limit DeepSpeed's gradient buckets, by default 5e8 elements, to the model's size and to
    ``BUCKET_SIZE``.
    """
    zero = config.setdefault("zero_optimization", {})
    if zero.get("reduce_bucket_size", "auto") == "auto":
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        zero["reduce_bucket_size"] = min(sum(sizes), max(BUCKET_SIZE, *sizes))


def autocast(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """Mixed precision for what does not run through the prepared model, such as sampling."""
    if not uses_deepspeed(accelerator):
        return accelerator.autocast()
    enabled = "torch_autocast" in deepspeed_plugin(accelerator).deepspeed_config
    return torch.autocast(accelerator.device.type, torch.bfloat16) if enabled else nullcontext()


def backward_all(
    accelerator: Accelerator, model: nn.Module, losses: Sequence[Callable[[], Tensor]]
) -> float:
    """Forward and backward pass of each micro-batch; gradients are all-reduced in the last one.

    Each loss is a sum over the micro-batch divided by a count over the global batch. So the losses
    of all micro-batches and processes add up, and the gradient does not depend on how the batch was
    split. Returns the sum of this process's losses.
    """
    engine: Any = model
    total = 0.0
    for index, loss_of in enumerate(losses):
        last = index == len(losses) - 1
        with nullcontext() if last or uses_deepspeed(accelerator) else accelerator.no_sync(model):
            loss = loss_of()
            scaled = (
                loss * accelerator.num_processes
            )  # data parallelism averages gradients; these are to be added
            if uses_deepspeed(accelerator):
                engine.set_gradient_accumulation_boundary(last)
                engine.backward(scaled, scale_wrt_gas=False)
            else:
                accelerator.backward(scaled)
        total += loss.item()
    return total


def deepspeed_step(model: nn.Module) -> float:
    """Clip gradients and update weights; return the gradient's norm before clipping, NaN if it is
    not finite.
    """
    engine: Any = model
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return norm if norm >= 0 else float("nan")  # DeepSpeed reports an overflow as -1


@contextmanager
def gathered_parameters(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Under ZeRO-3, give every process the full weights inside the ``with``; elsewhere, do nothing.

    The model behind ``model`` is then an ordinary module. No process waits for another inside, so
    their captions may end at different lengths. Weights must not be changed. All-gathers: every
    process enters and leaves.

    DeepSpeed's ``unwrap_model_for_generation`` leaves a hook on the root module, which communicates
    at every forward pass, and discards the recorded order of modules; here all hooks are removed
    and restored.
    """
    if engine_of(accelerator) != "zero3":
        yield
        return
    import deepspeed

    engine: Any = model
    offload = engine.optimizer.parameter_offload
    hooks = [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]
    with deepspeed.zero.GatheredParameters(model.parameters()), without_hooks(hooks):
        yield


@contextmanager
def without_hooks(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Inside, the hooks of ``handles`` are not called; afterwards they are called again, in their
    old order.
    """
    tables = {
        id(table): table
        for table in (handle.hooks_dict_ref() for handle in handles)
        if table is not None
    }
    before = {key: dict(table) for key, table in tables.items()}
    for handle in handles:
        handle.remove()
    try:
        yield
    finally:
        for key, table in tables.items():
            table.clear()
            table.update(before[key])


def numel(parameter: Tensor) -> int:
    """Number of elements of a whole parameter, sharded or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def first_non_finite(accelerator: Accelerator, model: nn.Module) -> str | None:
    """Name of the first parameter with a NaN or an infinity on any process; None if all are finite.
    All-gathers.
    """
    names, finite = [], []
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        shard = getattr(parameter, "ds_tensor", parameter).detach()
        names.append(name)
        finite.append(torch.isfinite(shard).all().to(accelerator.device))
    bad = (~torch.stack(finite)).long()
    first = torch.where(bad.any(), bad.argmax(), len(names)).view(1)
    index = int(accelerator.gather(first).min())
    return names[index] if index < len(names) else None


def full_parameter(accelerator: Accelerator, parameter: Tensor) -> Tensor:
    """The full values of a parameter. All-gathers under ZeRO-3."""
    if engine_of(accelerator) != "zero3":
        return parameter.data
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.data.clone()


def load_deepspeed_moments(
    model: nn.Module, trained: Mapping[str, nn.Parameter], moments: Moments
) -> None:
    """Set DeepSpeed's moments of the trained parameters, which are created first: before its first
    step it has none.
    """
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    engine: Any = model
    zero = engine.optimizer
    state, step = torch_optimizer(zero).state, moments[next(iter(trained))]["step"].float().cpu()
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    for flat in (
        zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups
    ):
        state[flat] = {"step": step.clone(), **{key: torch.zeros_like(flat) for key in MOMENTS}}
    if not stage3:
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in trained.items():
        for key in MOMENTS:
            value = moments[name][key].to(engine.device, torch.float32)
            if stage3:
                size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()  # type: ignore[attr-defined]
                padded = functional.pad(
                    value.flatten(), (0, size * engine.world_size - value.numel())
                )
                safe_set_local_optimizer_state(parameter, padded.narrow(0, size * rank, size), key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer below Accelerate's and DeepSpeed's."""
    while not isinstance(optimizer, torch.optim.AdamW):
        optimizer = optimizer.optimizer
    return optimizer


def global_count(accelerator: Accelerator, local_count: Tensor) -> Tensor:
    """Sum of a count over all processes, of the same shape; 0 becomes 1, to be divided by.
    All-reduces.
    """
    count = accelerator.reduce(local_count.to(accelerator.device, torch.float32), reduction="sum")
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
    """Named averages of one step. Names are log keys of docs/metrics.md; every process must add the
    same names.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, values: Tensor | Sequence[float] | float) -> None:
        """Add every element of ``values`` to the average."""
        tensor = (
            values.detach()
            if isinstance(values, Tensor)
            else torch.tensor(values, dtype=torch.float64)
        )
        self.add_sum(name, tensor.double().sum().item(), tensor.numel())

    def add_sum(self, name: str, total: float, count: float) -> None:
        """Add ``count`` values whose sum is ``total``."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """Averages over all processes. All-reduces."""
        names = sorted(self.sums)
        table = torch.tensor(
            [[self.sums[name], self.counts[name]] for name in names], dtype=torch.float64
        )
        if accelerator.num_processes > 1:
            dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
            table = (
                accelerator.reduce(table.to(accelerator.device, dtype), reduction="sum")
                .cpu()
                .double()
            )
        return {
            name: total / count
            for name, (total, count) in zip(names, table.tolist(), strict=True)
            if count > 0
        }
