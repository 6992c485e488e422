"""L-CLIP, the lightweight dual encoder that is distilled from CLIP ViT-B/32, with torch alone.

Both towers are pre-LN transformers with weight multiplexing (``student_blocks``). The text tower has a factorised word
embedding. The source is the L-CLIPScore paper and its released code; see docs/l_clip.md.

Shapes: B batch, L tokens of a caption, S pixels of a side, E joint width (``embed_dim``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rewards.clip.student_blocks import INIT_STD, SharedBlock, init_linear
from rewards.files import atomic_write
from rewards.model_files import check_folder, check_sizes, check_state, read_object, read_weights, state_shapes

PadAttention = Literal["full", "masked"]

MODEL_TYPE = "l_clip"


@dataclass(frozen=True)
class LCLIPConfig:
    """Shape of an L-CLIP. The defaults are the paper's: 51,552,896 parameters.

    Raises:
        ValueError: a value is out of range, or two do not fit each other; the message names both.
    """

    embed_dim: int = 512
    """Width E of the joint space, that of the teacher (512 for ViT-B/32)."""
    mlp_ratio: int = 4
    """Hidden width of the MLP over the width of its tower."""
    image_size: int = 224
    """Height and width of the input, in pixels."""
    patch_size: int = 32
    """Height and width of a patch, in pixels; divides ``image_size``."""
    image_width: int = 768
    """Width of the image tower; divided by ``image_heads``."""
    image_heads: int = 24
    image_blocks: int = 3
    """Blocks with weights of their own."""
    image_repeats: int = 2
    """How many times in a row each block is run."""
    image_qkv_bias: bool = True
    vocab_size: int = 49408
    """Token ids. EOT has to be the largest id of a caption, as in CLIP's vocabulary: text is pooled at the argmax."""
    context_length: int = 77
    """Most tokens of a caption, SOT and EOT included."""
    text_width: int = 768
    """Width of the text tower; divided by ``text_heads``."""
    text_heads: int = 12
    text_blocks: int = 2
    text_repeats: int = 2
    text_qkv_bias: bool = False
    embedding_rank: int | None = 256
    """Width of the word vectors before they are projected to ``text_width``; None: one table of full width."""
    pad_attention: PadAttention = "masked"
    """``masked``: what follows EOT is not attended, so the embedding does not depend on padding and ids may be cut.
    ``full``: all positions are attended, padding (id 0) included, as the released models do. No weight depends on it,
    but embeddings do: keep what a model was trained with."""

    def __post_init__(self) -> None:
        check_sizes(asdict(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "pad_attention":
                if value not in get_args(PadAttention):
                    raise ValueError(f"pad_attention is {value!r}: expected one of {get_args(PadAttention)}")
            elif field.name.endswith("_bias"):
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} is {value!r}: expected true or false")
            elif not (field.name == "embedding_rank" and value is None) and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name} is {value!r}: expected a positive integer")
        for whole, part in (
            ("image_size", "patch_size"),
            ("image_width", "image_heads"),
            ("text_width", "text_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole} {getattr(self, whole)} is no multiple of {part} {getattr(self, part)}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LCLIPConfig:
        """Build from a dictionary that has every field and no other.

        Raises:
            ValueError: a field is missing or unknown, or a value is out of range.
        """
        names = {field.name for field in fields(cls)}
        if values.keys() != names:
            raise ValueError(
                f"not an L-CLIP configuration: missing {sorted(names - values.keys())}, "
                f"unknown {sorted(values.keys() - names)}"
            )
        return cls(**values)


class ImageStudent(nn.Module):
    """Image tower: patches with bias, class token, positions, shared blocks, norm, head; no norm before the blocks.

    ``patch_embed.weight``, ``cls_token`` and ``pos_embed`` have the values of the teacher's ``conv1.weight``,
    ``class_embedding`` and ``positional_embedding`` where those are copied; the last two have leading dimensions of 1.
    """

    def __init__(self, config: LCLIPConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.image_width, config.patch_size
        # The patch projection keeps torch's initialisation, as in the released code: it is copied from the teacher.
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (config.image_size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            SharedBlock(width, config.image_heads, config.image_repeats, config.image_qkv_bias, config.mlp_ratio)
            for _ in range(config.image_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.embed_dim)
        nn.init.trunc_normal_(self.cls_token, std=INIT_STD)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        self.apply(init_linear)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed normalised pixels [B, 3, S, S] as [B, E], not of unit length.

        Raises:
            ValueError: the pixels have another shape.
        """
        size = self.config.image_size
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise ValueError(f"pixels have shape {list(pixels.shape)}: expected [B, 3, {size}, {size}]")
        patches = self.patch_embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(pixels), -1, -1), patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        # Norm and head work token by token, so only the class token needs them.
        return self.head(self.norm(x[:, 0]))


class TextStudent(nn.Module):
    """Text tower: word embedding, positions, shared blocks without a causal mask, norm, head; pooled at EOT."""

    def __init__(self, config: LCLIPConfig) -> None:
        super().__init__()
        self.config = config
        width, rank = config.text_width, config.embedding_rank
        # nn.Embedding keeps its N(0, 1), as in the released code.
        self.token_embed: nn.Module = (
            nn.Embedding(config.vocab_size, width)
            if rank is None
            else nn.Sequential(nn.Embedding(config.vocab_size, rank), nn.Linear(rank, width))
        )
        self.pos_embed = nn.Parameter(torch.empty(config.context_length, width))
        self.blocks = nn.ModuleList(
            SharedBlock(width, config.text_heads, config.text_repeats, config.text_qkv_bias, config.mlp_ratio)
            for _ in range(config.text_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.embed_dim)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        self.apply(init_linear)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids [B, L] as [B, E], not of unit length.

        Args:
            ids: SOT, tokens, EOT (the largest id of the row), padding. With ``pad_attention: masked`` L is at most
                ``context_length`` and padding may be any smaller id; with ``full`` L is ``context_length`` and padding
                is id 0, since both change the embedding.

        Raises:
            ValueError: the ids have another shape.
        """
        longest, masked = self.config.context_length, self.config.pad_attention == "masked"
        if ids.ndim != 2 or not (1 <= ids.shape[1] <= longest if masked else ids.shape[1] == longest):
            raise ValueError(
                f"ids have shape {list(ids.shape)}: expected [B, {'1 to ' if masked else ''}{longest}] "
                f"with pad_attention {self.config.pad_attention!r}"
            )
        end = ids.argmax(dim=-1)
        positions = torch.arange(ids.shape[1], device=ids.device)
        blocked = (positions > end[:, None])[:, None, None, :] if masked else None
        x = self.token_embed(ids) + self.pos_embed[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, blocked)
        # Norm and head work token by token, so only the pooled token needs them.
        return self.head(self.norm(x[torch.arange(len(ids), device=ids.device), end]))


class LCLIP(nn.Module):
    """Both towers. Embeddings are raw: normalise them before taking cosines."""

    def __init__(self, config: LCLIPConfig | None = None) -> None:
        super().__init__()
        self.config = config or LCLIPConfig()
        self.image = ImageStudent(self.config)
        self.text = TextStudent(self.config)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Embed normalised pixels [B, 3, S, S] as [B, E]; see ``ImageStudent.forward``."""
        return self.image(pixels)

    def encode_text(self, ids: Tensor) -> Tensor:
        """Embed token ids [B, L] as [B, E]; see ``TextStudent.forward``."""
        return self.text(ids)

    def forward(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embed both: [B, 3, S, S] and [C, L] as [B, E] and [C, E]."""
        return self.encode_image(pixels), self.encode_text(ids)

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json`` to the folder ``path``; it is made if needed."""
        folder = Path(path)
        weights = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        # Whoever reads the folder finds whole files only, and the configuration after the weights it describes.
        with atomic_write(folder / "model.safetensors") as file:
            file.write(save(weights, metadata={"format": "pt"}))
        config = json.dumps({"model_type": MODEL_TYPE, **asdict(self.config)}, indent=2) + "\n"
        with atomic_write(folder / "config.json") as file:
            file.write(config.encode())

    @classmethod
    def from_pretrained(cls, path: str | Path) -> LCLIP:
        """Load a folder that ``save_pretrained`` wrote, on the CPU, in evaluation mode.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file was changed since the folder was written, is damaged or of another kind of model, or the
                weights do not fit the configuration or are not finite numbers.
        """
        folder = Path(path)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{str(folder)!r} is not a saved L-CLIP: it has no {name}")
        check_folder(folder)
        values = read_object(folder / "config.json")
        kind = values.pop("model_type", None)
        if kind != MODEL_TYPE:
            raise ValueError(f"{str(folder / 'config.json')!r} has model_type {kind!r}: expected {MODEL_TYPE!r}")
        try:
            config = LCLIPConfig.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from error
        weights = read_weights(folder / "model.safetensors")
        with torch.device("meta"):  # the weights come from the file: initialising 50 million of them would be wasted
            model = cls(config)
        check_state(weights, state_shapes(model), f"weights in {str(folder)!r}")
        model.load_state_dict(weights, assign=True)
        return model.eval()


def trim_padding(ids: Tensor) -> Tensor:
    """Cut ids [B, L] after the last EOT of the batch (the largest id of a row): [B, length of the longest caption].

    For ``pad_attention: masked`` only. It waits for the device once, to learn the length.
    """
    return ids[:, : int(ids.argmax(dim=-1).max()) + 1]
