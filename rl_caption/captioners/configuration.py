"""The shape of the from-scratch captioner, as Transformers keeps it in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from rewards.model_files import check_ranges

RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (4, 2**24),
    "d_model": (1, 2**16),
    "encoder_layers": (0, 256),
    "decoder_layers": (1, 256),
    "num_heads": (1, 2**16),
    "ffn_dim": (1, 2**20),
    "dropout": (0.0, 0.99),
    "image_size": (1, 2**14),
    "patch_size": (1, 2**14),
    "feature_dim": (1, 2**20),
    "feature_dropout": (0.0, 0.99),
    "max_positions": (1, 2**20),
}
"""Smallest and largest of each number; whole numbers, where these are."""
KINDS = {"input_kind": ("pixels", "regions"), "patch_stem": ("linear", "conv")}
SHAPE = {*RANGES, *KINDS} - {"vocab_size"}
"""What ``model.kwargs`` may say; the rest follows from the vocabulary."""
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")


class CaptionTransformerConfig(PreTrainedConfig):
    """Shape of a ``CaptionTransformer``.

    Args:
        input_kind: ``pixels`` (``pixel_values [B, 3, S, S]``) or ``regions`` (``region_features [B, R, feature_dim]``
            and ``region_mask [B, R]``).
        vocab_size: number of token ids, the special ones included.
        d_model, encoder_layers, decoder_layers, num_heads, ffn_dim, dropout: the Transformer. The recipe of the
            self-critical literature is 512, 6, 6, 8, 2048, 0.1.
        image_size, patch_size: pixels only; the image is S x S and is cut into (S / patch_size)² patches.
        patch_stem: pixels only; ``linear`` (ViT) or ``conv`` (stride-2 3x3 convolutions, after Xiao et al. 2021, "Early
            convolutions help transformers see better"), which learns from far fewer images.
        feature_dim: regions only; 2048 for bottom-up features, 2054 for VinVL.
        feature_dropout: regions only; dropout after the projection of the features, before ``dropout``; 0.5 in the
            recipe of the self-critical literature.
        max_positions: longest caption in tokens, EOS included.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: below ``vocab_size``.

    Raises:
        ValueError: a value is of another type or out of range, or two do not fit each other.
    """

    model_type = "caption_transformer"
    is_encoder_decoder = True

    def __init__(
        self,
        input_kind: str = "pixels",
        vocab_size: int = 10_000,
        d_model: int = 512,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        num_heads: int = 8,
        ffn_dim: int = 2048,
        dropout: float = 0.1,
        image_size: int = 224,
        patch_size: int = 16,
        patch_stem: str = "linear",
        feature_dim: int = 2048,
        feature_dropout: float = 0.0,
        max_positions: int = 64,
        pad_token_id: int = 0,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        unk_token_id: int = 3,
        **kwargs: Any,
    ) -> None:
        _check({key: value for key, value in locals().items() if key in {*RANGES, *SPECIAL, *KINDS}})
        self.input_kind = input_kind
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.encoder_layers = encoder_layers
        self.decoder_layers = decoder_layers
        self.num_heads = num_heads
        self.ffn_dim = ffn_dim
        self.dropout = dropout
        self.image_size = image_size
        self.patch_size = patch_size
        self.patch_stem = patch_stem
        self.feature_dim = feature_dim
        self.feature_dropout = feature_dropout
        self.max_positions = max_positions
        self.unk_token_id = unk_token_id
        self.num_hidden_layers = decoder_layers
        self.hidden_size = d_model
        self.num_attention_heads = num_heads
        kwargs.setdefault("tie_word_embeddings", True)
        kwargs.setdefault("decoder_start_token_id", bos_token_id)
        kwargs["is_encoder_decoder"] = True
        kwargs |= {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
        super().__init__(**kwargs)

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Tokens that no caption may contain; the sampled and the scored distribution both exclude them."""
        return (self.pad_token_id, self.bos_token_id, self.unk_token_id)


def _check(values: Mapping[str, Any]) -> None:
    for key, known in KINDS.items():
        if values[key] not in known:
            raise ValueError(f"{key} is {values[key]!r}: expected {' or '.join(map(repr, known))}")
    check_ranges(values, RANGES)
    check_ranges(values, dict.fromkeys(SPECIAL, (0, values["vocab_size"] - 1)))
    size, patch, d_model = values["image_size"], values["patch_size"], values["d_model"]
    if d_model % values["num_heads"]:
        raise ValueError(f"d_model {d_model} is not a multiple of num_heads {values['num_heads']}")
    if values["input_kind"] == "pixels" and size % patch:
        raise ValueError(f"image_size {size} is not a multiple of patch_size {patch}")
    if values["eos_token_id"] in (values["pad_token_id"], values["bos_token_id"], values["unk_token_id"]):
        raise ValueError(f"eos_token_id {values['eos_token_id']} is that of padding, BOS or UNK: no caption would end")
