"""Released checkpoints of CLIP models, and text towers with more positions.

- Long text towers: Zhang et al., "Long-CLIP: Unlocking the Long-Text Capability of CLIP", ECCV
  2024, section 3.2 (knowledge-preserved stretching), in the form that its code computes. SPECS's
  weights have the same layout.
- PAC-S and PAC-S++: weights under OpenAI's or open_clip's keys, perhaps with low-rank
  updates (LoRA, Hu et al., ICLR 2022, equation 3; for convolutions, the released code
  of PAC-S++), which are added to the weights. Such a file does not say which activation
  and preprocessing to use: both come from the weights that the tuning started from,
  which a tag of open_clip names.

Positions count tokens of CLIP's BPE, start and end included.
"""

import logging
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rewards.base import naming
from rewards.devices import is_main_process
from rewards.model_files import check_state, read_state, state_shapes

KEEP = 20
"""Positions that Long-CLIP leaves as they are: most captions that CLIP was trained on end before.
"""
POSITIONS = "positional_embedding"
POSITIONS_FROM_KEEP = "positional_embedding_res"
"""Second table of released long checkpoints: positions from ``KEEP`` on are read from it."""
ALPHA = 1.0
"""Numerator of the scale alpha / r of low-rank updates in PAC-S++, which files do not
tell; its r is 4.
"""
logger = logging.getLogger(__name__)
_ARCHIVE_KEYS = ("input_resolution", "context_length", "vocab_size")
"""Keys of OpenAI's archives that are no weights."""
_FACTOR = re.compile(r"(?P<owner>.+)(?P<joint>_|\.)lora_(?P<factor>[AB])")
_MLP = re.compile(r".+\.mlp\.c_(fc|proj)\.weight")


def stretch_positions(positions: Tensor, keep: int = KEEP, factor: int = 4) -> Tensor:
    """Interpolate positional embeddings P [L, D], L >= 2, to [keep + factor (L - keep), D].

    Rows 0 to keep - 1 are copied. For i from 0 to L - keep - 2 and j from 0 to factor -
    1, ``new[keep + factor i + j] = ((factor - j) P[keep + i] + j P[keep + i + 1]) /
    factor``; the last row of P is extrapolated: ``P[-1] + j (P[-1] - P[-2]) / factor``.
    With L = 77, keep = 20 and factor = 4 there are 248 rows.
    """
    steps = torch.diff(positions, dim=0)[keep:]
    steps = torch.cat([steps, positions[-1:] - positions[-2:-1]])
    shares = torch.arange(factor).to(positions) / factor
    stretched = positions[keep:, None] + shares[None, :, None] * steps[:, None]
    return torch.cat([positions[:keep], stretched.flatten(0, 1)])


def stretch_text_tower(model: Any, context_length: int, keep: int = KEEP) -> None:
    """Give a model of open_clip (``CLIP`` or ``CustomTextCLIP``) ``context_length``
    positions, in place.

    A caption of up to ``keep`` tokens keeps its embedding. Raises ``ValueError`` if the
    text tower is none of open_clip's own, has a class token, or cannot get that number
    of positions.
    """
    tower: Any = model if hasattr(model, POSITIONS) else getattr(model, "text", None)
    is_native = isinstance(getattr(tower, POSITIONS, None), nn.Parameter)
    if not is_native or getattr(tower, "cls_emb", None) is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be stretched: it has no text tower of open_clip with "
            f"{POSITIONS} and without a class token"
        )
    positions = tower.positional_embedding
    rest = len(positions) - keep
    if rest < 1 or context_length < len(positions) or (context_length - keep) % rest:
        raise ValueError(
            f"context_length = {context_length}: {len(positions)} positions, of which the first "
            f"{keep} are kept, can be stretched to {keep} plus a multiple of {rest}"
        )
    factor = (context_length - keep) // rest
    stretched = stretch_positions(positions.detach().float(), keep, factor)
    tower.positional_embedding = nn.Parameter(
        stretched.to(positions.dtype), requires_grad=positions.requires_grad
    )
    if tower.attn_mask is not None:
        mask = tower.attn_mask.new_full((context_length,) * 2, float("-inf")).triu_(1)
        tower.register_buffer("attn_mask", mask, persistent=False)
    tower.context_length = model.context_length = tower.num_pos = context_length


def load_file(name: str, path: Path) -> Any:
    """Build the architecture ``name`` with the weights of a file and its number of positions.

    (open_clip by itself would silently resize the table of positions.) Raises as
    ``read_state``, and ``RuntimeError`` for weights that do not fit.
    """
    import open_clip

    if _is_torchscript(path):  # OpenAI's, with its own architecture and activation
        return open_clip.load_openai_model(str(path), precision="fp32", device="cpu")
    shape: Any = open_clip.get_model_config(name) or {}
    options: dict[str, Any] = {}
    if path.suffix not in (".npz", ".npy"):  # big_vision's, which open_clip converts
        state = read_state(path)
        if POSITIONS_FROM_KEEP in state:
            return _load_long(name, state)
        if is_main_process():
            logger.info(
                "%s does not tell its activation: that of %s is %s (OpenAI's is QuickGELU)",
                path,
                name,
                "QuickGELU" if shape.get("quick_gelu") else "GELU",
            )
        table = state.get(POSITIONS, state.get(f"text.{POSITIONS}"))
        # A class token has a row of its own.
        if table is not None and not shape.get("text_cfg", {}).get("embed_cls"):
            options["force_context_length"] = len(table)
        model: Any = open_clip.create_model(name, pretrained_image=False, **options)
        if state_shapes(model.state_dict()) == state_shapes(state):
            model.load_state_dict(state)
            return model
    # Other layouts, and images of another size.
    return open_clip.create_model(name, str(path), require_pretrained=True, **options)


