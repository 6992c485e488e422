"""State dicts of L-CLIP in the layout of the released training checkpoints, and back.

A released file is a Lightning checkpoint; its ``state_dict`` has the student under ``student.`` after stage 1 (one
tower) and under ``student.image_encoder.`` and ``student.text_encoder.`` after stage 2. Here the towers are ``image.``
and ``text.`` always, so two converted stage-1 checkpoints, merged, are the state of one ``LCLIP``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.model_files import check_state, state_shapes

Stage = Literal[1, 2]

STAGE_2_PREFIXES = {"image": "student.image_encoder.", "text": "student.text_encoder."}
TO_OURS = (
    (r"^(image)\.patch_embed\.proj\.", r"\1.patch_embed."),
    (r"^(text)\.patch_embed\.", r"\1.token_embed."),
    (r"\.attn\.conv_l\.instances\.", ".attn.mix_before."),
    (r"\.attn\.conv_w\.instances\.", ".attn.mix_after."),
    (r"\.(norm[12])\.instances\.", r".\1."),
    (r"\.(blocks\.\d+)\.block\.", r".\1."),
)
TO_RELEASED = (
    (r"^(image)\.patch_embed\.", r"\1.patch_embed.proj."),
    (r"^(text)\.token_embed\.", r"\1.patch_embed."),
    (r"\.attn\.mix_before\.", ".attn.conv_l.instances."),
    (r"\.attn\.mix_after\.", ".attn.conv_w.instances."),
    (r"\.(norm[12])\.", r".\1.instances."),
    (r"\.(blocks\.\d+)\.", r".\1.block."),
)


def from_released(state_dict: Mapping[str, Tensor], config: LCLIPConfig | None = None) -> dict[str, Tensor]:
    """Rename the keys of a released checkpoint's state; ``teacher.*`` is left out and tensors are not copied.

    Args:
        state_dict: What the checkpoint has under ``state_dict``, of stage 1 or stage 2, which the keys tell.
        config: Shape of the model; None is the default. Released models attend padding: ``pad_attention="full"``.

    Returns:
        The state with ``image.`` and ``text.`` keys; of one tower only for stage 1.

    Raises:
        ValueError: there is no student, or a key is missing, unexpected or of the wrong shape; keys are named.
    """
    if "state_dict" in state_dict:
        raise ValueError("this is a whole checkpoint: pass what it has under 'state_dict'")
    student = {key: tensor for key, tensor in state_dict.items() if not key.startswith("teacher.")}
    if not any(key.startswith("student.") for key in student):
        raise ValueError(f"no key starts with 'student.': the first keys are {sorted(state_dict)[:3]}")
    if any(key.startswith(tuple(STAGE_2_PREFIXES.values())) for key in student):
        prefixes = STAGE_2_PREFIXES
    else:
        has_image = any(key.startswith(("student.cls_token", "student.patch_embed.proj.")) for key in student)
        prefixes = {"image" if has_image else "text": "student."}
    # Messages about what is wrong name the keys as the checkpoint has them.
    wanted = {_released_key(name, prefixes): (name, shape) for name, shape in _shapes(config, set(prefixes)).items()}
    check_state(
        student, {key: shape for key, (_, shape) in wanted.items()}, "released weights", _rank_hint(student, wanted)
    )
    return {_our_key(key, prefixes): tensor for key, tensor in student.items()}


def to_released(
    state_dict: Mapping[str, Tensor], stage: Stage = 2, config: LCLIPConfig | None = None
) -> dict[str, Tensor]:
    """Rename the keys of an ``LCLIP`` state as the released checkpoints have them; the inverse of ``from_released``.

    Args:
        state_dict: The state with ``image.`` and ``text.`` keys; for stage 1 those of one tower only.
        stage: 1 for the prefix ``student.``, 2 for ``student.image_encoder.`` and ``student.text_encoder.``.
        config: Shape of the model; None is the default.

    Raises:
        ValueError: the stage is neither, stage 1 has two towers, or keys are missing, unexpected or of the wrong shape.
    """
    if stage not in (1, 2):
        raise ValueError(f"stage is {stage!r}: expected 1 or 2")
    towers = {key.partition(".")[0] for key in state_dict} & set(STAGE_2_PREFIXES)
    if stage == 1 and len(towers) != 1:
        raise ValueError(f"a stage-1 checkpoint has one tower: the state has {sorted(towers) or 'none'}")
    prefixes = STAGE_2_PREFIXES if stage == 2 else {towers.copy().pop(): "student."}
    check_state(dict(state_dict), _shapes(config, set(prefixes)), "weights")
    return {_released_key(name, prefixes): tensor for name, tensor in state_dict.items()}


def _shapes(config: LCLIPConfig | None, towers: set[str]) -> dict[str, tuple[int, ...]]:
    config = config or LCLIPConfig()
    if min(config.image_repeats, config.text_repeats) < 2:
        raise ValueError(
            "the released layout has blocks that are repeated: image_repeats and text_repeats have to be >= 2"
        )
    with torch.device("meta"):
        shapes = state_shapes(LCLIP(config))
    return {name: shape for name, shape in shapes.items() if name.partition(".")[0] in towers}


def _our_key(key: str, prefixes: dict[str, str]) -> str:
    tower, prefix = next((tower, prefix) for tower, prefix in prefixes.items() if key.startswith(prefix))
    return _renamed(f"{tower}.{key.removeprefix(prefix)}", TO_OURS)


def _released_key(name: str, prefixes: dict[str, str]) -> str:
    tower, _, rest = _renamed(name, TO_RELEASED).partition(".")
    return prefixes[tower] + rest


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _rank_hint(student: Mapping[str, Tensor], wanted: Mapping[str, object]) -> str:
    """What to change when the checkpoint and the configuration disagree on the word embedding's factorisation."""
    has_table, wants_table = (
        any(key.endswith("patch_embed.weight") for key in keys) for keys in (student.keys(), wanted.keys())
    )
    has_rank = any(key.endswith("patch_embed.0.weight") for key in student)
    if has_table and not wants_table:
        return " (the word embedding is one table: use embedding_rank=None)"
    if has_rank and wants_table:
        return " (the word embedding is factorised: set embedding_rank)"
    return ""
