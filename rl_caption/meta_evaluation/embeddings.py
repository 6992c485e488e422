"""A dual encoder that remembers what it has embedded, for several scores of one model on the same captions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewards.clip.backbone import DualEncoder
from rewards.images import ImageSource


class RememberingEncoder:
    """A ``DualEncoder`` around another one: every image and every text is embedded once.

    Images are told apart by path or, otherwise, as objects: pass the same object again. Nothing is ever forgotten
    (4 D bytes each), which suits one split and not training.
    """

    def __init__(self, encoder: DualEncoder) -> None:
        self.encoder = encoder
        self.fingerprint, self.signature = encoder.fingerprint, encoder.signature
        self.context_length = encoder.context_length
        self._images: dict[Hashable, Tensor] = {}
        self._texts: dict[Hashable, Tensor] = {}
        self._objects: dict[int, Any] = {}  # keeps the objects alive whose ids are keys

    def encode_images(self, images: Sequence[ImageSource]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        for image in images:
            if not isinstance(image, str | Path):
                self._objects[id(image)] = image
        keys = [str(image) if isinstance(image, str | Path) else id(image) for image in images]
        return _remembered(self._images, keys, images, self.encoder.encode_images)

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        return _remembered(self._texts, texts, texts, self.encoder.encode_texts)


def _remembered(
    known: dict[Hashable, Tensor], keys: Sequence[Hashable], items: Sequence[Any], encode: Callable[[list[Any]], Tensor]
) -> Tensor:
    missing = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
    if missing:
        known.update(zip(missing, encode(list(missing.values())).unbind(), strict=True))
    return torch.stack([known[key] for key in keys]) if keys else torch.zeros(0, 0)
