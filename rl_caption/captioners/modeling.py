"""An encoder-decoder captioning Transformer, trained from scratch over pixels or over
region features.

Pre-LN Transformer (Vaswani et al. 2017; pre-LN after Xiong et al. 2020). A batch has N
= B·K sequences for B images. In cross-attention the K sequences of an image are one row
of queries, so that its states are encoded and projected once and never copied.
Sequences are packed: only attention sees padding, as zeros; all other layers skip it.
"""

from collections import OrderedDict
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from rewards.options import check_values
from rl_caption.captioners.base import FROM_SCRATCH
from rl_caption.captioners.packed import CACHE, Packing

Size: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Dropout: TypeAlias = Annotated[float, Field(ge=0, le=0.99)]


class CaptionTransformerConfig(PreTrainedConfig):
    """Shape of a ``CaptionTransformer``. Raises ``ValueError`` if a value has the wrong
    type or is out of range.

    Args:
        input_kind: ``pixels`` (``pixel_values [B, 3, S, S]``) or ``regions``
            (``region_features [B, R, feature_dim]`` and ``region_mask [B, R]``).
        vocab_size: number of token ids, the special ones included.
        d_model, encoder_layers, decoder_layers, num_heads, ffn_dim, dropout: the Transformer. The
            recipe of the self-critical literature is 512, 6, 6, 8, 2048, 0.1.
        image_size, patch_size: pixels only; images are S x S and are cut into (S /
            patch_size)² patches.
        patch_stem: pixels only; ``linear`` (ViT) or ``conv`` (stride-2 3x3
            convolutions, after Xiao et al. 2021, "Early convolutions help transformers
            see better"), which learns from far fewer images.
        feature_dim: regions only; 2048 for bottom-up features, 2054 for VinVL.
        feature_dropout: regions only; dropout after the projection of the features,
            before ``dropout``; 0.5 in the recipe of the self-critical literature.
        max_positions: length of the longest caption in tokens, EOS included.
        pad_token_id, bos_token_id, eos_token_id, unk_token_id: below ``vocab_size``.
    """

    model_type = FROM_SCRATCH
    attribute_map = {
        "num_hidden_layers": "decoder_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
    }

    input_kind: Literal["pixels", "regions"] = "pixels"
    vocab_size: Size = 10_000
    d_model: Size = 512
    encoder_layers: Count = 6
    decoder_layers: Size = 6
    num_heads: Size = 8
    ffn_dim: Size = 2048
    dropout: Dropout = 0.1
    image_size: Size = 224
    patch_size: Size = 16
    patch_stem: Literal["linear", "conv"] = "linear"
    feature_dim: Size = 2048
    feature_dropout: Dropout = 0.0
    max_positions: Size = 64
    pad_token_id: Count = 0
    bos_token_id: Count = 1
    eos_token_id: Count = 2
    unk_token_id: Count = 3
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name, annotation in CaptionTransformerConfig.__annotations__.items():
            check_values(annotation, **{name: getattr(self, name)})
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}"
            )
        if self.input_kind == "pixels" and self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        others = self.forbidden_token_ids
        eos = self.eos_token_id
        if eos in others or max(*others, eos) >= self.vocab_size:
            raise ValueError(
                f"eos_token_id is {eos}, the ids of padding, BOS and UNK are {others}: "
                f"expected another eos_token_id, and ids below vocab_size {self.vocab_size}"
            )
        self.decoder_start_token_id = self.bos_token_id
        super().__post_init__(**kwargs)

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Ids of tokens that no caption may contain: probability 0 in sampling and in scoring."""
        return (self.pad_token_id, self.bos_token_id, self.unk_token_id)


NAMES = tuple(CaptionTransformerConfig.__annotations__)
"""Keys of a saved configuration."""
SHAPE = {name for name in NAMES[:-2] if "token_id" not in name} - {"vocab_size"}
"""Names that ``model.kwargs`` may set; the other arguments follow from the vocabulary."""


class PixelEmbedding(nn.Module):
    """Embedded patches of images, with learned positions: [B, 3, S, S] -> [B, (S /
    patch_size)², D].
    """

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__()
        width = config.d_model
        size = config.patch_size
        if config.patch_stem == "linear":
            self.stem: nn.Module = nn.Conv2d(3, width, size, stride=size)
        else:
            self.stem = _conv_stem(width, size)
        patches = (config.image_size // size) ** 2
        self.position = nn.Parameter(torch.zeros(1, patches, width))

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.stem(pixel_values).flatten(2).transpose(1, 2)
        return patches + self.position


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each position: [N, C, H, W] -> [N, C, H, W].

    Batch norm would make the policy another function in training than in sampling; a
    norm over the whole image would let a large background drown small things.
    """

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _conv_stem(d_model: int, patch_size: int) -> nn.Sequential:
    stages = patch_size.bit_length() - 1
    if 2**stages != patch_size:
        raise ValueError(
            f"patch_size {patch_size} is not a power of two, which the conv stem needs"
        )
    widths = [3] + [min(32 << stage, max(d_model, 32)) for stage in range(stages)]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [
            nn.Conv2d(before, after, 3, stride=2, padding=1),
            ChannelNorm(after),
            nn.GELU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], d_model, 1))


