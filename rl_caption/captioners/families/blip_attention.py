"""BLIP's attention as fused kernels.

Transformers writes BLIP's attention out: the 577 x 577 probabilities of every head and layer are kept for the backward
pass, 190 MB an image of 384 pixels in float32, and on a GPU the decoder starts six kernels where one does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.blip.modeling_blip import BlipAttention
from transformers.models.blip.modeling_blip_text import BlipTextSelfAttention


def fuse_attention(model: nn.Module) -> None:
    """Let ``model`` compute attention by ``scaled_dot_product_attention``.

    Names of modules and weights stay as they are. Attention probabilities, which nobody asks for here, are no longer
    among the outputs.
    """
    kinds: dict[type[nn.Module], Callable[..., Any]] = {
        BlipAttention: _image_attention,
        BlipTextSelfAttention: _text_attention,
    }
    for module in model.modules():
        attend = kinds.get(type(module))
        if attend is not None:
            changed: Any = module
            changed.forward = partial(attend, module, changed.forward)


def _image_attention(attention: Any, written_out: Callable[..., Any], hidden_states: Tensor, **options: Any) -> Any:
    """[B, S, D] -> [B, S, D], no probabilities."""
    if _fused_off(hidden_states):
        return written_out(hidden_states, **options)
    qkv = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, -1))
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    return attention.projection(_fused(attention, query, key, value, None)), None


def _text_attention(
    attention: Any,
    written_out: Callable[..., Any],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> Any:
    """[N, T, D] -> [N, T, D], no probabilities; to ``encoder_hidden_states`` [N, S, D] where they are given."""
    if _fused_off(hidden_states):
        return written_out(
            hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, past_key_values, **options
        )
    crossing = encoder_hidden_states is not None
    mask = encoder_attention_mask if crossing else attention_mask
    heads = (attention.num_attention_heads, attention.attention_head_size)
    cache, read = past_key_values, {}
    if isinstance(cache, EncoderDecoderCache):
        read = cache.is_updated if crossing else {}
        cache = cache.cross_attention_cache if crossing else cache.self_attention_cache
    if read.get(attention.layer_idx):
        key, value = cache.layers[attention.layer_idx].keys, cache.layers[attention.layer_idx].values
    else:
        states = encoder_hidden_states if crossing else hidden_states
        key, value = (part(states).unflatten(-1, heads).transpose(1, 2) for part in (attention.key, attention.value))
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        read[attention.layer_idx] = True
    query = attention.query(hidden_states).unflatten(-1, heads).transpose(1, 2)
    return _fused(attention, query, key, value, mask), None


def _fused(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Of queries [N, H, T, D/H] to [N, T, D]; ``mask`` is added."""
    dropout = attention.dropout.p if attention.dropout.training else 0.0
    return F.scaled_dot_product_attention(query, key, value, mask, dropout).transpose(1, 2).flatten(2)


def _fused_off(states: Tensor) -> bool:
    """Whether a CPU does without its fused kernel, as in bf16 (``config.build``): its substitute is slower."""
    return states.device.type == "cpu" and not torch.backends.cuda.flash_sdp_enabled()
