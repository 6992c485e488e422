"""Which weights of an open_clip model are trained: its last projections, low-rank updates, or all."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rl_caption.config.build import ConfigError

Trainable = Literal["projections", "lora", "all"]
_PROJECTIONS = {"image": ("visual.proj", "visual.attnpool."), "text": ("text_projection",)}
"""Names of the last layers; a ResNet's is its attention pool."""
_BLOCK_WEIGHTS = ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class LowRank(nn.Module):
    """``W + (alpha / rank) B A`` in the place of a weight W (Hu et al. 2022, equation 3); B starts at 0.

    As a parametrisation of the weight it is there for whoever reads it, such as attention in one fused operation.

    Args:
        shape: of W; read row by row as a matrix of ``rows`` rows.
        rows: of that matrix.
        rank: of the update; B is [rows, rank], A [rank, columns].
        scale: factor of the update.
    """

    def __init__(self, shape: torch.Size, rows: int, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, shape.numel() // rows))
        self.lora_b = nn.Parameter(torch.zeros(rows, rank))
        self.scale = scale
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """The updated weight, of the same shape."""
        return weight + self.scale * (self.lora_b @ self.lora_a).view_as(weight)


def train_only(clip: Any, what: Trainable, rank: int = 4, alpha: float = 1.0) -> None:
    """Freeze all of an open_clip model but ``what``.

    Args:
        clip: with CLIP's own towers, all of it trainable.
        what: ``projections``: the last one of either tower, a ResNet's attention pool, and the temperature (PAC-S).
            ``lora``: a ``LowRank`` update of the four matrices of each block in both towers, and of the patches' kernel
            [D, 3, k, k] as a matrix of k D rows with rank k ``rank`` (PAC-S++). ``all``: nothing is frozen.
        rank, alpha: of the updates.

    Raises:
        ConfigError: the model has no such layers.
    """
    if what == "all":
        return
    clip.requires_grad_(False)
    if what == "lora":
        _add_updates(clip, rank, alpha / rank)
        return
    for tower, names in _PROJECTIONS.items():
        found = [parameter for name, parameter in clip.named_parameters() if name.startswith(names)]
        if not found:
            raise ConfigError(f"train.trainable is 'projections', but the {tower} tower has none: take all or lora")
        for parameter in found:
            parameter.requires_grad_(True)
    clip.logit_scale.requires_grad_(True)


def _add_updates(clip: Any, rank: int, scale: float) -> None:
    if not hasattr(clip.visual, "transformer"):
        raise ConfigError("train.trainable is 'lora', but the image tower is no ViT: take projections or all")
    for transformer in (clip.visual.transformer, clip.transformer):
        for block in transformer.resblocks:
            for path in _BLOCK_WEIGHTS:
                owner, _, name = path.rpartition(".")
                module = block.get_submodule(owner)
                shape = getattr(module, name).shape
                parametrize.register_parametrization(module, name, LowRank(shape, shape[0], rank, scale))
    kernel = clip.visual.conv1.weight
    side = kernel.shape[-1]
    update = LowRank(kernel.shape, kernel.shape[0] * side, rank * side, scale)
    parametrize.register_parametrization(clip.visual.conv1, "weight", update)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under the names that it had without updates, which are added to their weights."""
    state = model.state_dict()
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            start = f"{path}." if path else ""
            state = {name: value for name, value in state.items() if not name.startswith(f"{start}parametrizations.")}
            state |= {f"{start}{name}": getattr(module, name) for name in module.parametrizations}
    return state


def is_frozen(module: nn.Module) -> bool:
    """Whether the module has parameters, and none is trained."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
