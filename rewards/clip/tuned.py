"""Checkpoints of CLIPs that were tuned further, in the form in which PAC-S and PAC-S++ are released.

Such a file holds weights under OpenAI's or open_clip's keys, perhaps with their low-rank updates (LoRA), and says
neither the activation nor the preprocessing: both are those of the weights that it was tuned from, which a tag of
open_clip names. Low-rank updates are added to the weights when the file is read; nothing after that knows of them.

Source of the updates: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, equation 3; for
convolutions, the released code of PAC-S++.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from rewards.clip.encoder import MlpDeltas
from rewards.model_files import check_numbers, check_state, read_state, state_shapes

ALPHA = 1.0
"""Numerator of the updates' scale alpha / r, as PAC-S++ has it; files do not say. Its r of 4 makes the scale 0.25."""
RELEASED = {
    "clip_ViT-B-32.pth": ("ViT-B-32", "openai"),
    "openClip_ViT-L-14.pth": ("ViT-L-14", "laion2b_s32b_b82k"),
    "PAC++_clip_ViT-B-32.pth": ("ViT-B-32", "openai"),
    "PAC++_clip_ViT-L-14.pth": ("ViT-L-14", "openai"),
}
"""Files of the repository aimagelab/pacscore -> architecture of open_clip, and the tag whose weights were tuned."""
_FACTOR = re.compile(r"(?P<owner>.+)(?P<joint>_|\.)lora_(?P<factor>[AB])")
_MLP = re.compile(r".+\.mlp\.c_(fc|proj)\.weight")
_ARCHIVE_KEYS = ("input_resolution", "context_length", "vocab_size")
"""Keys of OpenAI's archives that are no weights."""


def low_rank_delta(a: Tensor, b: Tensor, shape: Sequence[int], alpha: float = ALPHA) -> Tensor:
    """Compute (alpha / r) B A in the shape of the weight W it is added to: W x + (alpha / r) B A x = (W + delta) x.

    Args:
        a: [r, in] for a W of [out, in]; [r k, in k] for a kernel of [out, in, k, k].
        b: [out, r]; for a kernel [out k, r k]. The product [out k, in k] is read row by row as [out, in, k, k].
        shape: of W, two or four numbers.
        alpha: divided by the rank r, which follows from ``a``.

    Returns:
        ``shape``, float32.

    Raises:
        ValueError: the three shapes do not belong together.
    """
    if len(shape) not in (2, 4):
        raise ValueError(f"the weight has the shape {list(shape)}: expected two or four numbers")
    side = shape[-1] if len(shape) == 4 else 1
    rows, columns, outputs = (a.shape[0] if a.ndim else 0), shape[1] * side, shape[0] * side
    if tuple(a.shape) != (rows, columns) or tuple(b.shape) != (outputs, rows) or rows == 0 or rows % side:
        raise ValueError(
            f"A is {list(a.shape)} and B {list(b.shape)}: for a weight {list(shape)} expected [n, {columns}] and "
            f"[{outputs}, n]" + (f", n a multiple of {side}" if side > 1 else "")
        )
    return (b.float() @ a.float()).reshape(tuple(shape)) * (alpha * side / rows)


