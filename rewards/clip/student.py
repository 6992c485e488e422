"""L-CLIP, the lightweight dual encoder that is distilled from CLIP ViT-B/32, with torch alone.

Source: the L-CLIPScore paper and its released code; see docs/reward_models.md. Both
towers are pre-LN Transformers with weight multiplexing, as in MiniViT (Zhang et al.
2022): each block runs several times in a row, with the same projections and MLP, and
with the norms and head mixers of that repeat. As in the released code, there is no
dropout, no relative position and no transformation of the MLP. The word embedding of
the text tower is factorised.

Shapes: B batch, L tokens of a caption, S pixels of a side, E joint width
(``embed_dim``); in a block N tokens, H heads, D head width, W tower width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import (
    ImageEncoder,
    Texts,
    clip_texts,
    example_output,
    load_part,
    local_encoder,
    save_encoder_config,
)
from rewards.model_files import (
    float_state,
    load_weights,
    read_config,
    save_model,
)
from rewards.options import Size, check_fields

PadAttention = Literal["full", "masked"]
Student = TypeVar("Student", "LCLIP", "ImageStudent", "TextStudent")

MODEL_TYPE = "l_clip"
INIT_STD = 0.02
"""Standard deviation of the truncated normal that initialises linear layers, head
mixers, positions and class token.
"""


@dataclass(frozen=True)
class LCLIPConfig:
    """Shape of an L-CLIP. The defaults are the paper's: 51,552,896 parameters. Raises
    ``ValueError`` for sizes that are out of range or do not divide each other.
    """

    embed_dim: Size = 512
    """Width E of the joint space, equal to the teacher's (512 for ViT-B/32)."""
    mlp_ratio: Size = 4
    """Hidden width of the MLP, divided by the width of its tower."""
    image_size: Size = 224
    """Height and width of the input, in pixels."""
    patch_size: Size = 32
    """Height and width of a patch, in pixels; divides ``image_size``."""
    image_width: Size = 768
    """Width of the image tower, a multiple of ``image_heads``."""
    image_heads: Size = 24
    image_blocks: Size = 3
    """Number of blocks."""
    image_repeats: Size = 2
    """Number of times in a row that each block runs."""
    image_qkv_bias: bool = True
    image_encoder: str | None = None
    """A frozen image encoder (``rewards.clip.pretrained``) whose grid of features
    replaces the patches: a hybrid (Dosovitskiy et al. 2021, section 3.1), for datasets
    that are too small to learn from pixels. Its own preprocessing is then used, and
    ``image_size`` and ``patch_size`` are ignored.
    """
    image_encoder_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``image_encoder`` if it is a class."""
    vocab_size: Size = 49408
    """Number of token ids. EOT has to be the largest id of a caption, as in CLIP's
    vocabulary: text is pooled at the argmax.
    """
    context_length: Size = 77
    """Most tokens of a caption, SOT and EOT included."""
    text_width: Size = 768
    """Width of the text tower, a multiple of ``text_heads``."""
    text_heads: Size = 12
    text_blocks: Size = 2
    text_repeats: Size = 2
    text_qkv_bias: bool = False
    embedding_rank: Size | None = 256
    """Width of the word vectors before they are projected to ``text_width``; None: one
    table of full width.
    """
    pad_attention: PadAttention = "masked"
    """``masked``: keys after EOT are masked, so the embedding does not depend on
    padding and ids may be cut there. ``full``: all positions are attended, padding (id
    0) included, as in the released models. No weight depends on it, but embeddings do:
    use the value that a model was trained with.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        divisors = {
            "image_size": "patch_size",
            "image_width": "image_heads",
            "text_width": "text_heads",
        }
        for whole, unit in divisors.items():
            if getattr(self, whole) % getattr(self, unit):
                raise ValueError(
                    f"{whole} {getattr(self, whole)} is not a multiple of {unit} "
                    f"{getattr(self, unit)}"
                )

    @property
    def texts(self) -> Texts:
        """Tokenizer from captions to the token ids that the text tower reads."""
        return clip_texts(self.context_length, self.pad_attention == "masked")


def head_mixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix_before: Tensor,
    mix_after: Tensor,
    blocked: Tensor | None = None,
) -> Tensor:
    """Attention of q, k, v [B, H, N, D] whose heads are mixed linearly before and after
    the softmax, [B, H, N, D].

    S = mix_before · (q kᵀ / √D), P = mix_after · softmax(S), output P v. Rows of P do
    not sum to 1. Written out because ``F.scaled_dot_product_attention`` cannot mix
    heads. ``mix_before`` and ``mix_after`` are weights [H, H, 1, 1] of 1x1 convolutions
    over heads, [to, from]; keys that ``blocked`` (broadcast to [B, H, N, N]) get no
    weight, and each query has to keep one.
    """
    scores = mix_heads((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), mix_before)
    if blocked is not None:  # after mixing, which would add infinities of both signs
        scores = scores.masked_fill(blocked, float("-inf"))
    return mix_heads(scores.softmax(dim=-1), mix_after) @ v


