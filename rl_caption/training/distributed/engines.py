"""Where the engines differ: plain Accelerate (one process, or DDP), DeepSpeed ZeRO-1, 2, 3, and FSDP2.

Everything else in the package sees one loop. Functions here take the accelerator and the model as it prepared it;
those that exchange tensors say so and are called by every process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Engine = Literal["plain", "zero0", "zero1", "zero2", "zero3", "fsdp2"]
OWNED_BY_TRAIN = ("optimizer", "scheduler", "fp16", "bf16", "amp", "torch_autocast")
"""Sections of a DeepSpeed configuration that this package decides, from its own ``train`` section."""

USEFUL_BUCKET = 50_000_000
"""Elements that are exchanged at once: 200 MB of float32."""


class EngineError(ValueError):
    """An engine cannot do what the configuration asks for; the message names both and says what would be right."""


def wanted_engine(environment: Mapping[str, str] = os.environ) -> Literal["plain", "deepspeed", "fsdp"]:
    """Which engine ``accelerate launch`` was asked for."""
    for engine, variable in (("deepspeed", "ACCELERATE_USE_DEEPSPEED"), ("fsdp", "ACCELERATE_USE_FSDP")):
        if environment.get(variable, "false").lower() == "true":
            return engine  # type: ignore[return-value]
    return "plain"


def engine_of(accelerator: Accelerator) -> Engine:
    """The engine that trains."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage: Any = accelerator.state.deepspeed_plugin.zero_stage
        return f"zero{stage}"  # type: ignore[return-value]
    return "fsdp2" if accelerator.distributed_type == DistributedType.FSDP else "plain"


