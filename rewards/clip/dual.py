"""A dual encoder made of a pretrained image encoder and a pretrained text encoder, each
with a projection head.

Trained contrastively with its encoders frozen it is LiT with both towers locked but for
their heads (Zhai et al. 2022, "LiT: Zero-Shot Transfer with Locked-image text Tuning";
the training configuration says which blocks are trained).

Shapes: B batch, S pixels of a side, R cells of a grid, L tokens, D width of an encoder,
E joint width (``embed_dim``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import (
    ImageEncoder,
    TextEncoder,
    Texts,
    example_output,
    load_part,
    local_encoder,
    save_encoder_config,
)
from rewards.model_files import float_state, load_weights, read_config, save_model
from rewards.options import Size, check_fields

MODEL_TYPE = "pretrained_dual"
TEMPERATURE = 0.07
"""Initial temperature of the contrastive loss, as in CLIP (Radford et al. 2021)."""
Pool = Literal["mean", "first"]


@dataclass(frozen=True)
class DualConfig:
    """Encoders and shape of a ``PretrainedDual``. Raises ``ValueError`` for values out of range."""

    image: str
    """Image encoder, such as ``transformers:facebook/dinov2-small`` (``rewards.clip.pretrained``).
    """
    text: str
    """Text encoder."""
    image_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``image`` if it is a class; ``vision_cfg`` of an open_clip model."""
    text_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``text`` if it is a class; ``bidirectional_blocks`` of a decoder language model.
    """
    embed_dim: Size = 512
    """Joint width E."""
    hidden: Annotated[int, Field(ge=0, le=2**24)] = 1024
    """Width of the hidden layer of a head; 0 is a linear head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Dropout of the input and the hidden layer of a head's MLP, in training."""
    pool: Pool = "mean"
    """The text embedding is the mean over tokens or the ``first`` token (CLS).

    The first token of a decoder language model says something of a caption only where
    blocks are bidirectional.
    """
    context_length: Annotated[int, Field(ge=3, le=2**24)] = 77
    """Most tokens of a caption, special ones included; fewer where the text encoder has
    fewer positions.
    """

    def __post_init__(self) -> None:
        check_fields(self)


class Head(nn.Module):
    """``W LN(x) + MLP(LN(x))``, [B, D] -> [B, E]; without a hidden layer the first term alone."""

    def __init__(self, width: int, embed_dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, embed_dim)
        self.mlp = None
        if hidden:
            self.mlp = nn.Sequential(
                nn.Dropout(dropout),
                nn.Linear(width, hidden),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(hidden, embed_dim),
            )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.linear(x) if self.mlp is None else self.linear(x) + self.mlp(x)


class PretrainedDual(nn.Module):
    """A pretrained image encoder and text encoder with their heads. Embeddings are not
    normalised.

    Args:
        config: encoders and shape.
        folder: folder of a saved dual, from whose files the encoders are built. Weights
            are then random where the library allows it, because the folder's weights
            are loaded later.
        pretrained: which of ``image`` and ``text`` start from pretrained weights; the
            others start from random ones.

    Raises:
        ValueError: an encoder cannot be loaded.
    """

    def __init__(
        self,
        config: DualConfig,
        folder: Path | None = None,
        pretrained: Collection[str] = ("image", "text"),
    ) -> None:
        super().__init__()
        self.config = config
        image = config.image
        text = config.text
        if folder is not None:
            image = local_encoder(image, folder / "image_encoder")
            text = local_encoder(text, folder / "text_encoder")
            pretrained = ()
        self.image_encoder: Any = load_part(
            ImageEncoder, image, config.image_kwargs, "image" in pretrained
        )
        self.text_encoder: Any = load_part(
            TextEncoder, text, config.text_kwargs, "text" in pretrained
        )
        shape = (config.embed_dim, config.hidden, config.dropout)
        self.image_head = Head(example_output(self.image_encoder).shape[-1], *shape)
        self.text_head = Head(example_output(self.text_encoder).shape[-1], *shape)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / TEMPERATURE)))

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing from an image to the pixels that the image encoder reads."""
        return self.image_encoder.preprocessing

    @property
    def texts(self) -> Texts:
        """Tokenizer from captions to the token ids that the text encoder reads."""
        longest = min(self.config.context_length, self.text_encoder.context_length)
        return Texts(self.text_encoder, longest)

    def text_features(self, ids: Tensor) -> Tensor:
        """The text encoder's pooled states [B, D] of ids [B, L]."""
        states = self.text_encoder(ids)
        lengths = self.text_encoder.lengths(ids)
        if self.config.pool == "first":
            return states[:, 0]
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        return (states * mask[..., None]).sum(dim=1) / lengths[:, None].to(states.dtype)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Embed pixels [B, 3, S, S] as [B, E]: the head reads the mean over the grid."""
        return self.image_head(self.image_encoder(pixels).flatten(1, 2).mean(dim=1))

    def encode_text(self, ids: Tensor) -> Tensor:
        """Embed token ids [B, L] as [B, E]."""
        return self.text_head(self.text_features(ids))

    def encode_tokens(self, ids: Tensor) -> Tensor:
        """Embed every token of ids [B, L] as [B, L, E]."""
        return self.text_head(self.text_encoder(ids))

    def train(self, mode: bool = True) -> PretrainedDual:
        """Set the mode; an encoder without trainable parameters stays in evaluation
        mode (dropout, batch norm).
        """
        super().train(mode)
        for encoder in (self.image_encoder, self.text_encoder):
            if not any(parameter.requires_grad for parameter in encoder.parameters()):
                encoder.eval()
        return self

    def save_pretrained(self, folder: Path) -> None:
        """Write ``model.safetensors``, ``config.json`` and the files that the encoders
        are built from to ``folder``.
        """
        save_encoder_config(self.image_encoder, folder / "image_encoder")
        save_encoder_config(self.text_encoder, folder / "text_encoder")
        save_model(
            float_state(self), {"model_type": MODEL_TYPE, **asdict(self.config)}, folder
        )

    @classmethod
    def from_pretrained(cls, path: str | Path) -> PretrainedDual:
        """Load a folder that ``save_pretrained`` wrote, on the CPU, in evaluation mode.

        Raises as ``read_config``, ``load_weights`` and ``load_part``.
        """
        model = cls(read_config(DualConfig, Path(path), MODEL_TYPE), Path(path))
        return load_weights(model, Path(path)).requires_grad_(False).eval()
