"""Dual encoders that read long captions: 77 positions stretched to 248, and checkpoints in the layout of Long-CLIP.

Source: Zhang et al., "Long-CLIP: Unlocking the Long-Text Capability of CLIP", ECCV 2024, section 3.2
(knowledge-preserved stretching), in the form that its code computes; SPECS goes on from such a model. Tokens are those
of CLIP's BPE, start and end included.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from rewards.model_files import read_state

if TYPE_CHECKING:
    from rewards.clip.student import LCLIP

Layout = Literal["archive", "long", "plain"]
"""Of a file: OpenAI's TorchScript archive, Long-CLIP's and SPECS's two tables of positions, or weights by key alone."""
KEEP = 20
"""Positions that Long-CLIP leaves as they are: most captions that CLIP was trained on end before."""
POSITIONS = "positional_embedding"
RELEASED = "positional_embedding_res"
"""Second table of released checkpoints: positions from ``KEEP`` on are read from it, those before from the first."""


def stretch_positions(positions: Tensor, keep: int = KEEP, factor: int = 4) -> Tensor:
    """Interpolate positional embeddings [P, D] to [keep + factor (P - keep), D].

    Rows 0 to keep - 1 are copied. Then, for i from 0 to P - keep - 2 and j from 0 to factor - 1,
    ``new[keep + factor i + j] = ((factor - j) P[keep + i] + j P[keep + i + 1]) / factor``; the last row of P has no
    successor and goes on in the direction of the step before it: ``P[-1] + j (P[-1] - P[-2]) / factor``.

    With 77 positions, ``keep`` 20 and ``factor`` 4 these are Long-CLIP's 248.

    Args:
        positions: [P, D], P at least 2.
        keep: rows that stay where they are, 0 to P - 1.
        factor: new rows for each other row, at least 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    count = len(positions)
    if count < 2 or not 0 <= keep < count or factor < 1:
        raise ValueError(
            f"{count} positions, keep = {keep}, factor = {factor}: expected at least 2 positions, keep from 0 to "
            f"{count - 1}, and a factor of at least 1"
        )
    tail = positions[keep:]
    steps = torch.diff(positions, dim=0)[keep:]
    steps = torch.cat([steps, positions[-1:] - positions[-2:-1]])
    shares = torch.arange(factor, device=positions.device, dtype=positions.dtype) / factor
    stretched = tail[:, None] + shares[None, :, None] * steps[:, None]
    return torch.cat([positions[:keep], stretched.flatten(0, 1)])


def stretch_factor(positions: int, context_length: int, keep: int = KEEP) -> int:
    """The factor with which ``positions`` become ``context_length``: (context_length - keep) / (positions - keep).

    Raises:
        ValueError: it is not a whole number of at least 1; the message names lengths that would be.
    """
    if 0 <= keep < positions and context_length >= positions and (context_length - keep) % (positions - keep) == 0:
        return (context_length - keep) // (positions - keep)
    if not 0 <= keep < positions:
        raise ValueError(f"keep = {keep}: expected 0 to {positions - 1}, as the text tower has {positions} positions")
    fitting = ", ".join(str(keep + factor * (positions - keep)) for factor in (1, 2, 3, 4))
    raise ValueError(
        f"context_length = {context_length}: the text tower has {positions} positions, which become {fitting}, ... "
        f"where the first {keep} are kept"
    )


def stretch_text_tower(model: Any, context_length: int, keep: int = KEEP) -> None:
    """Give a model of open_clip (``CLIP`` or ``CustomTextCLIP``) ``context_length`` positions, in place.

    Nothing else changes: a caption of up to ``keep`` tokens has the embedding that it had.

    Raises:
        ValueError: the text tower is none of open_clip's own, has a class token, or its number of positions cannot
            become ``context_length``.
    """
    tower = _text_tower(model)
    tower.positional_embedding = _stretched(tower.positional_embedding, context_length, keep)
    if tower.attn_mask is not None:
        mask = tower.attn_mask.new_full((context_length, context_length), float("-inf")).triu_(1)
        tower.register_buffer("attn_mask", mask, persistent=False)
    tower.context_length = model.context_length = context_length
    if hasattr(tower, "num_pos"):
        tower.num_pos = context_length


def stretch_student(model: LCLIP, context_length: int, keep: int = KEEP) -> None:
    """Give the text tower of an L-CLIP student ``context_length`` positions, in place, as ``stretch_text_tower`` does.

    Raises:
        ValueError: the student attends to padding, which longer inputs would have more of, or its number of positions
            cannot become ``context_length``.
    """
    if model.config.pad_attention != "masked":
        raise ValueError(
            f"a student with pad_attention {model.config.pad_attention!r} attends to padding, so every score would "
            "change with its context: it is not stretched"
        )
    model.text.pos_embed = _stretched(model.text.pos_embed, context_length, keep)
    model.config = model.text.config = model.image.config = replace(model.config, context_length=context_length)


def _stretched(positions: nn.Parameter, context_length: int, keep: int) -> nn.Parameter:
    factor = stretch_factor(len(positions), context_length, keep)
    stretched = stretch_positions(positions.detach().float(), keep, factor).to(positions.dtype)
    return nn.Parameter(stretched, requires_grad=positions.requires_grad)


def _text_tower(model: Any) -> Any:
    tower = model if hasattr(model, POSITIONS) else getattr(model, "text", None)
    if not isinstance(getattr(tower, POSITIONS, None), nn.Parameter) or not hasattr(tower, "attn_mask"):
        raise ValueError(f"{type(model).__name__} has no text tower of open_clip with {POSITIONS}: it is not stretched")
    if getattr(tower, "cls_emb", None) is not None:
        raise ValueError(f"the text tower of {type(model).__name__} has a class token: it is not stretched")
    return tower


def from_released(state: Mapping[str, Tensor], keep: int = KEEP) -> dict[str, Tensor]:
    """OpenAI's and open_clip's keys from a released long checkpoint: the two tables become the one that is read.

    The released model adds ``positional_embedding`` at positions 0 to 19 and ``positional_embedding_res`` from 20 on;
    the other rows of both are never read.

    Args:
        state: as stored, in float32 or float16.
        keep: first position of the second table.

    Returns:
        The state in float32, as ``open_clip.CLIP`` of that context length loads it.

    Raises:
        ValueError: a table is missing, or they have different shapes.
    """
    shapes = {key: tuple(state[key].shape) if key in state else None for key in (POSITIONS, RELEASED)}
    if shapes[POSITIONS] is None or shapes[POSITIONS] != shapes[RELEASED]:
        raise ValueError(f"tables of positions of a long checkpoint are {shapes}: expected two of the same shape")
    merged = torch.cat([state[POSITIONS][:keep], state[RELEASED][keep:]])
    kept = {key: value for key, value in state.items() if key != RELEASED} | {POSITIONS: merged}
    return {key: value.float() if value.is_floating_point() else value for key, value in kept.items()}


def load_file(name: str, path: Path, quick_gelu: bool = False) -> tuple[Any, Layout]:
    """Build the architecture ``name`` with the weights of a file and as many positions as the file has.

    open_clip by itself would shrink or grow the table of positions to the architecture's number, without a word. An
    archive that OpenAI released (TorchScript) has its own architecture and activation.

    Returns:
        The model, and the layout of the file.

    Raises:
        OSError, RuntimeError, ValueError, pickle.UnpicklingError: the file does not hold such weights.
    """
    import open_clip

    if _is_torchscript(path):
        return open_clip.load_openai_model(str(path), precision="fp32", device="cpu"), "archive"
    context_length = None
    if path.suffix not in (".npz", ".npy"):  # of big_vision, which open_clip converts
        state = read_state(path)
        if RELEASED in state:
            return _load_released(name, from_released(state)), "long"
        text: dict[str, Any] = (open_clip.get_model_config(name) or {}).get("text_cfg", {})
        table = state.get(POSITIONS, state.get(f"text.{POSITIONS}"))
        if table is not None and not text.get("embed_cls"):  # a class token has a row of its own
            context_length = len(table)
    model = open_clip.create_model(
        name,
        str(path),
        force_quick_gelu=quick_gelu,
        force_context_length=context_length,
        require_pretrained=True,
    )
    return model, "plain"


def _load_released(name: str, weights: Mapping[str, Tensor]) -> Any:
    """Build the architecture with OpenAI's activation (QuickGELU) and the weights that ``from_released`` returned.

    As where Long-CLIP loads it, weights of convolutions, linear layers, attention and projections are rounded to half
    precision first; in files that store halves this changes nothing.
    """
    import open_clip
    from open_clip.model import convert_weights_to_lp

    model: Any = open_clip.create_model(
        name, force_quick_gelu=True, force_context_length=len(weights[POSITIONS]), pretrained_image=False
    )
    if not isinstance(model, open_clip.CLIP):
        raise ValueError(f"a long checkpoint has OpenAI's layout, which {name} has not: expected ViT-B-32, say")
    model.load_state_dict(weights)
    convert_weights_to_lp(model, torch.float16)
    return model.float()


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(entry.endswith("/constants.pkl") for entry in archive.namelist())


@lru_cache(maxsize=1)
def _bpe() -> Any:
    import open_clip

    return open_clip.SimpleTokenizer()


def count_tokens(text: str) -> int:
    """Tokens of CLIP's BPE in ``text``, without start and end; an encoder of context L reads L - 2 of them."""
    return len(_bpe().encode(text))
