"""The networks that are trained: raw embeddings by name, through one ``forward``, as data parallelism needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rewards.clip.backbone import load_backbone
from rewards.clip.checkpoints import KEEP, stretch_text_tower
from rewards.clip.preprocessing import Preprocessing, causal_text_features, preprocessing_of
from rewards.model_files import check_memory, check_sizes, check_state, state_shapes
from rl_caption.config.build import ConfigError
from rl_caption.reward_models.trainable import is_frozen, merged_state


class Towers(nn.Module):
    """Towers by the kind of what they read: ``image`` embeds pixels, ``text`` embeds token ids."""

    def __init__(self, towers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(towers)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Embed inputs by name: [B, 3, S, S] or [B, L] to raw [B, D]; a name that starts with ``image`` is pixels."""
        return {name: self.towers[_tower(name)](value) for name, value in inputs.items()}


class ClipTowers(nn.Module):
    """An open_clip model, whose temperature is a further output.

    Args:
        clip: the model.
        max_scale: the factor of the cosines is kept in [1, ``max_scale``], as CLIP does; it is clamped in place before
            it is used, so that its gradient does not vanish at the limit.
        frozen_positions: so many first positions of the text tower get no gradient.
    """

    def __init__(self, clip: Any, max_scale: float = 100.0, frozen_positions: int = 0) -> None:
        super().__init__()
        self.clip = clip
        self.max_scale = max_scale
        self.trims = is_causal(clip)
        if frozen_positions:
            later = (torch.arange(len(clip.positional_embedding)) >= frozen_positions)[:, None]
            clip.positional_embedding.register_hook(lambda gradient: gradient * later.to(gradient.device))

    def train(self, mode: bool = True) -> ClipTowers:
        """As of any module; frozen batch norm stays as in evaluation: its statistics belong to its weights."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm) and is_frozen(module):
                module.eval()
        return self

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """As ``Towers.forward``, and ``scale``, the inverse temperature, a scalar."""
        with torch.no_grad():
            self.clip.logit_scale.clamp_(0, math.log(self.max_scale))
        outputs = {name: self._embed(_tower(name), value) for name, value in inputs.items()}
        return outputs | {"scale": self.clip.logit_scale.exp()}

    def _embed(self, tower: str, value: Tensor) -> Tensor:
        if tower == "image":
            return self.clip.encode_image(value)
        return causal_text_features(self.clip, value) if self.trims else self.clip.encode_text(value)


def _tower(name: str) -> str:
    return "image" if name.startswith("image") else "text"


def is_causal(clip: Any) -> bool:
    """Whether nothing after EOT reaches the text embedding, so that ids may be cut there."""
    return clip.attn_mask is not None and clip.text_pool_type == "argmax"


def random_clip(name: str | None, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An open_clip model with random weights, and its model JSON.

    Args:
        name: an architecture of open_clip; None leaves everything to ``kwargs``.
        kwargs: open_clip's model JSON, section by section over that of ``name``.

    Raises:
        ConfigError: an unknown architecture, or a shape that open_clip cannot build.
    """
    import open_clip
    from open_clip.transform import PreprocessCfg

    shape = _architecture(name) if name is not None else {}
    for key, value in kwargs.items():
        shape[key] = {**shape.get(key, {}), **value} if isinstance(value, dict) else value
    if not {"embed_dim", "vision_cfg", "text_cfg"} <= shape.keys():
        raise ConfigError(
            f"model.kwargs has {sorted(kwargs)}: expected open_clip's model JSON, embed_dim, vision_cfg and text_cfg, "
            "or the name of an architecture in model.name"
        )
    _check_native(shape, "model.kwargs")
    shape.pop("custom_text", None)
    try:
        check_sizes(shape)
        with torch.device("meta"):
            check_memory(open_clip.CLIP(**shape))
        model = open_clip.CLIP(**shape)
    except (TypeError, ValueError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        raise ConfigError(f"model.kwargs: open_clip cannot build this model: {error}") from error
    model.visual.preprocess_cfg = vars(PreprocessCfg(size=model.visual.image_size))
    return model, shape


def pretrained_clip(
    name: str | None, init: str, context_length: int | None = None, keep_positions: int = KEEP
) -> tuple[Any, dict[str, Any], Preprocessing]:
    """An open_clip model with the weights ``init``, its model JSON, and its preprocessing.

    Args:
        name: architecture that a tag or a checkpoint file needs; None where ``init`` is a folder.
        init: folder of an open_clip model, tag or checkpoint file.
        context_length: stretch the text tower to so many positions; None leaves it as it is.
        keep_positions: the first ones, which stay as they are.

    Raises:
        ConfigError: the weights cannot be found or loaded, belong to another kind of model, or cannot be stretched so.
    """
    import open_clip

    folder = Path(init)
    if name is None and not (folder / "open_clip_config.json").is_file():
        raise ConfigError(
            f"model.init is {init!r}: expected a folder with open_clip_config.json, or a tag or checkpoint file "
            "together with model.name"
        )
    try:
        backbone = load_backbone(init) if name is None else load_backbone(name, init)
    except ValueError as error:
        raise ConfigError(f"model.init: {error}") from error
    if name is None:
        shape = json.loads((folder / "open_clip_config.json").read_text(encoding="utf-8"))["model_cfg"]
    else:
        shape = _architecture(name)
    _check_native(shape, "model.init")
    model: Any = backbone.model
    if not isinstance(model, open_clip.CLIP) or isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(f"model.init {init!r} is a {type(model).__name__}: expected open_clip's CLIP")
    # What was loaded has the last word: tags and OpenAI's archives bring QuickGELU, which the architecture leaves out.
    shape["quick_gelu"] = any(isinstance(module, open_clip.transformer.QuickGELU) for module in model.modules())
    shape["text_cfg"] = dict(shape["text_cfg"]) | {"context_length": int(model.context_length)}
    _check_fits(model, shape, f"model.init {init!r}" + (f" with model.name {name!r}" if name else ""))
    if context_length is not None:
        try:
            stretch_text_tower(model, context_length, keep_positions)
        except ValueError as error:
            raise ConfigError(f"model.context_length, model.keep_positions: {error}") from error
        shape["text_cfg"]["context_length"] = context_length
    return model.float().requires_grad_(True), shape, backbone.preprocessing


def _architecture(name: str) -> dict[str, Any]:
    import open_clip

    shape = open_clip.get_model_config(name)
    if shape is None:
        raise ConfigError(f"model.name is {name!r}, which open_clip does not know: see open_clip.list_models()")
    return dict(shape)


def _check_fits(model: Any, shape: dict[str, Any], what: str) -> None:
    """An archive is loaded as what it holds, whatever architecture was named; the export would not load again."""
    import open_clip

    with torch.device("meta"):
        expected = open_clip.CLIP(**{key: value for key, value in shape.items() if key != "custom_text"})
    try:
        check_state(model.state_dict(), state_shapes(expected), f"the weights of {what}")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_native(shape: dict[str, Any], key: str) -> None:
    """Only CLIP's own towers and tokeniser: others bring files of their own, which the export would not have."""
    sections = {name: shape.get(name, {}) for name in ("vision_cfg", "text_cfg")}
    foreign = [
        f"{section}.{option}"
        for section, values in sections.items()
        for option in ("timm_model_name", "hf_model_name", "hf_tokenizer_name")
        if values.get(option)
    ]
    if foreign or "multimodal_cfg" in shape:
        raise ConfigError(f"{key}: a model with {', '.join(foreign) or 'multimodal_cfg'} cannot be trained here")


def save_clip(model: Any, shape: dict[str, Any], folder: Path) -> None:
    """Write a folder that ``load_backbone`` and ``open_clip.create_model('local-dir:...')`` read; updates merged."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in merged_state(model).items()}
    save_file(weights, folder / "open_clip_model.safetensors", metadata={"format": "pt"})
    used = preprocessing_of(model.visual)
    record = {
        "size": used.size,
        "mode": "RGB",
        "mean": list(used.mean),
        "std": list(used.std),
        "interpolation": used.interpolation,
        "resize_mode": used.resize,
    }
    text = json.dumps({"model_cfg": shape, "preprocess_cfg": record}, indent=2) + "\n"
    (folder / "open_clip_config.json").write_text(text, encoding="utf-8")
