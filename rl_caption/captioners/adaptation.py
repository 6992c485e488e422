"""How a pretrained captioner is trained: frozen parameters, low-rank adapters, gradient
checkpointing.
"""

import copy
import fnmatch
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rewards.base import naming
from rl_caption.captioners.base import CaptionerError


def freeze(model: nn.Module, patterns: Sequence[str], required: bool = True) -> None:
    """Freeze the parameters whose names match one of ``patterns`` (wildcards of file
    names: ``*``, ``?``, ``[abc]``).

    With ``required``, raises ``CaptionerError`` if a pattern matches nothing; nothing
    is frozen then.
    """
    # Tied weights have several names, and each freezes the one tensor.
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    frozen: list[str] = []
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if required and not matches:
            raise CaptionerError(
                f"model.freeze has {pattern!r}, which matches no parameter: they have names such "
                f"as {names[0]} and {names[-1]}"
            )
        frozen += matches
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def add_lora(
    model: nn.Module, lora: Mapping[str, Any], targets: Sequence[str] | str
) -> Any:
    """Add low-rank adapters (Hu et al. 2022) in place, and freeze all other parameters.

    ``lora`` has rank ``r``, ``alpha`` and ``dropout``
    (``captioners.config.LoraConfig``). Adapters are float32, whatever the type of the
    weights; their output is scaled by alpha / r. ``targets`` are ends of module names,
    or one regular expression for whole names. Returns the ``peft`` configuration.

    Raises:
        CaptionerError: ``targets`` match no module.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(
        r=lora["r"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=names,
        bias="none",
    )
    wrong = naming("model.lora.target_modules", (ValueError,), CaptionerError)
    with wrong, warnings.catch_warnings():
        # peft warns that it transposes the weights of GPT-2's Conv1D, which is right.
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return config


@torch.no_grad()
def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """State dict of the model with every adapter merged into its weight, in float32.

    A weight that was tied to an adapted weight stays as it was trained, as a tensor of
    its own (``unties``).
    """
    merged = {
        name.replace(".base_layer.", "."): value
        for name, value in model.state_dict().items()
        if ".lora_" not in name
    }
    if unties(model):
        merged = {name: value.clone() for name, value in merged.items()}
    for name, adapter in _adapters(model).items():
        weight = merged[f"{name}.weight"].float()
        for key in adapter.scaling:
            weight = weight + adapter.get_delta_weight(key)
        merged[f"{name}.weight"] = weight
    return merged


def unties(model: nn.Module) -> bool:
    """Whether an adapter changes one of several tied weights: an input table, say, but
    not the output layer.
    """
    counts = Counter(value.data_ptr() for value in model.state_dict().values())
    weights = (adapter.get_base_layer().weight for adapter in _adapters(model).values())
    return any(counts[weight.data_ptr()] > 1 for weight in weights)


def untie(config: Any) -> None:
    """Set ``tie_word_embeddings`` to False in a configuration of Transformers and in
    its sub-configurations.
    """
    config.tie_word_embeddings = False
    for name in config.sub_configs:
        untie(getattr(config, name))


def _adapters(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


def save_adapters(model: nn.Module, config: Any, base: str, folder: Path) -> None:
    """Write the adapters alone, in the format of ``peft``, for
    ``PeftModel.from_pretrained(base_model, folder)``.

    ``config`` is what ``add_lora`` returned, ``base`` the name of the model that the
    adapters were added to.
    """
    weights = {
        f"base_model.model.{name.replace('.default.', '.')}": value.detach()
        .cpu()
        .contiguous()
        for name, value in model.state_dict().items()
        if ".lora_" in name
    }
    config = copy.copy(config)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def checkpoint_layers(model: nn.Module) -> None:
    """Gradient checkpointing of Transformer layers, in eval mode too.

    Transformers' own is active in training mode only, but self-critical training scores
    with dropout off. Names of modules and weights stay as they are; a wrapper module
    around each layer would change them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layer: Any
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_forward_without_storing, layer.forward)


def _forward_without_storing(
    forward: Callable[..., Any], *positional: Any, **named: Any
) -> Any:
    if not torch.is_grad_enabled():  # sampling
        return forward(*positional, **named)
    return checkpoint(forward, *positional, use_reentrant=False, **named)