def mix_heads(maps: Tensor, weight: Tensor) -> Tensor:
    """Mix maps [B, H, N, N] over heads with ``weight`` [H, H, 1, 1]: ``F.conv2d``, but
    about twice as fast on a CPU.
    """
    return (weight.flatten(1) @ maps.flatten(2)).unflatten(2, maps.shape[2:])


class SharedAttention(nn.Module):
    """Self-attention [B, N, W] -> [B, N, W]; the projections serve all repeats, each
    repeat has its own head mixers.
    """

    def __init__(self, width: int, heads: int, repeats: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        mixers = [nn.Conv2d(heads, heads, 1, bias=False) for _ in range(2 * repeats)]
        self.mix_before = nn.ModuleList(mixers[:repeats])
        self.mix_after = nn.ModuleList(mixers[repeats:])
        self.proj = nn.Linear(width, width)
        for weight in (*self.mix_before.parameters(), *self.mix_after.parameters()):
            nn.init.trunc_normal_(weight, std=INIT_STD)

    def forward(self, x: Tensor, repeat: int, blocked: Tensor | None = None) -> Tensor:
        """[B, N, W] -> [B, N, W] with the mixers of ``repeat``; ``blocked`` as in
        ``head_mixed_attention``.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        before = self.mix_before.get_parameter(f"{repeat}.weight")
        after = self.mix_after.get_parameter(f"{repeat}.weight")
        mixed = head_mixed_attention(q, k, v, before, after, blocked)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class SharedBlock(nn.Module):
    """One pre-LN block that runs ``repeats`` times in a row: [B, N, W] -> [B, N, W]."""

    def __init__(
        self, width: int, heads: int, repeats: int, qkv_bias: bool, mlp_ratio: int
    ) -> None:
        super().__init__()
        self.repeats = repeats
        self.norm1 = nn.ModuleList(nn.LayerNorm(width) for _ in range(repeats))
        self.attn = SharedAttention(width, heads, repeats, qkv_bias)
        self.norm2 = nn.ModuleList(nn.LayerNorm(width) for _ in range(repeats))
        layers = OrderedDict(
            fc1=nn.Linear(width, mlp_ratio * width),
            gelu=nn.GELU(),  # exact
            fc2=nn.Linear(mlp_ratio * width, width),
        )
        self.mlp = nn.Sequential(layers)

    def forward(self, x: Tensor, blocked: Tensor | None = None) -> Tensor:
        for repeat in range(self.repeats):
            x = x + self.attn(self.norm1[repeat](x), repeat, blocked)
            x = x + self.mlp(self.norm2[repeat](x))
        return x


def shared_blocks(config: LCLIPConfig, tower: str) -> nn.ModuleList:
    """The blocks of the tower ``image`` or ``text``."""
    shape = ("width", "heads", "repeats", "qkv_bias")
    width, heads, repeats, bias = (getattr(config, f"{tower}_{key}") for key in shape)
    return nn.ModuleList(
        SharedBlock(width, heads, repeats, bias, config.mlp_ratio)
        for _ in range(getattr(config, f"{tower}_blocks"))
    )


def init_linear(module: nn.Module) -> None:
    """Initialise a linear layer: weights by the truncated normal, bias 0. Other modules
    are ignored.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class ImageStudent(nn.Module):
    """Image tower: patches with bias, class token, positions, shared blocks, norm,
    head; no norm before the blocks.

    ``patch_embed.weight``, ``cls_token`` and ``pos_embed`` correspond to the teacher's
    ``conv1.weight``, ``class_embedding`` and ``positional_embedding``; the last two
    have leading dimensions of 1 here. If the configuration names an image encoder, its
    features are the patches; ``folder`` is a saved student, from whose files the
    encoder is built.
    """

    def __init__(self, config: LCLIPConfig, folder: Path | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.image_width
        patch = config.patch_size
        cells = (config.image_size // patch) ** 2
        self.patch_embed: nn.Module
        encoder: Any = None
        name = config.image_encoder
        if name is None:
            # Keeps torch's initialisation, as in the released code, where it is then copied from
            # the teacher.
            self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        else:
            if folder is not None:
                name = local_encoder(name, folder / "image_encoder")
            kwargs = config.image_encoder_kwargs
            encoder = load_part(ImageEncoder, name, kwargs, folder is None)
            _, rows, columns, depth = example_output(encoder).shape
            self.patch_embed = nn.Linear(depth, width)
            cells = rows * columns
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + cells, width))
        self.blocks = shared_blocks(config, "image")
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.embed_dim)
        nn.init.trunc_normal_(self.cls_token, std=INIT_STD)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        self.apply(init_linear)
        # After the initialisation, which must not change the encoder's layers.
        self.encoder = encoder and encoder.requires_grad_(False)

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing from an image to the pixels that the tower reads."""
        if self.encoder is not None:
            return self.encoder.preprocessing
        return Preprocessing(self.config.image_size)

    def train(self, mode: bool = True) -> ImageStudent:
        """Set the mode; the frozen image encoder stays in evaluation mode."""
        super().train(mode)
        if self.encoder is not None:
            self.encoder.eval()
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        """Embed normalised pixels [B, 3, S, S] as [B, E]; embeddings are not normalised."""
        if self.encoder is None:
            patches = self.patch_embed(pixels).flatten(2).mT
        else:
            patches = self.patch_embed(self.encoder(pixels).flatten(1, 2))
        start = self.cls_token.expand(len(pixels), -1, -1)
        x = torch.cat([start, patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class TextStudent(nn.Module):
    """Text tower: word embedding, positions, shared blocks, norm, head; pooled at EOT."""

    def __init__(self, config: LCLIPConfig) -> None:
        super().__init__()
        self.config = config
        width = config.text_width
        rank = config.embedding_rank
        # nn.Embedding keeps its N(0, 1), as in the released code.
        self.token_embed: nn.Module = nn.Embedding(config.vocab_size, rank or width)
        if rank is not None:
            self.token_embed = nn.Sequential(self.token_embed, nn.Linear(rank, width))
        self.pos_embed = nn.Parameter(torch.empty(config.context_length, width))
        self.blocks = shared_blocks(config, "text")
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.embed_dim)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        self.apply(init_linear)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids [B, L] as [B, E], not normalised. Raises as ``states``."""
        rows = torch.arange(len(ids), device=ids.device)
        return self.head(self.norm(self.states(ids)[rows, ids.argmax(dim=-1)]))

    def encode_tokens(self, ids: Tensor) -> Tensor:
        """Embed every token of ids [B, L] as [B, L, E]."""
        return self.head(self.norm(self.states(ids)))

    def states(self, ids: Tensor) -> Tensor:
        """States [B, L, W] of token ids [B, L], before the last norm.

        A row is SOT, tokens, EOT (its largest id), padding. With ``pad_attention:
        masked`` L is at most ``context_length`` and padding may be any smaller id; with
        ``full`` both change the embedding: L must be ``context_length``, else
        ``ValueError``, and padding must be id 0.
        """
        longest = self.config.context_length
        masked = self.config.pad_attention == "masked"
        if not masked and ids.shape[1] != longest:
            raise ValueError(
                f"ids have shape {list(ids.shape)}: expected [B, {longest}] with pad_attention full"
            )
        end = ids.argmax(dim=-1)
        positions = torch.arange(ids.shape[1], device=ids.device)
        blocked = (positions > end[:, None])[:, None, None, :] if masked else None
        x = self.token_embed(ids) + self.pos_embed[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, blocked)
        return x


