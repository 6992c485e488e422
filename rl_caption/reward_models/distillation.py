"""Students of the L-CLIP distillation: from a configuration, or from the folders that its stages export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rewards.clip.student import LCLIP, MODEL_TYPE, ImageStudent, LCLIPConfig, TextStudent
from rewards.model_files import (
    MANIFEST,
    check_folder,
    check_memory,
    check_state,
    read_object,
    read_weights,
    state_shapes,
)
from rl_caption.config.build import ConfigError

Tower: TypeAlias = Literal["image", "text"]
TOWERS: dict[Tower, Any] = {"image": ImageStudent, "text": TextStudent}
TOWER_TYPES: dict[Tower, str] = {"image": f"{MODEL_TYPE}_image", "text": f"{MODEL_TYPE}_text"}
"""``model_type`` in config.json of one tower; a whole L-CLIP has another, so neither is taken for the other."""


TEACHER = "teacher_fingerprint"
"""Key in a tower's config.json: ``Backbone.fingerprint`` of the model that it was distilled from."""


def check_names(kwargs: Mapping[str, Any]) -> None:
    """Check that ``kwargs`` are arguments of ``LCLIPConfig``.

    Raises:
        ConfigError: an unknown argument.
    """
    known = {field.name for field in fields(LCLIPConfig)}
    unknown = sorted(set(kwargs) - known)
    if unknown:
        raise ConfigError(f"model.kwargs has {unknown}: LCLIPConfig takes {sorted(known)}")


def student_shape(kwargs: Mapping[str, Any]) -> LCLIPConfig:
    """The shape, whatever the teacher's.

    Raises:
        ConfigError: an unknown argument, or a value out of range.
    """
    check_names(kwargs)
    try:
        config = LCLIPConfig(**kwargs)
        with torch.device("meta"):
            check_memory(LCLIP(config))
        return config
    except ValueError as error:
        raise ConfigError(f"model.kwargs: {error}") from error


def student_config(kwargs: Mapping[str, Any], embed_dim: int) -> LCLIPConfig:
    """``student_shape``, whose joint width must be the teacher's.

    Raises:
        ConfigError: as ``student_shape``, or another ``embed_dim`` than the teacher's.
    """
    return checked_width(student_shape(kwargs), embed_dim)


def checked_width(config: LCLIPConfig, embed_dim: int) -> LCLIPConfig:
    """``config``, if its joint width is the teacher's."""
    if config.embed_dim != embed_dim:
        raise ConfigError(
            f"model.kwargs.embed_dim is {config.embed_dim}, the teacher's embeddings have {embed_dim} dimensions: the "
            "student's are compared with them, so set it to that"
        )
    return config


def save_tower(tower: nn.Module, kind: Tower, folder: Path, teacher: str | None = None) -> None:
    """Write ``model.safetensors`` and ``config.json`` of one tower to ``folder``; ``teacher`` is its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in tower.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config: Any = tower.config
    origin = {"model_type": TOWER_TYPES[kind]} | ({} if teacher is None else {TEACHER: teacher})
    text = json.dumps({**origin, **asdict(config)}, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def load_tower(path: str, kind: Tower, key: str) -> tuple[dict[str, Tensor], LCLIPConfig]:
    """Weights and shape of a tower that ``save_tower`` wrote; ``key`` is the configuration key that names the folder.

    Raises:
        ConfigError: a file is missing, the folder holds something else, or its weights do not fit its configuration.
    """
    folder = Path(path)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(f"{key} is {path!r}, which has no {name}: expected what distill_{kind} exports")
    try:
        check_folder(folder)
        values = read_object(folder / "config.json")
        values.pop(TEACHER, None)
        found = values.pop("model_type", None)
        if found != TOWER_TYPES[kind]:
            raise ConfigError(f"{key} is {path!r}, a {found!r}: expected {TOWER_TYPES[kind]!r}, see distill_{kind}")
        config, weights = LCLIPConfig.from_dict(values), read_weights(folder / "model.safetensors")
        with torch.device("meta"):
            shapes = state_shapes(TOWERS[kind](config))
        check_state(weights, shapes, f"weights in {path!r}")
    except (ValueError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{key}: {error}") from error
    return weights, config


def tower_teacher(path: str) -> str | None:
    """Fingerprint of the teacher of a tower's folder; None where the folder does not say, as those of older runs."""
    found: str | None = read_object(Path(path) / "config.json").get(TEACHER)
    return found


def build_tower(kind: Tower, init: str | None, kwargs: Mapping[str, Any], embed_dim: int) -> nn.Module:
    """One tower, from a folder or from random weights.

    Raises:
        ConfigError: see ``load_tower`` and ``student_config``; or both a folder and a shape are given.
    """
    if init is None:
        return TOWERS[kind](student_config(kwargs, embed_dim))
    _check_no_shape(kwargs, "model.init")
    weights, config = load_tower(init, kind, "model.init")
    tower = TOWERS[kind](checked_width(config, embed_dim))
    tower.load_state_dict(weights)
    return tower


