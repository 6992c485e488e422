"""Checkpoints of sharded trainings, in files that know nothing of shards.

``model.safetensors`` is that of a single process; ``optimizer.safetensors`` has the moments of each parameter by its
name. So a run goes on under any engine and any number of processes, and nothing is unpickled. DeepSpeed's own
checkpoints are pickles that fit one number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.other import clean_state_dict_for_safetensors
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn
from torch.nn import functional

from rl_caption.training.distributed.engines import engine_of

MODEL, OPTIMIZER, PLAIN_OPTIMIZER = "model.safetensors", "optimizer.safetensors", "optimizer.bin"
MOMENTS = ("exp_avg", "exp_avg_sq")
Moments = Mapping[str, Mapping[str, Tensor]]
"""Parameter name -> ``step`` (a scalar), ``exp_avg`` and ``exp_avg_sq`` (of the parameter's shape)."""


def write_sharded(accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Write model and optimizer; gathers one parameter at a time, the main process keeps and writes them all."""
    weights = whole_state(accelerator, model)
    moments: dict[str, Tensor] = {}
    for name, parameter in _trained(accelerator, model):
        for key, value in _moments_of(accelerator, model, optimizer, parameter).items():
            if accelerator.is_main_process:
                moments[f"{name}/{key}"] = value.detach().float().cpu().clone()
    if accelerator.is_main_process:
        save_file(weights, folder / MODEL, metadata={"format": "pt"})
        save_file(moments, folder / OPTIMIZER, metadata={"format": "pt"})


def whole_state(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """State dict on the CPU, tied weights once; empty but on the main process. Gathers one parameter at a time."""
    module = accelerator.unwrap_model(model)
    tensors: dict[int, Tensor] = {}
    for parameter in module.parameters():
        value = _whole(accelerator, parameter)
        if accelerator.is_main_process:
            tensors[id(parameter)] = value.detach().cpu().clone()
    if not accelerator.is_main_process:
        return {}
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    kept = {name: tensors.get(id(named[name])) for name in module.state_dict()}
    state = {name: named[name].detach().cpu() if value is None else value for name, value in kept.items()}
    return clean_state_dict_for_safetensors(state)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Read the model of a checkpoint into a module that is not sharded yet."""
    load_model(model, folder / MODEL)


def read_moments(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments:
    """Moments of a checkpoint, whichever engine wrote it. ``model`` and ``optimizer`` are not prepared yet.

    Raises:
        KeyError: a parameter that is trained has none.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    moments: dict[str, dict[str, Tensor]] = {}
    if (folder / OPTIMIZER).is_file():
        for path, value in load_file(folder / OPTIMIZER).items():
            name, _, key = path.rpartition("/")
            moments.setdefault(name, {})[key] = value
    else:
        saved = torch.load(folder / PLAIN_OPTIMIZER, map_location="cpu", weights_only=True)
        moments = {order[index]: state for index, state in saved["state"].items()}
    if set(moments) != set(order):
        odd = sorted(set(moments) ^ set(order))
        raise KeyError(f"{len(odd)} parameters are trained in the checkpoint or in this run only, such as {odd[0]!r}")
    return moments


def load_moments(accelerator: Accelerator, model: nn.Module, optimizer: Any, moments: Moments) -> None:
    """Give the prepared optimizer its moments back. Called by every process."""
    engine: Any = model
    if engine_of(accelerator).startswith("zero"):
        _load_into_zero(engine, moments, [*_trained(accelerator, model)])
        return
    inner = _inner(optimizer)
    for name, parameter in _trained(accelerator, model):
        saved = moments[name]
        state = {key: _like(saved[key], parameter) for key in MOMENTS}
        inner.state[parameter] = {"step": saved["step"].float().cpu(), **state}


def _trained(accelerator: Accelerator, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    module = accelerator.unwrap_model(model)
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer below Accelerate's and DeepSpeed's."""
    while not isinstance(optimizer, torch.optim.AdamW):
        optimizer = optimizer.optimizer
    return optimizer


def _whole(accelerator: Accelerator, parameter: Tensor) -> Tensor:
    engine = engine_of(accelerator)
    if engine == "zero3":
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.data.clone()
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.data


def _moments_of(accelerator: Accelerator, model: Any, optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    if engine_of(accelerator).startswith("zero"):
        from deepspeed.utils import safe_get_full_optimizer_state

        step = next(iter(_inner(optimizer).state.values()))["step"]
        return {"step": step} | {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    state = _inner(optimizer).state[parameter]
    return {"step": state["step"]} | {key: _whole(accelerator, state[key]) for key in MOMENTS}


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """``value``, whole and on the CPU, spread as ``parameter`` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(parameter.device, torch.float32)
    if isinstance(parameter, DTensor):
        # Every process has read the same file, so nothing needs to be sent.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value.clone()


def _load_into_zero(engine: Any, moments: Moments, trained: list[tuple[str, nn.Parameter]]) -> None:
    """DeepSpeed has no states before its first step: make empty ones, then fill each parameter's part of them."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    zero = engine.optimizer
    third = hasattr(zero, "fp32_partitioned_groups_flat")
    step = moments[trained[0][0]]["step"].float().cpu()
    for flat in zero.fp32_partitioned_groups_flat if third else zero.single_partition_of_fp32_groups:
        states = {key: torch.zeros_like(flat) for key in MOMENTS}
        _inner(zero).state[flat] = {"step": step.clone(), **states}
    if not third:
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in trained:
        for key in MOMENTS:
            value = moments[name][key].to(engine.device, torch.float32)
            if third:
                part, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()  # type: ignore[attr-defined]
                whole = functional.pad(value.flatten(), (0, part * engine.world_size - value.numel()))
                safe_set_local_optimizer_state(parameter, whole.narrow(0, part * rank, part), key)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
