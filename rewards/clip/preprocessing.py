"""Inputs of CLIP's encoders: pixels of images, token ids of captions, and batches of
captions of similar length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rewards.base import RewardError, naming
from rewards.images import ImageSource, open_image
from rewards.options import Size, check_fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing from an image to the pixels that an encoder reads, as in open_clip.

    Pillow resizes the image in the image's own mode (antialiased) and crops the centre.
    The result is converted to RGB, scaled to [0, 1] and normalised by mean and standard
    deviation of each channel.
    """

    size: Size = 224
    """Height and width in pixels."""
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest", "squash"] = "shortest"
    """``shortest``: the shorter side becomes ``size``, and the centre is cropped;
    ``squash``: both sides become ``size``.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, image: Image.Image) -> Tensor:
        """Pixels [3, size, size], float32, of an image in its own mode."""
        return self.normalise(self.square(image))

    def square(self, image: Image.Image) -> Tensor:
        """The resized and cropped RGB image [3, size, size], uint8."""
        method = Image.Resampling[self.interpolation.upper()]
        if self.resize_mode == "squash":
            image = image.resize((self.size, self.size), method)
        else:
            width, height = image.size
            # The longer side is rounded down, as CLIP's own resize does.
            longer = int(self.size * max(width, height) / min(width, height))
            target = (self.size, longer) if width <= height else (longer, self.size)
            if target != image.size:
                image = image.resize(target, method)
            left, top = (round((side - self.size) / 2) for side in image.size)
            image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    def normalise(self, square: Tensor) -> Tensor:
        """Pixels [3, size, size], float32, of a uint8 image of that shape."""
        mean, std = torch.tensor([self.mean, self.std])[:, :, None, None]
        return (square.float() / 255 - mean) / std


def pixels(source: ImageSource, preprocessing: Preprocessing) -> Tensor:
    """Read or draw an image: pixels [3, size, size].

    Raises:
        RewardError: as ``open_image``, or the image has a shape that cannot be prepared.
    """
    image = open_image(source, own_mode=True)
    with naming(
        f"image {source!r:.200} of {image.size} pixels cannot be prepared",
        (ValueError, OSError, ZeroDivisionError, MemoryError),
        RewardError,
    ):
        return preprocessing(image)


def preprocessing_of(visual: Any) -> Preprocessing:
    """The preprocessing of an open_clip image encoder. Raises ``ValueError`` if it is
    not supported.
    """
    config = getattr(visual, "preprocess_cfg", None) or {"size": visual.image_size}
    sides = {*np.ravel(config["size"]).tolist()}
    return Preprocessing(
        sides.pop() if len(sides) == 1 else config["size"],
        tuple(config.get("mean", CLIP_MEAN)),
        tuple(config.get("std", CLIP_STD)),
        config.get("interpolation", "bicubic"),
        config.get("resize_mode", "shortest"),
    )


class WordTokens:
    """CLIP's tokenizer with a least-recently-used cache of the tokens of words: the
    same tokens in a tenth of the time.

    The tokenizer cleans a caption, splits it at white space and elsewhere, and encodes
    the parts. In printable ASCII without ``&``, cleaning changes nothing but case and
    white space, so the tokens of such a caption are the tokens of its words. Any other
    caption is encoded by ``tokenizer``, open_clip's ``SimpleTokenizer`` with CLIP's
    settings.
    """

    def __init__(self, tokenizer: Any, max_words: int = 200_000) -> None:
        self.tokenizer = tokenizer
        self._encode_word = lru_cache(max_words)(tokenizer.encode)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the cache."""
        return WordTokens, (self.tokenizer,)

    def encode(self, text: str) -> list[int]:
        """Token ids of a caption, without start and end."""
        if not (text.isascii() and text.isprintable()) or "&" in text:
            return list(self.tokenizer.encode(text))
        return list(chain.from_iterable(map(self._encode_word, text.split())))

    def __call__(self, texts: Sequence[str], context_length: int) -> Tensor:
        """Token ids [N, context_length] with start and end, padded with 0; captions
        that are too long are truncated.
        """
        start = self.tokenizer.sot_token_id
        end = self.tokenizer.eot_token_id
        ids = np.zeros((len(texts), context_length), np.int64)
        for row, text in zip(ids, texts, strict=True):
            tokens = [start, *self.encode(text)[: context_length - 2], end]
            row[: len(tokens)] = tokens
        return torch.from_numpy(ids)


@lru_cache(maxsize=1)
def clip_tokenizer() -> WordTokens:
    """CLIP's tokenizer; one object for the whole process, because reading its
    vocabulary takes a while.
    """
    from open_clip import SimpleTokenizer

    return WordTokens(SimpleTokenizer())


def open_clip_tokenizer(name: str) -> Any:
    """The tokenizer of an open_clip model, named as for ``open_clip.get_tokenizer``;
    for most models ``clip_tokenizer()``.
    """
    import open_clip

    text = (open_clip.get_model_config(name) or {}).get("text_cfg", {})
    others = ("hf_tokenizer_name", "hf_model_name", "tokenizer_kwargs")
    if any(map(text.get, others)) or "siglip" in name.lower():
        safe = {"trust_remote_code": False} if text.get("hf_tokenizer_name") else {}
        return open_clip.get_tokenizer(name, **safe)
    return clip_tokenizer()


def embed_by_length(
    encode: Callable[[Tensor], Tensor],
    ids: Tensor,
    lengths: Tensor,
    max_tokens: int,
) -> Tensor:
    """Embed N captions in batches of similar length, with little padding: [N, D]. The
    GPU is not synchronised.

    Args:
        encode: token ids [M, T] -> embeddings [M, D].
        ids: [N, L], on the CPU.
        lengths: [N] tokens of each caption that are read.
        max_tokens: M * T of a batch at most, unless M is 1.
    """
    order = lengths.argsort(stable=True)
    starts = [0]
    for row, length in enumerate(lengths[order].tolist()):
        if row > starts[-1] and (row + 1 - starts[-1]) * length > max_tokens:
            starts.append(row)
    batches = order.tensor_split(starts[1:])
    embeddings = torch.cat(
        [encode(ids[rows, : int(lengths[rows[-1]])]) for rows in batches]
    )
    order = order.to(embeddings.device)
    return torch.empty_like(embeddings).index_copy_(0, order, embeddings)


def is_causal(clip: Any) -> bool:
    """Whether nothing after EOT reaches the text embeddings of an open_clip ``CLIP``,
    so that ids may be cut there.
    """
    return clip.attn_mask is not None and clip.text_pool_type == "argmax"


def causal_features(model: Any, ids: Tensor, pooled: bool = True) -> Tensor:
    """Text embeddings [B, D] of an open_clip model with a causal mask, for ids [B, L]
    of any L up to its context; if not ``pooled``, embeddings of all tokens, [B, L, D],
    by the same projection.

    Nothing after EOT reaches the embedding under a causal mask, so ids may be cut after
    the longest caption.
    """
    length = ids.shape[1]
    dtype = model.transformer.get_cast_dtype()
    positions = model.positional_embedding[:length].to(dtype)
    hidden = model.token_embedding(ids).to(dtype) + positions
    mask = model.attn_mask[:length, :length].to(dtype)
    states: Tensor = model.ln_final(model.transformer(hidden, attn_mask=mask))
    if pooled:
        rows = torch.arange(len(ids), device=ids.device)
        states = states[rows, ids.argmax(dim=1)]
    projection = model.text_projection
    if projection is None:
        return states
    return projection(states) if callable(projection) else states @ projection
