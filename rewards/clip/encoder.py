"""The dual encoder of CLIP-based scores: its interface, its options, and a cache of its embeddings.

Nothing here imports torch or loads a model: ``rewards.clip.backbone`` does.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rewards.base import RewardError
from rewards.devices import Precision, chunks
from rewards.files import CheckedFiles
from rewards.images import Frames, ImageSource, frames_of, image_identity
from rewards.options import Count, check_values

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CACHED = 1_000_000
"""Embeddings that a cache keeps in memory by default: 2.3 GB at 512 numbers."""
RELEASED = {
    "clip_ViT-B-32.pth": ("ViT-B-32", "openai"),
    "openClip_ViT-L-14.pth": ("ViT-L-14", "laion2b_s32b_b82k"),
    "PAC++_clip_ViT-B-32.pth": ("ViT-B-32", "openai"),
    "PAC++_clip_ViT-L-14.pth": ("ViT-L-14", "openai"),
}
"""Checkpoint files of the repository aimagelab/pacscore -> architecture of open_clip,
tag that was fine-tuned.
"""
_CHUNK = 1024
Embeddings: TypeAlias = NDArray[np.float32]
EncoderSource: TypeAlias = "str | Path | DualEncoder | CachedEncoder"
"""The ``backbone`` of a score: the name or folder of a model, or a loaded encoder."""


class DualEncoder(Protocol):
    """A frozen image encoder and text encoder with one embedding space."""

    fingerprint: str
    """Hash of weights, architecture, precision and preprocessing: cached embeddings
    belong to one fingerprint.
    """
    signature: str
    """Name, start of the fingerprint, precision; for the signature of a score."""
    context_length: int
    """Longest caption in tokens, start and end included."""

    def count_tokens(self, text: str) -> int:
        """Tokens of a caption, start and end included; nothing is truncated."""
        ...

    def encode_images(self, images: Sequence[ImageSource]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        ...

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        ...


@dataclass(frozen=True)
class EncoderOptions:
    """Which dual encoder a score embeds with, how it runs, and how many of its
    embeddings are cached.

    Each field is a keyword of every CLIP-based score, and so a key of its ``kwargs`` in
    a configuration. If ``backbone`` is a loaded encoder, only the fields of the caches
    are used; if it is a ``CachedEncoder``, only ``cache_references``.
    """

    backbone: EncoderSource
    """An open_clip architecture (``ViT-B-32``); a hub id
    (``hf-hub:organisation/model``); a local folder, of a student, of a dual of
    pretrained encoders or of an open_clip model (with ``open_clip_config.json``); or a
    loaded encoder, which several scores may use.
    """
    pretrained: str | None = None
    """Tag of open_clip (``openai``) or a checkpoint file, which decides the number of
    text positions; with an architecture only. Recognised are OpenAI's TorchScript
    archives, the layout of Long-CLIP and SPECS (two tables of positions) and PAC-S's
    files under their own names (``RELEASED``). Other files of OpenAI's weights need the
    architecture ``ViT-B-32-quickgelu``, because they do not tell the activation; the
    log says which activation was taken.
    """
    device: str | None = None
    """Such as ``cpu`` or ``cuda:0``; None is the process's current CUDA device if there
    is one, else the CPU.
    """
    precision: Precision = "fp32"
    """Precision of weights and activations. Published scores were computed on GPUs in
    fp16 and differ in the fourth digit.
    """
    batch_size: Count = 64
    """Images or captions encoded at once, at least 1."""
    truncate: bool = True
    """Cut captions that are longer than the encoder's context (77 tokens for CLIP), as
    CLIPScore's released code does; False raises instead.
    """
    tuned_from: str | None = None
    """Tag of open_clip whose weights were fine-tuned, for a checkpoint in the form of
    PAC-S or PAC-S++; it decides activation and preprocessing.
    """
    cache_dir: str | Path | None = None
    """Folder that keeps image embeddings between runs; None keeps them in memory only."""
    cache_images: Count = CACHED
    """Image embeddings kept in memory, about 2.3 kB each, at least 1."""
    cache_references: Count = CACHED
    """Reference embeddings kept in memory, about 2.3 kB each, at least 1."""

    def __post_init__(self) -> None:
        check_values(Precision, precision=self.precision)
        check_values(
            Count,
            batch_size=self.batch_size,
            cache_images=self.cache_images,
            cache_references=self.cache_references,
        )


class EmbeddingCache:
    """Embeddings of images or texts under one model and preprocessing, in memory and
    perhaps on disk.

    On disk an embedding is ``folder/<fingerprint>/<2 digits>/<key>.emb``
    (``rewards.files.CheckedFiles``), about 2 kB: a float32 array in NumPy's format.

    Args:
        fingerprint: hash of the model's weights and preprocessing; part of every key.
        folder: None keeps embeddings in memory only.
        max_entries: embeddings kept in memory, at least 1. A full cache evicts nothing:
            over epochs in any order its hit rate is then the fraction of the data that
            fits, while evicting the least recently used would hit next to nothing.
    """

    def __init__(
        self,
        fingerprint: str,
        folder: str | Path | None = None,
        max_entries: int = CACHED,
    ) -> None:
        self.fingerprint = fingerprint
        self.max_entries = max_entries
        self._files = None
        if folder is not None:
            self._files = CheckedFiles(Path(folder) / fingerprint)
        self._memory: dict[str, Embeddings] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the embeddings in memory."""
        return {**self.__dict__, "_memory": {}}

    def embed(
        self,
        items: Sequence[Any],
        encode: Callable[[Sequence[Any]], Embeddings],
        identity: Callable[[Any], str] = image_identity,
        item_name: str = "image",
    ) -> Embeddings:
        """Return the embeddings [N, D], float32, of N images or other items.

        Args:
            items: N items. Equal items are encoded once.
            encode: M items that are not cached -> embeddings [M, D].
            identity: item -> key, equal for equal items.
            item_name: what the items are called in messages.

        Raises:
            RewardError: an image cannot be read or has an embedding that is not finite.
        """
        # A lazy column makes an item whenever it is read, and ids are of objects that live.
        items = list(items)
        # By object first: a scene that occurs several times in one call is drawn for its key once.
        names = {id(item): "" for item in items}
        for item in items:
            if not names[id(item)]:
                named = f"{self.fingerprint}|{identity(item)}".encode()
                names[id(item)] = hashlib.blake2b(named, digest_size=16).hexdigest()
        keys = [names[id(item)] for item in items]
        sources = dict(zip(keys, items, strict=True))
        embeddings: dict[str, Embeddings] = {}
        for key in sources:
            stored = None
            if key in self._memory:
                embeddings[key] = self._memory[key]
            elif self._files is not None:
                stored = self._files.read(key)
            if stored is not None:
                embeddings[key] = np.load(io.BytesIO(stored), allow_pickle=False)
        missing = [key for key in sources if key not in embeddings]
        what = f"embedding {item_name}s that are not cached"
        for chunk in chunks(missing, _CHUNK, what):
            chunk_items = [sources[key] for key in chunk]
            rows = np.asarray(encode(chunk_items), np.float32)
            check_finite(rows, chunk_items, item_name)
            for key, row in zip(chunk, rows, strict=True):
                embeddings[key] = row.copy()
                if self._files is not None:
                    buffer = io.BytesIO()
                    np.save(buffer, row, allow_pickle=False)
                    self._files.write(key, buffer.getvalue())
        for key, embedding in embeddings.items():
            if len(self._memory) < self.max_entries:
                self._memory[key] = embedding
        if not keys:
            return np.zeros((0, 0), np.float32)
        return np.stack([embeddings[key] for key in keys])