def _region_embedding(config: CaptionTransformerConfig) -> nn.Sequential:
    """Projects region features, with dropout of their own: [B, R, F] -> [B, R, D]."""
    layers = OrderedDict(
        projection=nn.Linear(config.feature_dim, config.d_model),
        norm=nn.LayerNorm(config.d_model),
        relu=nn.ReLU(),
        dropout=nn.Dropout(config.feature_dropout),
    )
    return nn.Sequential(layers)


def additive_mask(mask: Tensor, states: Tensor) -> Tensor:
    """Attention mask [B, S], True for what may be attended to, as 0 and -inf [B, 1, 1,
    S] in attention's own dtype.

    It is computed once: from a boolean mask, attention would compute it anew in every
    layer.
    """
    device = states.device.type
    dtype = states.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    left_out = ~mask.bool()[:, None, None]
    return torch.zeros_like(left_out, dtype=dtype).masked_fill(left_out, -torch.inf)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention with separate projections."""

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        width = config.d_model
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def split_heads(self, states: Tensor) -> Tensor:
        """[N, T, D] -> [N, H, T, D/H]."""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Project ``states`` [N, S, D] to keys and values [N, H, S, D/H]."""
        return self.split_heads(self.key(states)), self.split_heads(self.value(states))

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        causal: bool = False,
        packing: Packing | None = None,
    ) -> Tensor:
        """Attend with projected ``queries`` [N, T, D]: [N, T, D], or packed tokens [P,
        D]; ``mask`` is additive.
        """
        attended = F.scaled_dot_product_attention(
            self.split_heads(queries),
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        merged = attended.transpose(1, 2).flatten(2)
        return self.output(merged if packing is None else packing.pack(merged))


def _feed_forward(config: CaptionTransformerConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.d_model, config.ffn_dim),
        nn.GELU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.ffn_dim, config.d_model),
    )


class EncoderLayer(nn.Module):
    """Self-attention over patches or regions, feed-forward network."""

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """``states`` [B, S, D] -> [B, S, D]; ``mask`` [B, 1, 1, S]."""
        normed = self.attention_norm(states)
        attended = self.attention(
            self.attention.query(normed), *self.attention.keys_values(normed), mask
        )
        states = states + self.dropout(attended)
        return states + self.dropout(self.ffn(self.ffn_norm(states)))


