"""Which weights of a pretrained captioner are trained: freezing by name, low-rank adapters, recomputed activations."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from rl_caption.captioners.base import CaptionerError


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training the parameters whose names match one of ``patterns`` (as file names do: ``*``, ``?``, ``[abc]``).

    Returns:
        The frozen names.

    Raises:
        CaptionerError: a pattern matches nothing; the message names near ones.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CaptionerError(
                f"model.freeze has {pattern!r}, which matches no parameter; near ones are {_near(pattern, names)}"
            )
    frozen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def freeze_unused(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters that match, where there are any."""
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def _near(pattern: str, names: list[str]) -> list[str]:
    parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    return difflib.get_close_matches(pattern.rstrip("*."), sorted(parts), n=4, cutoff=0.3) or names[:4]


def add_lora(model: nn.Module, r: int, alpha: float, dropout: float, targets: Sequence[str] | str) -> None:
    """Put low-rank adapters (Hu et al. 2022) beside the weights of ``targets``; nothing else is trained from then on.

    Args:
        model: is changed in place.
        r: rank.
        alpha: the adapters' output is scaled by alpha / r.
        dropout: of the adapters' input.
        targets: names of modules, or ends of names; or one regular expression for whole names.

    Raises:
        CaptionerError: ``peft`` is not installed, a number is out of range, or no module is named so.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise CaptionerError("model.lora needs peft: pip install 'rl-caption[peft]'") from error
    if r < 1 or alpha <= 0 or not 0 <= dropout < 1:
        raise CaptionerError(
            f"model.lora has r {r}, alpha {alpha}, dropout {dropout}: expected r of at least 1, alpha above 0, dropout "
            "from 0 to below 1"
        )
    wanted = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=r, lora_alpha=cast(int, alpha), lora_dropout=dropout, target_modules=wanted, bias="none")
    try:
        with warnings.catch_warnings():
            # peft says that it transposes the weights of GPT-2's Conv1D, which is right.
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
            inject_adapter_in_model(config, model)
    except ValueError as error:
        modules = [name for name, _ in model.named_modules()]
        near = _near(wanted if isinstance(wanted, str) else wanted[0], modules)
        raise CaptionerError(f"model.lora.target_modules: {error}; near ones are {near}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def plain_weights(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Weights of the model without adapters: each is added to the weight that it stands beside.

    Args:
        model: has adapters or not.
        weights: its state, where the caller has gathered it from several processes.
    """
    state = dict(model.state_dict() if weights is None else weights)
    merged = {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        adapter: Any = module
        for key, scale in adapter.scaling.items():
            low, high = state[f"{name}.lora_A.{key}.weight"], state[f"{name}.lora_B.{key}.weight"]
            change = (high.float() @ low.float()) * scale
            weight = merged[f"{name}.weight"].float()
            merged[f"{name}.weight"] = weight + (change.T if adapter.fan_in_fan_out else change)
    return merged


def checkpoint_layers(model: nn.Module) -> None:
    """Keep no activations inside Transformer layers: they are computed again in the backward pass, in eval mode too.

    Transformers' own switch works in training mode only, and self-critical training scores with dropout off.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from transformers.modeling_layers import GradientCheckpointingLayer

    def wrap(layer: nn.Module) -> nn.Module:
        return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)

    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda layer: isinstance(layer, GradientCheckpointingLayer)
    )


def trained_share(model: nn.Module) -> str:
    """``"1,234 of 5,678"``: parameters that are trained, of all."""
    counts = torch.tensor([(p.numel() * p.requires_grad, p.numel()) for p in model.parameters()]).sum(0).tolist()
    return f"{counts[0]:,} of {counts[1]:,}"
