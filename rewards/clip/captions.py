"""Token ids of captions for CLIP's text encoder, from a cache of words, and batches of captions of similar length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor


class WordTokens:
    """CLIP's tokenizer with a cache of the tokens of every word: the same tokens in a tenth of the time.

    The tokenizer cleans a caption, splits it at white space and elsewhere, and encodes the parts. Cleaning leaves
    printable ASCII without ``&`` as it is, but for case and white space, and no part has white space in it. So there
    the tokens of a caption are those of its words, one after the other. All other captions go by the tokenizer.

    Args:
        tokenizer: open_clip's ``SimpleTokenizer`` as CLIP has it: lower case, what is too long loses its end.
        max_words: words whose tokens are kept, about 250 bytes each; the least recently used go first.
    """

    def __init__(self, tokenizer: Any, max_words: int = 200_000) -> None:
        self.tokenizer = tokenizer
        self._encode_word = lru_cache(max_words)(tokenizer.encode)

    def encode(self, text: str) -> list[int]:
        """Token ids of a caption, without start and end."""
        if not (text.isascii() and text.isprintable()) or "&" in text:
            return list(self.tokenizer.encode(text))
        return list(chain.from_iterable(map(self._encode_word, text.split())))

    def __call__(self, texts: Sequence[str], context_length: int) -> Tensor:
        """Token ids [N, ``context_length``] with start and end, padded with 0; captions too long lose their end."""
        start, end = self.tokenizer.sot_token_id, self.tokenizer.eot_token_id
        rows = [[start, *self.encode(text)[: context_length - 2], end] for text in texts]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ids = np.zeros((len(rows), context_length), np.int64)
        ids[np.arange(context_length) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
        return torch.from_numpy(ids)


def with_cached_words(tokenizer: Any) -> Any:
    """``tokenizer`` as ``WordTokens`` where it is CLIP's, else itself."""
    from open_clip import SimpleTokenizer
    from open_clip.tokenizer import get_clean_fn

    is_clip = type(tokenizer) is SimpleTokenizer and tokenizer.clean_fn is get_clean_fn("lower")
    return WordTokens(tokenizer) if is_clip and tokenizer.reduction_fn is None else tokenizer


def embed_by_length(
    encode: Callable[[Tensor], Tensor], ids: Tensor, lengths: Tensor, max_tokens: int, device: str
) -> Tensor:
    """Embed N captions in batches of similar length, so that little padding is read.

    Args:
        encode: from token ids [M, T] to embeddings [M, D].
        ids: [N, L], on the CPU.
        lengths: [N] tokens that are to be read of each.
        max_tokens: of a batch, padding included; a longer caption is a batch of its own.
        device: of the encoder.

    Returns:
        [N, D] on ``device``, in the order of ``ids``; without a synchronisation.
    """
    order = lengths.argsort(stable=True)
    batches = [encode(ids[rows, : int(lengths[rows[-1]])].to(device)) for rows in _batches(order, lengths, max_tokens)]
    embeddings = torch.cat(batches)
    return torch.empty_like(embeddings).index_copy_(0, order.to(device), embeddings)


def _batches(order: Tensor, lengths: Tensor, max_tokens: int) -> list[Tensor]:
    longest, starts = lengths[order].tolist(), [0]
    for row, length in enumerate(longest):
        if row > starts[-1] and (row + 1 - starts[-1]) * length > max_tokens:
            starts.append(row)
    return [order[start:end] for start, end in zip(starts, [*starts[1:], len(order)], strict=True)]


def causal_text_features(model: Any, ids: Tensor) -> Tensor:
    """Encode ids [B, L] of any L. Under a causal mask nothing after EOT reaches the embedding, so L may be short."""
    length, dtype = ids.shape[1], model.transformer.get_cast_dtype()
    hidden = model.token_embedding(ids).to(dtype) + model.positional_embedding[:length].to(dtype)
    mask = model.attn_mask[:length, :length].to(dtype)
    hidden = model.ln_final(model.transformer(hidden, attn_mask=mask))
    pooled = hidden[torch.arange(len(ids), device=ids.device), ids.argmax(dim=1)]
    if model.text_projection is None:
        return pooled
    return model.text_projection(pooled) if callable(model.text_projection) else pooled @ model.text_projection