class LCLIP(nn.Module):
    """The L-CLIP model: an image tower and a text tower. Embeddings are not normalised."""

    def __init__(
        self, config: LCLIPConfig | None = None, folder: Path | None = None
    ) -> None:
        super().__init__()
        self.config = config or LCLIPConfig()
        self.image = ImageStudent(self.config, folder)
        self.text = TextStudent(self.config)

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing from an image to the pixels that the image tower reads."""
        return self.image.preprocessing

    @property
    def texts(self) -> Texts:
        """Tokenizer from captions to the token ids that the text tower reads."""
        return self.config.texts

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Embed normalised pixels [B, 3, S, S] as [B, E]."""
        return self.image(pixels)

    def encode_text(self, ids: Tensor) -> Tensor:
        """Embed token ids [B, L] as [B, E]; see ``TextStudent.forward``."""
        return self.text(ids)

    def encode_tokens(self, ids: Tensor) -> Tensor:
        """Embed every token of ids [B, L] as [B, L, E]."""
        return self.text.encode_tokens(ids)

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json`` to the folder ``path``, which
        is created if needed.
        """
        save_encoder_config(self.image.encoder, Path(path) / "image_encoder")
        save_model(
            float_state(self), {"model_type": MODEL_TYPE, **asdict(self.config)}, path
        )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> LCLIP:
        """Load a folder that ``save_pretrained`` wrote, on the CPU, in evaluation mode.

        Raises as ``read_config`` and ``load_weights``.
        """
        return load_student(cls, Path(path), MODEL_TYPE).eval()


def load_student(
    model_class: type[Student],
    folder: Path,
    model_type: str,
    others: Collection[str] = (),
) -> Student:
    """Load an ``LCLIP`` or one of its towers from a folder. Arguments and errors as for
    ``read_config``.
    """
    config = read_config(LCLIPConfig, folder, model_type, others)
    if config.image_encoder is None or model_class is TextStudent:
        with torch.device("meta"):  # no weight is initialised
            return load_weights(model_class(config), folder)
    return load_weights(model_class(config, folder), folder)  # type: ignore[call-arg]
