"""An encoder-decoder captioning Transformer, trained from scratch over pixels or over region features.

Pre-LN Transformer (Vaswani et al. 2017; pre-LN after Xiong et al. 2020). What differs from a text model is the shape of
cross-attention: the N = B·K sequences of a batch attend to the memories of B images. The K sequences of one image are
laid side by side as queries, so that the image's states are encoded once, projected once and never copied K times.

The decoder computes only tokens that somebody asked for: padding after the end of a caption, and captions that ended
while others are decoded, take part in attention as zeros and cost nothing elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from rl_caption.captioners.configuration import CaptionTransformerConfig
from rl_caption.captioners.encoder import PixelEmbedding, RegionEmbedding
from rl_caption.captioners.layout import Layout


def additive_mask(mask: Tensor, states: Tensor) -> Tensor:
    """[B, S], True for what may be looked at -> [B, 1, 1, S] of 0 and -inf, in the type that attention computes in.

    Attention would make it of a mask of truth values itself, in every layer.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    shape = (len(mask), 1, 1, mask.shape[1])
    return torch.zeros(shape, dtype=dtype, device=mask.device).masked_fill(~mask.bool().view(shape), -torch.inf)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention with separate projections."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

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
        layout: Layout | None = None,
    ) -> Tensor:
        """Attend from projected ``queries`` [N, T, D]; with ``layout``, give back only the tokens [P, D] that it has.

        ``mask`` broadcasts to [N, H, T, S] and is added to the scores (``additive_mask``).
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
        return self.output(merged if layout is None else layout.gather(merged))


class FeedForward(nn.Sequential):
    """Linear, GELU, dropout, linear."""

    def __init__(self, d_model: int, ffn_dim: int, dropout: float) -> None:
        super().__init__(nn.Linear(d_model, ffn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(ffn_dim, d_model))


class EncoderLayer(nn.Module):
    """Pre-LN self-attention over patches or regions, then the feed-forward network."""

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config.d_model, config.num_heads, config.dropout)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = FeedForward(config.d_model, config.ffn_dim, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """``states`` [B, S, D] -> [B, S, D]; ``mask`` [B, 1, 1, S]."""
        normed = self.attention_norm(states)
        attended = self.attention(self.attention.query(normed), *self.attention.keys_values(normed), mask)
        states = states + self.dropout(attended)
        return states + self.dropout(self.ffn(self.ffn_norm(states)))


class Encoder(nn.Module):
    """Pixels or region features to image states."""

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        if config.input_kind == "pixels":
            self.main_input_name = "pixel_values"
            self.embedding: nn.Module = PixelEmbedding(
                config.d_model, config.image_size, config.patch_size, config.patch_stem
            )
        else:
            self.main_input_name = "region_features"
            self.embedding = RegionEmbedding(config.d_model, config.feature_dim, config.feature_dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        region_features: Tensor | None = None,
        region_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """``last_hidden_state`` [B, S, D], from ``pixel_values`` [B, 3, H, W] or ``region_features`` [B, S, F]."""
        inputs = pixel_values if self.config.input_kind == "pixels" else region_features
        if inputs is None:
            raise ValueError(f"the model reads {self.main_input_name!r}, which is missing")
        states = self.dropout(self.embedding(inputs))
        mask = None if region_mask is None else additive_mask(region_mask, states)
        for layer in self.layers:
            states = layer(states, mask)
        return BaseModelOutput(last_hidden_state=self.norm(states))


class DecoderLayer(nn.Module):
    """Pre-LN causal self-attention, cross-attention to the image, feed-forward network."""

    def __init__(self, config: CaptionTransformerConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_norm = nn.LayerNorm(config.d_model)
        self.self_attention = Attention(config.d_model, config.num_heads, config.dropout)
        self.cross_norm = nn.LayerNorm(config.d_model)
        self.cross_attention = Attention(config.d_model, config.num_heads, config.dropout)
        self.ffn_norm = nn.LayerNorm(config.d_model)
        self.ffn = FeedForward(config.d_model, config.ffn_dim, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        states: Tensor,
        layouts: tuple[Layout, Layout],
        memory: Tensor,
        memory_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> Tensor:
        """``states`` [P, D] with ``memory`` [B, S, D].

        ``layouts`` are those of self-attention, sequences by tokens (more than one token only where the cache is
        empty), and of cross-attention, images by the tokens of their K sequences.
        """
        alone, beside = layouts
        attention = self.self_attention
        normed = self.self_norm(states)
        keys, values = (
            attention.split_heads(alone.keys(project(normed))) for project in (attention.key, attention.value)
        )
        if cache is not None:
            keys, values = cache.self_attention_cache.update(keys, values, self.index)
        queries = alone.queries(attention.query(normed))
        states = states + self.dropout(attention(queries, keys, values, None, alone.columns > 1, alone))
        # The K sequences of an image become one sequence of K·T queries: no copy of the image's keys and values.
        attention = self.cross_attention
        queries = beside.queries(attention.query(self.cross_norm(states)))
        attended = attention(queries, *self._memory(memory, cache), memory_mask, layout=beside)
        states = states + self.dropout(attended)
        return states + self.dropout(self.ffn(self.ffn_norm(states)))

    def _memory(self, memory: Tensor, cache: EncoderDecoderCache | None) -> tuple[Tensor, Tensor]:
        if cache is None:
            return self.cross_attention.keys_values(memory)
        if not cache.is_updated.get(self.index):
            cache.cross_attention_cache.update(*self.cross_attention.keys_values(memory), self.index)
            cache.is_updated[self.index] = True
        layer: Any = cache.cross_attention_cache.layers[self.index]
        return layer.keys, layer.values


class CaptionTransformer(PreTrainedModel, GenerationMixin):
    """The captioner as a Transformers model: ``generate`` (greedy, beam, sampling), ``from_pretrained``, KV cache."""

    config_class = CaptionTransformerConfig
    base_model_prefix = ""
    _tied_weights_keys = {"lm_head.weight": "token_embedding.weight"}  # noqa: RUF012
    _supports_sdpa = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]  # noqa: RUF012

    def __init__(self, config: CaptionTransformerConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.main_input_name = self.encoder.main_input_name
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.max_positions, config.d_model)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config = GenerationConfig(
            pad_token_id=config.pad_token_id,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            decoder_start_token_id=config.bos_token_id,
            suppress_tokens=list(config.forbidden_token_ids),
        )

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

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, which the output layer shares."""
        return self.token_embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the token embedding."""
        self.token_embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.lm_head

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """The image encoder."""
        return self.encoder

    def forward(
        self,
        pixel_values: Tensor | None = None,
        region_features: Tensor | None = None,
        region_mask: Tensor | None = None,
        states: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        token_mask: Tensor | None = None,
        token_slot: Tensor | None = None,
        token_places: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Next-token logits.

        Args:
            pixel_values: [B, 3, S, S], normalised.
            region_features, region_mask: [B, R, F] and [B, R] (True for real regions).
            decoder_input_ids: [B·K, T]: K sequences an image, those of one image adjacent. Padding stands on the right.
            states, encoder_outputs: states [B, S, D] of these images, in place of the two; in a tuple in ``generate``.
            past_key_values: cache of the tokens before; only the newest token is then passed.
            token_mask: [B·K, T], True for the tokens whose next ones are asked for; without ``token_slot`` these are
                the first ones of a sequence. While decoding, the cache holds only the sequences that are True.
            token_slot: [B·K, T], the place of each token's prefix among ``token_mask``'s (``different_prefixes``).
            token_places: [P], where ``token_mask`` is True in B·K·T, ascending; instead of it, where that is known.

        Returns:
            ``logits`` [B·K, T, V], float32 or the autocast type; with ``token_mask`` [P, V], one row for each True.
        """
        if decoder_input_ids is None:
            raise ValueError("decoder_input_ids is missing: the captioner reads the tokens before the next one")
        if states is None:
            states = (encoder_outputs or self.encoder(pixel_values, region_features, region_mask))[0]
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        cache = past_key_values if isinstance(past_key_values, EncoderDecoderCache) else None
        start = cache.get_seq_length() if cache is not None else 0
        count, length = decoder_input_ids.shape
        if start + length > self.config.max_positions:
            raise ValueError(f"caption of {start + length} tokens: max_positions is {self.config.max_positions}")
        places = token_places if token_mask is None else token_mask.flatten().nonzero().squeeze(-1)
        tokens = decoder_input_ids.flatten()
        positions = torch.arange(start, start + length, device=tokens.device).repeat(count)
        if places is not None:
            tokens, positions = tokens[places], positions[places]
        sources = None if token_slot is None else token_slot.flatten()
        alone = Layout(len(tokens), 1) if start else Layout(count, length, places, sources)
        beside = Layout(len(states), count * length // len(states), places)
        hidden = self._embed(tokens, positions)
        memory_mask = None if region_mask is None else additive_mask(region_mask, hidden)
        for layer in self.layers:
            hidden = layer(hidden, (alone, beside), states, memory_mask, cache)
        logits = self.lm_head(self.norm(hidden))
        return Seq2SeqLMOutput(
            logits=logits if places is not None else logits.unflatten(0, (count, length)),
            past_key_values=cache,
            encoder_last_hidden_state=states,
        )

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[P] and [P] -> [P, D]."""
        scale = self.config.d_model**0.5
        embedded = self.token_embedding(tokens) * scale + self.position_embedding(positions) * scale
        return self.embedding_dropout(embedded)