def merge_low_rank(
    state: Mapping[str, Tensor], mlp_deltas: MlpDeltas = "ignored", alpha: float = ALPHA
) -> dict[str, Tensor]:
    """Add the low-rank updates of a state to its weights.

    The factors of ``W`` are ``W_lora_A`` and ``W_lora_B`` (``in_proj_weight``), those of ``owner.weight`` are
    ``owner.lora_A`` and ``owner.lora_B``.

    Args:
        state: weights by key, with or without such factors, in any floating precision.
        mlp_deltas: ``ignored`` leaves out the updates of ``mlp.c_fc`` and ``mlp.c_proj``, as PAC-S++'s released scorer
            does, which takes them for merged; ``added`` adds them as all others.
        alpha: as for ``low_rank_delta``.

    Returns:
        The state without factors, in float32.

    Raises:
        ValueError: ``mlp_deltas`` is neither, a factor or the weight of one is missing, or shapes do not fit; the key
            is named.
    """
    if mlp_deltas not in get_args(MlpDeltas):
        raise ValueError(f"mlp_deltas is {mlp_deltas!r}: expected one of {', '.join(get_args(MlpDeltas))}")
    merged: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        found = _FACTOR.fullmatch(key)
        if found is None:
            merged[key] = value.float() if value.is_floating_point() else value
        else:
            weight = found["owner"] + (".weight" if found["joint"] == "." else "")
            factors.setdefault(weight, {})[found["factor"]] = value
    for weight, pair in factors.items():
        if weight not in merged or len(pair) != 2:
            missing = f"lora_{'A' if 'B' in pair else 'B'}" if len(pair) != 2 else "weight"
            raise ValueError(f"low-rank update of {weight}: its {missing} is missing")
        try:
            delta = low_rank_delta(pair["A"], pair["B"], merged[weight].shape, alpha)
        except ValueError as error:
            raise ValueError(f"low-rank update of {weight}: {error}") from error
        if mlp_deltas == "added" or not _MLP.fullmatch(weight):
            merged[weight] = merged[weight] + delta
    return merged


def load_tuned(name: str, path: Path, tuned_from: str, mlp_deltas: MlpDeltas = "ignored") -> tuple[Any, str]:
    """Build an architecture of open_clip and load a tuned checkpoint into it, key by key.

    Args:
        name: of the architecture, such as ``ViT-B-32``.
        path: the file; ``state_dict`` inside it and prefixes ``module.`` and ``text.`` are looked through.
        tuned_from: tag of open_clip for the weights that the tuning started from: ``openai``, ``laion2b_s32b_b82k``.
            Activation and preprocessing are theirs; nothing is downloaded.
        mlp_deltas: as for ``merge_low_rank``.

    Returns:
        ``open_clip.CLIP`` in float32 with its preprocessing, and what a signature has to say of the above.

    Raises:
        ValueError: the architecture or the tag is unknown, the architecture has other towers than CLIP, or a key of the
            file is missing, unexpected, of the wrong shape or not of finite numbers; the first of each are named.
        OSError, RuntimeError, pickle.UnpicklingError: the file is not there or holds something else.
    """
    import open_clip
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    tag, shape = open_clip.get_pretrained_cfg(name, tuned_from), open_clip.get_model_config(name)
    if not tag or shape is None:
        known = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none; see open_clip.list_models()"
        raise ValueError(f"tuned_from is {tuned_from!r}, the architecture {name!r}: expected one of its tags ({known})")
    if (
        shape.pop("custom_text", False)
        or "timm_model_name" in shape["vision_cfg"]
        or "hf_model_name" in shape["text_cfg"]
    ):
        raise ValueError(f"{name} has other towers than CLIP's: expected an architecture such as ViT-B-32")
    state = read_state(path)
    weights = {
        key.removeprefix("text."): value
        for key, value in merge_low_rank(state, mlp_deltas).items()
        if key not in _ARCHIVE_KEYS
    }
    with torch.random.fork_rng(devices=[]):  # the numbers that are drawn here are overwritten at once
        model: Any = open_clip.CLIP(**shape | {"quick_gelu": bool(tag.get("quick_gelu"))})
    check_state(weights, state_shapes(model), "weights")
    check_numbers(weights.items(), str(path))
    model.load_state_dict(weights)
    preprocessing = merge_preprocess_dict(asdict(PreprocessCfg()), tag) | {"size": model.visual.image_size}
    set_model_preprocess_cfg(model, preprocessing)
    has_deltas = any(_FACTOR.fullmatch(key) for key in state)
    return model, f"tuned from {tuned_from}" + (f",MLP deltas {mlp_deltas}" if has_deltas else "")
