"""Attention of Transformers' decoders, replaced in place: cross-attention to one copy of an image;
fused for BLIP.

Names of modules and weights stay as they are. This file holds what is assumed of Transformers'
internals, tested with 5.23 and 5.24.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from rl_caption.captioners.packed import CACHE, Packing

CROSS_ATTENTION = ("crossattention", "encoder_attn")
"""Names that Transformers' decoders give to cross-attention modules."""
STATES = ("encoder_hidden_states", "key_value_states")
"""Names of their argument for the states of the image."""
MASKS = ("attention_mask", "encoder_attention_mask")


class SharedImageCache(EncoderDecoderCache):
    """Keys and values of the tokens of every caption, and of the states of every image once.

    Attributes:
        packing: of the captions by image, if images have different numbers of them.
    """

    packing: Packing | None = None


class _PassThroughCache(DynamicCache):
    """Stores nothing: returns keys and values as they are given."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _NeverUpdated(dict[int, bool]):
    """``EncoderDecoderCache.is_updated`` of a cache that stores nothing."""

    def __setitem__(self, layer: int, updated: bool) -> None:
        pass


def packing_cache(image: Tensor, images: int) -> SharedImageCache | None:
    """A cache that stores nothing and tells cross-attention how the captions of ``images`` images
    are packed.

    ``image`` [M], ascending, is the image of each caption. Transformers' decoders hand their cache
    to every layer; as this one stores nothing, a layer may run again in the backward pass. None if
    all images have equally many captions.
    """
    packing = Packing.of_captions(image, images)
    if packing.index is None:
        return None
    cache = SharedImageCache(_PassThroughCache(), _PassThroughCache())
    cache.is_updated = _NeverUpdated()
    cache.packing = packing
    return cache


def share_images(decoder: nn.Module) -> None:
    """Let cross-attention in ``decoder`` take N = B·K rows of tokens with B rows of image states.

    A query's result does not depend on other queries, so the tokens of an image's K captions can be
    one row of K·T queries. Transformers' decoders need a copy of the image's states, keys and
    values for every caption instead.
    """
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in CROSS_ATTENTION:
            names = tuple(inspect.signature(module.forward).parameters)
            if "hidden_states" in names and set(STATES) & set(names):
                changed: Any = module
                changed.forward = partial(_cross_attend, module.forward, names)


def _cross_attend(
    forward: Callable[..., Any], names: tuple[str, ...], *positional: Any, **named: Any
) -> Any:
    """Call ``forward`` of cross-attention, which has the parameters ``names``, with an image's
    captions as one row.
    """
    named.update(zip(names, positional, strict=False))
    hidden = named["hidden_states"]
    states = next((named[key] for key in STATES if named.get(key) is not None), None)
    if states is None:
        return forward(**named)
    rows = len(hidden)
    images = len(states)
    packing = getattr(named.get(CACHE), "packing", None)
    if packing is None:
        if rows == images or rows % images:
            return forward(**named)
        packing = Packing(images, rows // images)
    # No image is padded, so masks allow everything. GPT-2 also passes the mask of self-attention,
    # which is not used.
    named.update({key: None for key in MASKS if key in named})
    named["hidden_states"] = packing.pad(hidden).flatten(1, 2)
    attended, *rest = forward(**named)
    return packing.pack(attended.unflatten(1, (packing.columns, -1))), *rest


def fuse_blip_attention(model: nn.Module) -> None:
    """Let BLIP's vision tower compute attention with ``scaled_dot_product_attention``; it no longer
    returns the probabilities.

    Transformers' own BLIP keeps the 577 x 577 probabilities of every head and layer for the
    backward pass (190 MB for an image of 384 pixels in float32).
    """
    from transformers.models.blip.modeling_blip import BlipAttention

    for module in model.modules():
        if isinstance(module, BlipAttention):
            changed: Any = module
            changed.forward = partial(_image_attention, module)


def _image_attention(attention: Any, hidden_states: Tensor, **options: Any) -> Any:
    """``BlipAttention.forward``: states [B, S, D] -> [B, S, D], and None for the probabilities."""
    qkv = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, -1))
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    dropout = attention.dropout.p if attention.dropout.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, None, dropout)
    return attention.projection(attended.transpose(1, 2).flatten(2)), None
