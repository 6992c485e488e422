"""Students of L-CLIP's distillation: made from a configuration or from exported folders, and
exported again.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rewards.clip.pretrained import save_encoder_config
from rewards.clip.student import (
    LCLIP,
    MODEL_TYPE,
    ImageStudent,
    LCLIPConfig,
    TextStudent,
    load_student,
)
from rewards.model_files import MANIFEST, float_state, read_object, save_model
from rl_caption.reward_models.teacher import Tower
from rl_caption.runtime.errors import ConfigError, naming

TOWERS: dict[Tower, Any] = {"image": ImageStudent, "text": TextStudent}
TOWER_TYPES: dict[Tower, str] = {"image": f"{MODEL_TYPE}_image", "text": f"{MODEL_TYPE}_text"}
"""``model_type`` in config.json of one tower; a whole L-CLIP has another, so neither is taken for
the other.
"""
TEACHER = "teacher_fingerprint"
"""Key in a tower's config.json: ``FrozenEncoder.fingerprint`` of the model that it was distilled
from.
"""


def student_config(kwargs: Mapping[str, Any], embed_dim: int | None = None) -> LCLIPConfig:
    """The shape of a student, whose joint width is the teacher's ``embed_dim``, if that is known.

    Raises ``ConfigError`` for arguments that make no student, and for another ``embed_dim`` in
    ``kwargs``.
    """
    width = {} if embed_dim is None else {"embed_dim": embed_dim}
    with naming("model.kwargs", (TypeError, ValueError)):
        config = LCLIPConfig(**(width | dict(kwargs)))
    return config if embed_dim is None else _checked_width(config, embed_dim)


def _checked_width(config: LCLIPConfig, embed_dim: int) -> LCLIPConfig:
    if config.embed_dim != embed_dim:
        raise ConfigError(
            f"model.kwargs.embed_dim is {config.embed_dim}, the teacher's embeddings have "
            f"{embed_dim} dimensions: the "
            "student's are compared with them, so set it to that"
        )
    return config


def save_tower(tower: nn.Module, which: Tower, folder: Path, teacher: str | None = None) -> None:
    """Write ``model.safetensors`` and ``config.json`` of one tower to ``folder``; ``teacher`` is
    its fingerprint.
    """
    save_encoder_config(getattr(tower, "encoder", None), folder / "image_encoder")
    config: Any = tower.config
    origin = {"model_type": TOWER_TYPES[which]} | ({} if teacher is None else {TEACHER: teacher})
    save_model(float_state(tower), {**origin, **asdict(config)}, folder)


def _load_tower(
    path: str, which: Tower, key: str, embed_dim: int, teacher: str | None = None
) -> Any:
    """A tower that ``save_tower`` wrote; ``key`` of the configuration names the folder."""
    folder = Path(path)
    try:
        tower: Any = load_student(TOWERS[which], folder, TOWER_TYPES[which], [TEACHER])
        origin = read_object(folder / "config.json").get(TEACHER)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {error}; expected what distill_{which} exports") from error
    if None not in (origin, teacher) and origin != teacher:
        raise ConfigError(
            f"{key} is {path!r}, distilled from a teacher of fingerprint {origin}; this run's "
            f"teacher has {teacher}: "
            "name the same (weights, preprocessing and precision), or distil the tower from this "
            "one. If only library "
            f"versions differ, remove {TEACHER} from the tower's config.json, and {MANIFEST}"
        )
    _checked_width(tower.config, embed_dim)
    return tower


def build_tower(
    which: Tower, init: str | None, kwargs: Mapping[str, Any], embed_dim: int
) -> nn.Module:
    """One tower, from a folder or from random weights; ``ConfigError`` where neither can be."""
    if init is None:
        return TOWERS[which](student_config(kwargs, embed_dim))
    return _load_tower(init, which, "model.init", embed_dim)


def build_dual(
    init: str | None,
    towers: Mapping[Tower, str | None],
    kwargs: Mapping[str, Any],
    embed_dim: int,
    teacher: str | None = None,
) -> LCLIP:
    """A whole L-CLIP: from its folder, from one folder for each tower, or with random weights where
    there is none.

    ``kwargs`` are arguments of ``LCLIPConfig`` that no folder gives, ``embed_dim`` is the teacher's
    joint width. ``teacher`` is the fingerprint that towers must name as the teacher they were
    distilled from; None takes any.

    Raises:
        ConfigError: a folder is not what it should be, the towers or ``kwargs`` do not fit each
            other, the joint width is not the teacher's, or a tower was distilled from another
            teacher.
    """
    folders = {which: path for which, path in towers.items() if path is not None}
    if init is not None:
        with naming("model.init"):
            model = LCLIP.from_pretrained(init).train()
        _checked_width(model.config, embed_dim)
        return model
    loaded = {
        which: _load_tower(path, which, f"model.{which}_init", embed_dim, teacher)
        for which, path in folders.items()
    }
    config = _joined_config(
        {which: tower.config for which, tower in loaded.items()}, kwargs, embed_dim
    )
    with torch.device("meta"):
        model = LCLIP(replace(config, image_encoder=None))
    model.config = config
    for which, build in TOWERS.items():
        tower = loaded[which] if which in loaded else build(config)
        tower.config = config
        setattr(model, which, tower)
    return model


def _joined_config(
    towers: Mapping[Tower, LCLIPConfig], kwargs: Mapping[str, Any], embed_dim: int
) -> LCLIPConfig:
    """The shape of both towers: that of loaded towers as they are, the rest from ``kwargs``."""
    values = dict(kwargs)
    source: dict[str, str] = dict.fromkeys(kwargs, "model.kwargs")
    for which, config in towers.items():
        for name, value in asdict(config).items():
            owner = "image" if name.startswith("image_") or name == "patch_size" else "text"
            if owner != which and name not in ("embed_dim", "mlp_ratio"):
                continue
            if name in values and values[name] != value:
                conflict = f"model.{which}_init has {name} {value!r}, but {source[name]} has {values[name]!r}"
                raise ConfigError(f"{conflict}: expected equal values")
            values[name], source[name] = value, f"model.{which}_init"
    return student_config(values, embed_dim)


@torch.no_grad()
def copy_patch_embedding(student: ImageStudent, teacher: Any) -> list[str]:
    """Copy patch projection, class token and, where they fit, positions of an open_clip ViT, and
    freeze them.

    The bias of the student's patch projection has no counterpart in the teacher: it stays random
    and is trained, as in the released code. Returns the names of the frozen parameters.

    Raises:
        ConfigError: the teacher is no ViT, or its patches have another size or width.
    """
    visual = getattr(teacher, "visual", None)
    sources = {
        "patch_embed.weight": getattr(getattr(visual, "conv1", None), "weight", None),
        "cls_token": getattr(visual, "class_embedding", None),
        "pos_embed": getattr(visual, "positional_embedding", None),
    }
    expected = tuple(student.get_parameter("patch_embed.weight").shape)
    kernel = sources["patch_embed.weight"]
    if (
        kernel is None
        or sources["cls_token"] is None
        or kernel.ndim != 4
        or kernel.shape[2] != visual.conv1.stride[0]  # type: ignore[union-attr]
        or tuple(kernel.shape) != expected
    ):
        raise ConfigError(
            "the teacher's image encoder is not a ViT with patches of the student's width and "
            "size, "
            f"{expected[0]} and {expected[2]} pixels, to copy: set train.freeze_patch_embed to "
            f"false"
        )
    frozen = []
    for name, source in sources.items():
        target = student.get_parameter(name)
        if source is not None and source.numel() == target.numel():
            target.copy_(source.reshape(target.shape))
            target.requires_grad_(False)
            frozen.append(name)
    return frozen