class Encoder(nn.Module):
    """Pixels or region features to image states."""

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        if config.input_kind == "pixels":
            self.main_input_name = "pixel_values"
            self.embedding: nn.Module = PixelEmbedding(config)
        else:
            self.main_input_name = "region_features"
            self.embedding = _region_embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        region_features: Tensor | None = None,
        region_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """``last_hidden_state`` [B, S, D] of ``pixel_values`` [B, 3, H, W] or
        ``region_features`` [B, S, F].
        """
        inputs = region_features if pixel_values is None else pixel_values
        states = self.dropout(self.embedding(inputs))
        mask = None if region_mask is None else additive_mask(region_mask, states)
        for layer in self.layers:
            states = layer(states, mask)
        return BaseModelOutput(last_hidden_state=self.norm(states))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the image, feed-forward network."""

    def __init__(self, config: CaptionTransformerConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_norm = nn.LayerNorm(config.d_model)
        self.self_attention = Attention(config)
        self.cross_norm = nn.LayerNorm(config.d_model)
        self.cross_attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = _feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        states: Tensor,
        by_sequence: Packing,
        by_image: Packing,
        memory: Tensor,
        memory_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> Tensor:
        """``states`` [P, D] of packed tokens -> [P, D], with the states ``memory`` [B,
        S, D] of the images.

        ``by_sequence`` pads the tokens for self-attention, a row for each sequence
        (more than one column only if the cache is empty); ``by_image`` pads them for
        cross-attention, a row for all sequences of an image.
        """
        attention = self.self_attention
        normed = self.self_norm(states)
        keys = attention.split_heads(by_sequence.pad_keys(attention.key(normed)))
        values = attention.split_heads(by_sequence.pad_keys(attention.value(normed)))
        if cache is not None:
            keys, values = cache.self_attention_cache.update(keys, values, self.index)
        queries = by_sequence.pad(attention.query(normed))
        attended = attention(
            queries, keys, values, None, by_sequence.columns > 1, by_sequence
        )
        states = states + self.dropout(attended)
        attention = self.cross_attention
        queries = by_image.pad(attention.query(self.cross_norm(states)))
        if cache is not None and cache.is_updated.get(self.index):
            layer: Any = cache.cross_attention_cache.layers[self.index]
            keys = layer.keys
            values = layer.values
        else:
            keys, values = attention.keys_values(memory)
            if cache is not None:
                cache.cross_attention_cache.update(keys, values, self.index)
                cache.is_updated[self.index] = True
        attended = attention(queries, keys, values, memory_mask, packing=by_image)
        states = states + self.dropout(attended)
        return states + self.dropout(self.ffn(self.ffn_norm(states)))


class CaptionTransformer(PreTrainedModel, GenerationMixin):
    """The captioner as a Transformers model: ``generate`` (greedy, beam, sampling),
    ``from_pretrained``, KV cache.
    """

    config_class = CaptionTransformerConfig
    _tied_weights_keys = {"lm_head.weight": "token_embedding.weight"}
    _supports_sdpa = True
    _input_embed_layer = "token_embedding"

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.main_input_name = self.encoder.main_input_name
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_positions, config.d_model)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config.suppress_tokens = list(config.forbidden_token_ids)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, PixelEmbedding):
            init.normal_(module.position, std=0.02)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        region_features: Tensor | None = None,
        region_mask: Tensor | None = None,
        states: Tensor | None = None,
        *,
        decoder_input_ids: Tensor,
        encoder_outputs: BaseModelOutput | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        token_mask: Tensor | None = None,
        token_node: Tensor | None = None,
        image: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Next-token logits.

        Args:
            pixel_values: [B, 3, S, S].
            region_features, region_mask: instead of pixels, [B, R, F], and [B, R], True
                for real regions.
            states, encoder_outputs: instead of pixels or regions, the encoder's states
                [B, S, D] (from ``generate`` in a tuple).
            decoder_input_ids: [N, T]: N = B·K sequences; sequences of an image are
                adjacent. Padding is on the right.
            cache: keys and values of the tokens before, called ``past_key_values``
                before Transformers 5.24; with it ``decoder_input_ids`` is the newest
                token alone.
            token_mask: [N, T] or [B, K, T], True for the P tokens to compute. Without
                ``token_node`` these must be the first tokens of each sequence.
            token_node: of the same shape, index of each token's prefix among the tokens
                of ``token_mask`` (``unique_prefixes``).
            image: [N] image of each sequence, ascending; needed if images have
                different numbers of sequences. T is then 1.

        Returns:
            ``logits`` [N, T, V], or [P, V] with ``token_mask``, in float32 or the autocast dtype.
        """
        if encoder_outputs is not None:
            states = encoder_outputs[0]
        if states is None:
            states = self.encoder(pixel_values, region_features, region_mask)[0]
        cache = kwargs.get("past_key_values", cache)
        if cache is None and use_cache:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if not isinstance(cache, EncoderDecoderCache):  # of ``generate``
            cache = None
        start = 0 if cache is None else cache.get_seq_length()
        count, length = decoder_input_ids.shape
        tokens = decoder_input_ids.flatten()
        positions = torch.arange(start, start + length, device=tokens.device)
        positions = positions.repeat(count)
        index = None
        if token_mask is not None:
            index = token_mask.flatten().nonzero().squeeze(-1)
            tokens = tokens[index]
            positions = positions[index]
        source = None if token_node is None else token_node.flatten()
        by_sequence = Packing(count, length, index, source)
        if image is None:
            by_image = Packing(len(states), count * length // len(states), index)
        else:
            by_image = Packing.of_captions(image, len(states))
        scale = self.config.d_model**0.5
        embedded = self.token_embedding(tokens) * scale
        embedded = embedded + self.position_embedding(positions) * scale
        hidden = self.embedding_dropout(embedded)
        memory_mask = (
            None if region_mask is None else additive_mask(region_mask, hidden)
        )
        for layer in self.layers:
            hidden = layer(hidden, by_sequence, by_image, states, memory_mask, cache)
        logits = self.lm_head(self.norm(hidden))
        logits = logits if index is not None else logits.unflatten(0, (count, length))
        kept: dict[str, Any] = {CACHE: cache, "encoder_last_hidden_state": states}
        return Seq2SeqLMOutput(logits=logits, **kept)