def build_dual(
    init: str | None,
    towers: Mapping[Tower, str | None],
    kwargs: Mapping[str, Any],
    embed_dim: int,
    teacher: str | None = None,
) -> LCLIP:
    """A whole L-CLIP: from its folder, from one folder for each tower, or with random weights where there is none.

    Args:
        init: folder of a whole one.
        towers: folder of each tower.
        kwargs: arguments of ``LCLIPConfig`` that no folder says.
        embed_dim: the teacher's joint width.
        teacher: its fingerprint, which towers must have been distilled from; None compares none.

    Raises:
        ConfigError: a folder is not what it should be, the towers or ``kwargs`` do not fit each other, the joint
            width is not the teacher's, or a tower was distilled from another teacher.
    """
    folders = {kind: path for kind, path in towers.items() if path is not None}
    if init is not None:
        _check_no_shape(kwargs, "model.init")
        if folders:
            raise ConfigError("model.init is a whole L-CLIP: leave model.image_init and model.text_init out")
        try:
            model = LCLIP.from_pretrained(init).train()
        except (ValueError, OSError) as error:
            raise ConfigError(f"model.init: {error}") from error
        checked_width(model.config, embed_dim)
        return model
    loaded = {kind: load_tower(path, kind, f"model.{kind}_init") for kind, path in folders.items()}
    for kind, path in folders.items():
        found = tower_teacher(path)
        if None not in (found, teacher) and found != teacher:
            raise ConfigError(
                f"model.{kind}_init is {path!r}, distilled from a teacher of fingerprint {found}; this run's teacher "
                f"has {teacher}: name the same (weights, preprocessing and precision), or distil the tower from this "
                f"one. If only library versions differ, remove {TEACHER} from the tower's config.json, and {MANIFEST}"
            )
    if len(loaded) == len(TOWERS):
        _check_no_shape(kwargs, "model.image_init with model.text_init")
    model = LCLIP(_joined_config({kind: config for kind, (_, config) in loaded.items()}, kwargs, embed_dim))
    for kind, (weights, _) in loaded.items():
        model.get_submodule(kind).load_state_dict(weights)
    return model


def _joined_config(towers: Mapping[Tower, LCLIPConfig], kwargs: Mapping[str, Any], embed_dim: int) -> LCLIPConfig:
    """The shape of both towers: of each as its folder says, the rest from ``kwargs``."""
    values = dict(kwargs)
    owner: dict[str, str] = dict.fromkeys(kwargs, "model.kwargs")
    for kind, config in towers.items():
        other = "text" if kind == "image" else "image"
        for name, value in asdict(config).items():
            if _belongs_to(name) == other:
                continue
            if name in values and values[name] != value:
                raise ConfigError(
                    f"model.{kind}_init has {name} {value!r}, {owner[name]} has {values[name]!r}: both towers need the "
                    "same"
                )
            values[name], owner[name] = value, f"model.{kind}_init"
    return student_config(values, embed_dim)


def _belongs_to(name: str) -> str | None:
    """The tower that a field of ``LCLIPConfig`` describes; None where both share it."""
    if name.startswith("image_") or name == "patch_size":
        return "image"
    if name in ("embed_dim", "mlp_ratio"):
        return None
    return "text"


def _check_no_shape(kwargs: Mapping[str, Any], key: str) -> None:
    if kwargs:
        raise ConfigError(f"model.kwargs is set together with {key}, whose folders have the shape: leave it out")


@torch.no_grad()
def copy_patch_embedding(student: ImageStudent, teacher: Any) -> list[str]:
    """Copy patch projection, class token and, where they fit, positions of an open_clip ViT, and freeze them.

    The student's bias of the projection, which the teacher does not have, stays random and is trained, as in the
    released code.

    Returns:
        Names of the frozen parameters.

    Raises:
        ConfigError: the teacher is no ViT, or its patches have another size or width.
    """
    visual = getattr(teacher, "visual", None)
    sources = {
        "patch_embed.weight": getattr(getattr(visual, "conv1", None), "weight", None),
        "cls_token": getattr(visual, "class_embedding", None),
        "pos_embed": getattr(visual, "positional_embedding", None),
    }
    off = "choose the student's model.kwargs.patch_size and image_width so, or set train.freeze_patch_embed to false"
    wanted = tuple(student.patch_embed.weight.shape)
    found = sources["patch_embed.weight"]
    if found is None or sources["cls_token"] is None or found.ndim != 4 or found.shape[2] != visual.conv1.stride[0]:  # type: ignore[union-attr]
        raise ConfigError(f"the teacher's image encoder is no ViT whose patch embedding could be copied: {off}")
    if tuple(found.shape) != wanted:
        raise ConfigError(
            f"the teacher's patches have width {found.shape[0]} and {found.shape[2]} pixels, the student's "
            f"{wanted[0]} and {wanted[2]}: {off}"
        )
    frozen = []
    for name, source in sources.items():
        target = student.get_parameter(name)
        if source is not None and source.numel() == target.numel():
            target.copy_(source.reshape(target.shape))
            target.requires_grad_(False)
            frozen.append(name)
    return frozen