def _is_torchscript(path: Path) -> bool:
    """Whether a file is a TorchScript archive. Raises ``ValueError`` for one that would
    run code when it is read.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if not any(name.endswith("/constants.pkl") for name in names):
            return False
        for name in names:
            if name.endswith(".py") and b"__setstate__" in archive.read(name):
                raise ValueError(
                    f"{path} is a TorchScript archive that runs code of its own when it is read"
                )
    return True


def _load_long(name: str, state: dict[str, Tensor]) -> Any:
    """Build the architecture with QuickGELU and the weights of a released long checkpoint.

    The released model reads rows 0 to ``KEEP`` - 1 of ``positional_embedding`` and the
    others of ``positional_embedding_res``. As in Long-CLIP's code, weights of
    convolutions, linear layers, attention and projections are first rounded to half
    precision, which changes nothing in files of halves.
    """
    import open_clip
    from open_clip.model import convert_weights_to_lp

    later = state.pop(POSITIONS_FROM_KEEP)
    state[POSITIONS] = torch.cat([state[POSITIONS][:KEEP], later[KEEP:]])
    options: dict[str, Any] = {"force_context_length": len(later)}
    model: Any = open_clip.create_model(
        name, force_quick_gelu=True, pretrained_image=False, **options
    )
    model.load_state_dict(state)
    convert_weights_to_lp(model, torch.float16)
    model.long_layout = True
    return model.float()


def merge_low_rank(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the low-rank updates (alpha / r) B A of a state dict to its weights W; r is
    the rank. Returns the state dict without factors.

    For W [out, in], A is [r, in] and B [out, r]. For a kernel [out, in, k, k], A is [r
    k, in k] and B [out k, r k], and their product [out k, in k] is reshaped row by row.

    A weight ``W`` (``in_proj_weight``) has the factors ``W_lora_A`` and ``W_lora_B``;
    ``owner.weight`` has ``owner.lora_A`` and ``owner.lora_B``. The updates of
    ``mlp.c_fc`` and ``mlp.c_proj`` are left out, as PAC-S++'s released scorer does,
    which takes them for merged. Raises ``ValueError`` with the key if a factor or the
    weight of one is missing, or shapes do not fit.
    """
    merged: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        match = _FACTOR.fullmatch(key)
        if match is None:
            merged[key] = value
        else:
            weight = match["owner"] + (".weight" if match["joint"] == "." else "")
            factors.setdefault(weight, {})[match["factor"]] = value
    for weight, pair in factors.items():
        what = f"low-rank update of {weight}"
        if weight not in merged or len(pair) != 2:
            raise ValueError(f"{what}: a factor or the weight is missing")
        shape = merged[weight].shape
        rank = len(pair["A"]) / (shape[-1] if len(shape) == 4 else 1)
        if not _MLP.fullmatch(weight):
            with naming(what, (RuntimeError,)):
                delta = (pair["B"].float() @ pair["A"].float()).reshape(shape)
            merged[weight] = merged[weight] + delta * (ALPHA / rank)
    return merged


def load_tuned(name: str, path: Path, tuned_from: str) -> Any:
    """Build the architecture ``name`` of open_clip and load a tuned checkpoint into it, key by key.

    Keys may have the prefixes ``module.`` and ``text.``. ``tuned_from`` is the tag of
    open_clip of the weights that the tuning started from (``openai``), which decides
    activation and preprocessing; nothing is downloaded. Returns an ``open_clip.CLIP``
    in float32.

    Raises:
        ValueError: the architecture or the tag is unknown, the architecture has other
            towers than CLIP, or a key of the file is missing, unexpected, of the wrong
            shape or not of finite numbers; the first of each are named.
        OSError, RuntimeError, pickle.UnpicklingError: the file is not there or holds
            something else.
    """
    import open_clip
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.transform import PreprocessCfg, merge_preprocess_dict

    tag = open_clip.get_pretrained_cfg(name, tuned_from)
    shape = open_clip.get_model_config(name)
    if not tag or shape is None:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(name))
        raise ValueError(
            f"tuned_from is {tuned_from!r}: expected a tag of {name!r} ({tags})"
        )
    shape.pop("custom_text", None)
    shape["quick_gelu"] = bool(tag.get("quick_gelu"))
    weights = {}
    for key, value in merge_low_rank(read_state(path)).items():
        if key not in _ARCHIVE_KEYS:
            weights[key.removeprefix("text.")] = value
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
        model: Any = open_clip.CLIP(**shape)
    check_state(weights, model.state_dict(), "weights")
    model.load_state_dict(weights)
    size = {"size": model.visual.image_size}
    preprocessing = merge_preprocess_dict(asdict(PreprocessCfg()), tag) | size
    set_model_preprocess_cfg(model, preprocessing)
    return model