class CachedEncoder:
    """A frozen dual encoder with a cache of image embeddings, which terms of a mixture may share.

    ``cache_dir`` and ``cache_images`` are ``folder`` and ``max_entries`` of its ``EmbeddingCache``.
    """

    def __init__(
        self,
        encoder: DualEncoder,
        cache_dir: str | Path | None = None,
        cache_images: int = CACHED,
    ) -> None:
        self.encoder = encoder
        self.signature = encoder.signature
        self.images = EmbeddingCache(encoder.fingerprint, cache_dir, cache_images)

    def embed_images(self, images: Sequence[ImageSource | Frames]) -> Embeddings:
        """Return embeddings [N, D] of length 1, float32, of N images or videos. Raises
        as ``EmbeddingCache.embed``.

        A video's embedding is the mean of the normalised embeddings of its frames,
        normalised again (PAC-S, Sarto et al. 2023, for video).
        """
        return self.images.embed(images, self._encode)

    def _encode(self, images: Sequence[ImageSource | Frames]) -> Embeddings:
        videos = [frames_of(image) for image in images]
        every = list(chain.from_iterable(videos))
        rows: Embeddings = self.encoder.encode_images(every).numpy()
        ends = np.cumsum([len(frames) for frames in videos])
        return np.stack(list(map(mean_embedding, np.split(rows, ends[:-1]))))

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return embeddings [N, D] of length 1, float32, not cached. Raises as the
        encoder and ``check_finite`` do.
        """
        rows: Embeddings = self.encoder.encode_texts(texts).numpy()
        check_finite(rows, texts, "text")
        return rows


def check_finite(rows: Embeddings, items: Sequence[Any], item_name: str) -> None:
    """Raise ``RewardError`` for the first of N items whose embedding in ``rows`` [N, D]
    is not finite.

    ``item_name`` is what the items are called in the message. (Every comparison with
    NaN is false, so such an item would be ranked first.)
    """
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(bad):
        name = f"{item_name} {items[bad[0]]!r:.200}"
        raise RewardError(f"{name} has an embedding that is not finite")


def mean_embedding(rows: Embeddings) -> Embeddings:
    """The normalised mean [D] of F embeddings [F, D] of length 1; NaN if they cancel. A
    single row is not changed.
    """
    if len(rows) == 1:
        return rows[0]
    mean = rows.mean(axis=0, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return (mean / np.linalg.norm(mean)).astype(np.float32)