def deepspeed_without_compiler() -> None:
    """Keep DeepSpeed from compiling an extension for its first process group on a CPU: a minute, and a compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def fsdp_arguments(precision: str) -> dict[str, Any]:
    """Arguments for ``Accelerator`` under FSDP; empty elsewhere.

    Weights are gathered in the compute type, gradients are added up in float32. Accelerate alone would add up gradients
    in the compute type too.

    Raises:
        EngineError: FSDP1, or an option that leaves ranks with different or missing weights.
    """
    if wanted_engine() != "fsdp":
        return {}
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise EngineError("fsdp_config asks for FSDP1: set fsdp_version to 2, as configs/accelerate/fsdp.yaml does")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise EngineError("fsdp_offload_params is true: offloading is not supported, set it to false")
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    compute = {"bf16": torch.bfloat16}.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(mixed_precision_policy=policy)}


def use_fsdp(accelerator: Accelerator, arguments: Mapping[str, Any]) -> None:
    """See to it that Accelerate takes its FSDP2 path where ``fsdp_arguments`` asked for it.

    Alone it trains by DDP on processes without a GPU, and forgets the plugin when a program trains a second time.
    """
    plugin = arguments.get("fsdp_plugin")
    if plugin is not None and accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # which Accelerate copies again and again
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def settle_engine(accelerator: Accelerator, precision: str, grad_clip_value: float | None) -> None:
    """See to it that the engine that runs is the one that was asked for, can do what ``train`` asks, and knows it.

    Under DeepSpeed mixed precision is torch's autocast over float32 weights, as in plain Accelerate.

    Raises:
        EngineError: which engine and which key.
    """
    engine, wanted = engine_of(accelerator), wanted_engine()
    if wanted == "deepspeed" and engine == "plain":
        raise EngineError(
            "DeepSpeed was asked for, but plain Accelerate runs: unset ACCELERATE_USE_CPU, which turns DeepSpeed off"
        )
    if wanted == "fsdp" and engine == "plain":
        raise EngineError(
            f"FSDP was asked for, but {accelerator.num_processes} process(es) run without it: it needs several "
            "processes. Start at least 2, or take configs/accelerate/multi_gpu.yaml"
        )
    if engine == "zero0":
        raise EngineError("zero_stage is 0, which shards nothing: take configs/accelerate/multi_gpu.yaml instead")
    if precision == "fp16" and engine != "plain":
        raise EngineError(
            f"train.mixed_precision is fp16 under {engine}: loss scaling is supported without sharding only "
            "(configs/accelerate/fp16.yaml); use bf16"
        )
    if not engine.startswith("zero"):
        return
    if grad_clip_value is not None:
        raise EngineError(
            f"train.grad_clip_value is {grad_clip_value}, but DeepSpeed clips by norm only: set it to null and use "
            "train.grad_clip_norm, or train without DeepSpeed"
        )
    from transformers.integrations import unset_hf_deepspeed_config

    # Transformers would shard every model it loads from here on: a teacher, a judge, the reference policy.
    unset_hf_deepspeed_config()
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    _check_sections(config)
    if precision == "bf16":
        # No module exchanges gradients in bf16, so that they are added up in float32, as DDP does.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}


def _check_sections(config: Mapping[str, Any]) -> None:
    for section in OWNED_BY_TRAIN:
        value = config.get(section)
        if value and (not isinstance(value, dict) or value.get("enabled", True)):
            raise EngineError(f"the DeepSpeed configuration has a section {section!r}: leave it out, `train` decides")
    zero = config.get("zero_optimization", {})
    for section in ("offload_optimizer", "offload_param"):
        device = (zero.get(section) or {}).get("device")
        if device not in (None, "none"):
            raise EngineError(f"the DeepSpeed configuration offloads to {device!r} ({section}): this is not supported")


def fill_deepspeed_config(
    config: dict[str, Any], batch_size: int, micro_batch_size: int, processes: int, grad_clip_norm: float | None
) -> None:
    """Fill batch sizes and clipping of a DeepSpeed configuration in from ``train``, so that both say the same.

    Raises:
        EngineError: the configuration says otherwise.
    """
    wanted = (
        ("train_batch_size", "train.batch_size", batch_size),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size", micro_batch_size),
        ("gradient_clipping", "train.grad_clip_norm", grad_clip_norm or 0.0),
    )
    for key, name, value in wanted:
        given = config.get(key, "auto")
        if given not in ("auto", value):
            raise EngineError(
                f"the DeepSpeed configuration sets {key} to {given}, {name} makes it {value}: leave it out, or auto"
            )
        config[key] = value
    config["gradient_accumulation_steps"] = batch_size // (micro_batch_size * processes)


def autocast(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """Mixed precision for what does not run through the prepared model, such as sampling."""
    if engine_of(accelerator).startswith("zero"):
        enabled = "torch_autocast" in accelerator.state.deepspeed_plugin.deepspeed_config
        return torch.autocast(accelerator.device.type, torch.bfloat16) if enabled else nullcontext()
    return accelerator.autocast()


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Accelerate's ``prepare``, with what each engine needs besides. Called by every process.

    Raises:
        EngineError: a parameter without dimensions, which no engine can spread.
    """
    engine = engine_of(accelerator)
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if engine != "plain" and scalars:
        raise EngineError(
            f"{scalars[0]} is a parameter without dimensions, which {engine} cannot spread: give it the shape [1], or "
            "take configs/accelerate/multi_gpu.yaml"
        )
    if engine.startswith("zero"):
        plugin = accelerator.state.deepspeed_plugin
        accelerator.gradient_accumulation_steps = plugin.deepspeed_config["gradient_accumulation_steps"]
        _size_buckets(plugin.deepspeed_config, model)
        # DeepSpeed calls some of torch's functions by names that torch is giving up.
        warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if engine == "fsdp2":
        # Sampling calls parts of the model, perhaps before its first whole pass, and a part must not become the root.
        prepared._get_fsdp_state()._lazy_init()
        # It warns of writing into a view that a module returns; logits are never written into.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    return prepared, optimizer


