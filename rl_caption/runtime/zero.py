"""DeepSpeed ZeRO-1, 2, 3: what only this engine needs.

Attributes of Accelerate and DeepSpeed without a public name are read in this file
alone, which was tested with Accelerate 1.15 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from rl_caption.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rl_caption.config.schema import TrainConfig

OWNED_BY_TRAIN = ("optimizer", "scheduler", "fp16", "bf16", "amp", "torch_autocast")
"""Sections of a DeepSpeed configuration that are left out: they follow from ``train``."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = Mapping[str, Mapping[str, Tensor]]
"""Parameter name -> ``step`` (a scalar), ``exp_avg`` and ``exp_avg_sq`` (of the parameter's shape).
"""
BUCKET_SIZE = 50_000_000
"""Elements of a gradient bucket: 200 MB of float32."""


def engine_of(accelerator: Accelerator) -> str:
    """The engine that trains: ``plain``, or ``zero`` and the stage."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return "plain"
    return f"zero{deepspeed_plugin(accelerator).zero_stage}"


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed trains."""
    return engine_of(accelerator) != "plain"


def deepspeed_plugin(accelerator: Accelerator) -> Any:
    """Accelerate's settings of DeepSpeed; its ``deepspeed_config`` is DeepSpeed's own
    configuration.
    """
    return accelerator.state.deepspeed_plugin


def configure_deepspeed(
    accelerator: Accelerator, precision: str, train: TrainConfig
) -> None:
    """Set DeepSpeed's precision (autocast over float32 weights), optimizer, batch sizes
    and clipping from ``train``. Raises ConfigError for what DeepSpeed cannot do.
    """
    engine = engine_of(accelerator)
    if engine in ("plain", "zero0"):
        raise ConfigError(
            f"DeepSpeed was asked for, but {engine} runs, which shards nothing: unset "
            "ACCELERATE_USE_CPU and set zero_stage, or take configs/accelerate/multi_gpu.yaml"
        )
    plugin = deepspeed_plugin(accelerator)
    offloads = {
        plugin.get_value(f"zero_optimization.offload_{what}.device")
        for what in ("optimizer", "param")
    }
    clips_values = train.grad_clip_value is not None
    if precision == "fp16" or clips_values or offloads - {None, "none"}:
        raise ConfigError(
            f"train.mixed_precision fp16, train.grad_clip_value, offload_optimizer and "
            f"offload_param do not work under {engine}: use bf16 and grad_clip_norm"
        )
    config: dict[str, Any] = plugin.deepspeed_config
    for key in OWNED_BY_TRAIN:
        config.pop(key, None)
    processes = accelerator.num_processes
    micro = train.micro_batch_size or train.batch_size // processes
    config |= {
        "train_batch_size": train.batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": train.batch_size // (micro * processes),
        "gradient_clipping": train.grad_clip_norm or 0.0,
    }
    if precision == "bf16":
        # No module exchanges gradients in bf16: they are added up in float32, as DDP does.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    from transformers.integrations import unset_hf_deepspeed_config

    # or Transformers would shard a teacher, a judge, the reference policy as it loads them
    unset_hf_deepspeed_config()


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Any
) -> tuple[nn.Module, Any]:
    """Accelerate's ``prepare``, and what DeepSpeed needs before it. Called by every process."""
    if not uses_deepspeed(accelerator):
        return accelerator.prepare(model, optimizer)
    config = deepspeed_plugin(accelerator).deepspeed_config
    accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
    # By default, buckets of gradients have 5e8 elements, whatever the model's size.
    zero = config.setdefault("zero_optimization", {})
    if zero.get("reduce_bucket_size", "auto") == "auto":
        sizes = [one.numel() for one in model.parameters() if one.requires_grad]
        zero["reduce_bucket_size"] = min(sum(sizes), max(BUCKET_SIZE, *sizes))
    # DeepSpeed calls functions of torch by deprecated names.
    message = "`torch.distributed.* is deprecated"
    warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    return accelerator.prepare(model, optimizer)


def deepspeed_step(model: nn.Module) -> float:
    """Clip gradients and update weights; return the gradient's norm before clipping,
    NaN if it is not finite.
    """
    engine: Any = model
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return norm if norm >= 0 else float("nan")  # DeepSpeed reports an overflow as -1


@contextmanager
def gathered_parameters(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Under ZeRO-3, give every process the full weights inside the ``with``; elsewhere, do nothing.

    The model behind ``model`` is then an ordinary module. No process waits for another
    inside, so their captions may end at different lengths. Weights must not be changed.
    All-gathers: every process enters and leaves.

    DeepSpeed's ``unwrap_model_for_generation`` leaves a hook on the root module, which
    communicates at every forward pass, and discards the recorded order of modules; here
    all hooks are removed and restored.
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
    """Context in which the hooks of ``handles`` are not called; afterwards they are
    called again, in their old order.
    """
    tables = [
        table for handle in handles if (table := handle.hooks_dict_ref()) is not None
    ]
    before = [dict(table) for table in tables]
    for handle in handles:
        handle.remove()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def trained_parameters(
    accelerator: Accelerator, model: nn.Module
) -> dict[str, nn.Parameter]:
    """Name -> parameter with a gradient, of a prepared model."""
    named = accelerator.unwrap_model(model).named_parameters()
    return {name: value for name, value in named if value.requires_grad}


def full_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Any
) -> tuple[dict[str, Tensor], Moments]:
    """Full weights, tied weights once, and Adam's moments, on the CPU of the main
    process; empty on other processes. All-gathers one parameter at a time.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    is_main, module = accelerator.is_main_process, accelerator.unwrap_model(model)
    named = module.state_dict(keep_vars=True)
    # Of a tied weight the first name stays.
    names = {value: name for name, value in reversed(named.items())}
    weights = {}
    for value, name in names.items():
        # Does nothing below ZeRO-3, and for buffers.
        with deepspeed.zero.GatheredParameters([value]):
            if is_main:
                weights[name] = value.detach().cpu().contiguous().clone()
    step = next(iter(torch_optimizer(optimizer).state.values()))["step"]
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trained_parameters(accelerator, model).items():
        values = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        if is_main:
            values["step"] = step
            moments[name] = {key: value.cpu().clone() for key, value in values.items()}
    return weights, moments


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer below Accelerate's and DeepSpeed's."""
    while not isinstance(optimizer, torch.optim.AdamW):
        optimizer = optimizer.optimizer
    return optimizer


def load_deepspeed_moments(
    model: nn.Module, trained: Mapping[str, nn.Parameter], moments: Moments
) -> None:
    """Set DeepSpeed's moments of the trained parameters, which are created first:
    before its first step it has none.
    """
    from deepspeed.utils import (
        safe_set_full_optimizer_state,
        safe_set_local_optimizer_state,
    )

    engine: Any = model
    zero = engine.optimizer
    state, step = torch_optimizer(zero).state, moments[next(iter(trained))]["step"]
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    if stage3:
        flats = zero.fp32_partitioned_groups_flat
    else:
        flats = zero.single_partition_of_fp32_groups
    for flat in flats:
        state[flat] = {key: torch.zeros_like(flat) for key in MOMENTS}
        state[flat]["step"] = step.clone()
    if not stage3:
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in trained.items():
        for key in MOMENTS:
            value = moments[name][key].to(engine.device, torch.float32)
            if stage3:
                size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                start = size * torch.distributed.get_rank()
                shard = value.flatten()[start : start + size]
                padded = functional.pad(shard, (0, size - shard.numel()))
                safe_set_local_optimizer_state(parameter, padded, key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