def _size_buckets(config: dict[str, Any], model: nn.Module) -> None:
    """DeepSpeed's buffers for gradients have 5e8 elements whatever the model; here, no more than are of use."""
    zero = config.setdefault("zero_optimization", {})
    if zero.get("reduce_bucket_size", "auto") == "auto":
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        zero["reduce_bucket_size"] = min(sum(sizes), max(USEFUL_BUCKET, *sizes))


def whole_numel(parameter: Tensor) -> int:
    """Elements of a parameter, however it is spread."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def first_non_finite(accelerator: Accelerator, model: nn.Module) -> str | None:
    """Name of the first parameter with a NaN or an infinity, the same on every process; None where all are finite.

    Every process looks at what it has of each parameter. Exchanges one number: every process calls it.
    """
    names, finite = [], []
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        part = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
        part = part.to_local() if hasattr(part, "to_local") else part
        names.append(name)
        finite.append(torch.isfinite(part.detach()).all().to(accelerator.device))
    spoilt = (~torch.stack(finite)).long()
    first = torch.where(spoilt.any(), spoilt.argmax(), len(names)).view(1)
    index = int(accelerator.gather(first).min())
    return names[index] if index < len(names) else None


def backward(accelerator: Accelerator, model: nn.Module, share: Tensor, last: bool) -> None:
    """Backward pass of one micro-batch's share; gradients are complete after the ``last``. Exchanges gradients."""
    # Data parallelism averages gradients over processes, where the shares want to be added.
    share = share * accelerator.num_processes
    if engine_of(accelerator).startswith("zero"):
        engine: Any = model
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(share, scale_wrt_gas=False)
    else:
        accelerator.backward(share)


def no_sync(accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, gradients are added up without being exchanged, where the engine has them whole."""
    return nullcontext() if engine_of(accelerator).startswith("zero") else accelerator.no_sync(model)


def deepspeed_step(model: nn.Module) -> float:
    """Clip and update as DeepSpeed does, in one; return the gradient's norm before clipping, NaN if not finite."""
    engine: Any = model
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return norm if norm >= 0 else float("nan")  # DeepSpeed's sign of overflow is -1


@contextmanager
def whole_weights(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Inside, the model behind ``model`` has all its weights on every process and may be called as any module.

    No process waits for another inside, so captions may end at different lengths. Weights must not be changed. Gathers
    weights: every process enters and leaves together. Without effect where weights are not sharded.
    """
    engine = engine_of(accelerator)
    if engine == "zero3":
        with _gathered(model):
            yield
    elif engine == "fsdp2":
        with _unsharded(model):
            yield
    else:
        yield


@contextmanager
def _gathered(model: Any) -> Iterator[None]:
    """ZeRO-3. DeepSpeed's ``unwrap_model_for_generation`` leaves one hook on the whole model, which compares notes with
    the other processes at every forward pass, and forgets what it has learnt of the order of modules."""
    import deepspeed

    offload = model.optimizer.parameter_offload
    hooks = [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]
    with deepspeed.zero.GatheredParameters(model.parameters()), _silenced(hooks):
        yield


@contextmanager
def _silenced(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Inside, the hooks behind ``handles`` are not called; afterwards they are, in their old order."""
    tables = {id(table): table for table in (handle.hooks_dict_ref() for handle in handles) if table is not None}
    before = {key: dict(table) for key, table in tables.items()}
    for handle in handles:
        handle.remove()
    try:
        yield
    finally:
        for key, table in tables.items():
            table.clear()
            table.update(before[key])


@contextmanager
def _unsharded(model: Any) -> Iterator[None]:
    """FSDP2: its hooks stay, and find the weights there."""
    from torch.distributed.fsdp import FSDPModule

    parts: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    resharded = [_reshards_after_forward(part) for part in parts]
    model.set_reshard_after_forward(False)
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part, reshards in zip(parts, resharded, strict=True):
            part.reshard()
            part.set_reshard_after_forward(reshards, recurse=False)


def _reshards_after_forward(part: Any) -> bool:
    """Not so where the backward pass begins: the root, and the output layer. Torch sets it, but does not tell it."""
    state = part._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
