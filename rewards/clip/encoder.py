"""What CLIP-based scores need of a dual encoder: its interface, its options, and a cache of its embeddings.

Nothing here imports torch or loads a model: ``rewards.clip.backbone`` does.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args, runtime_checkable

import numpy as np
import psutil
from numpy.typing import NDArray
from tqdm import tqdm

from rewards.base import RewardError
from rewards.files import atomic_write
from rewards.images import ImageSource, open_image, pixel_hash

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.2
"""Share of the available memory, divided among this machine's processes, that a cache without a limit may take."""
_ENTRY_BYTES = 250
"""Overhead of an entry: key, array object, slot in the dictionary."""
_CHUNK = 1024
_CHECKSUM_BYTES = 16
_LOG_SECONDS = 10.0
Embeddings: TypeAlias = NDArray[np.float32]
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
Precision = Literal["fp32", "fp16", "bf16"]
MlpDeltas = Literal["ignored", "added"]
EncoderSource: TypeAlias = "str | Path | DualEncoder | CachedEncoder"
"""The ``backbone`` of a score: the name or folder of a model, or an encoder that is loaded already."""


@runtime_checkable
class DualEncoder(Protocol):
    """A frozen image encoder and text encoder with one embedding space."""

    fingerprint: str
    """Hash of weights, architecture, precision and preprocessing: embeddings of equal fingerprints may be mixed."""
    signature: str
    """Name, start of the fingerprint, precision; for the signature of a score."""
    context_length: int
    """Longest caption in tokens, start and end included."""

    def encode_images(self, images: Sequence[ImageSource]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        ...

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return [N, D] embeddings, float32, of length 1."""
        ...


@dataclass(frozen=True)
class EncoderOptions:
    """Which dual encoder a score embeds with, how it runs, and how many of its embeddings are kept.

    Every CLIP-based score takes these by keyword, so each is a key of the score's ``kwargs`` in a configuration. Of an
    encoder that is loaded already only ``cache_dir``, ``cache_images`` and ``cache_references`` are used, and of a
    ``CachedEncoder``, which brings its image embeddings, the last alone.

    Raises:
        ValueError: ``precision`` is unknown, or a number is below 1.
    """

    backbone: EncoderSource
    """An open_clip architecture (``ViT-B-32``); a hub id (``hf-hub:organisation/model``); a local folder, of a student
    or of an open_clip model (with ``open_clip_config.json``); or an encoder that is loaded already, which several
    scores may share."""
    pretrained: str | None = None
    """With an architecture only: a tag of open_clip (``openai``) or a checkpoint file. A file that OpenAI released (a
    TorchScript archive) is recognised, and so are one in the layout of Long-CLIP and SPECS (two tables of positions)
    and one of PAC-S under its own name (``tuned.RELEASED``). Other files of OpenAI's weights need the architecture
    ``ViT-B-32-quickgelu``, since the file does not tell its activation; the log says which one was taken. The file
    decides how many positions the text tower has."""
    device: str | None = None
    """Such as ``cpu`` or ``cuda:0``; None is the process's current CUDA device if there is one, else the CPU."""
    precision: Precision = "fp32"
    """Of weights and activations. Published GPU scores are of fp16 and differ in the fourth digit."""
    batch_size: int = 64
    """Images or captions encoded at once."""
    truncate: bool = True
    """Cut captions that are longer than the encoder's context (77 tokens for CLIP), as CLIPScore's released code does;
    False raises instead (CLIP's BPE only)."""
    context_length: int | None = None
    """Stretch the text tower to so many positions, the first 20 kept (``rewards.clip.long``): 248 for CLIP's 77. Not
    for students with ``pad_attention: full``. None leaves it as it is."""
    tuned_from: str | None = None
    """For a checkpoint in the form of PAC-S or PAC-S++ (``rewards.clip.tuned``): the tag of open_clip whose weights
    were tuned, which decides activation and preprocessing."""
    mlp_deltas: MlpDeltas = "ignored"
    """Low-rank updates of MLPs, in files of PAC-S++: ``ignored``, as the released scorer does, or ``added`` as all
    others."""
    cache_dir: str | Path | None = None
    """Folder that keeps image embeddings between runs; None keeps them in memory only."""
    cache_images: int | None = None
    """Image embeddings kept in memory, about 2.3 kB each; None is as many as there are, up to a fifth of the available
    memory (``EmbeddingCache``)."""
    cache_references: int | None = None
    """The same of reference embeddings."""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision {self.precision!r} is unknown: expected one of {', '.join(get_args(Precision))}"
            )
        for name in ("batch_size", "cache_images", "cache_references"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: expected at least 1")


def passes_on(target: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let the signature of a function that hands its ``**keywords`` to ``target`` name what ``target`` takes.

    So a score need not repeat the options that it passes on, and whoever asks for its arguments (``inspect.signature``,
    ``rewards.registry``) still sees all of them.
    """

    def with_signature(function: Function) -> Function:
        """``function`` with the parameters of both."""
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        more = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(target).parameters.items()
            if name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return with_signature


def image_identity(source: ImageSource) -> str:
    """Return the key of an image: equal for equal images, different for others.

    A file has its absolute path, size and time of change (nanoseconds), so that it is not read; anything else the hash
    of its pixels, so a scene is drawn. An ``image_id`` is not used: two datasets may give one id to different images.

    Raises:
        RewardError: there is no such file, or ``source`` is not an image.
    """
    if isinstance(source, str | Path):
        try:
            status = os.stat(source)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RewardError(f"image {str(source)!r} cannot be read: {reason}") from error
        # "oriented": embeddings that were kept before EXIF orientation was applied are of other pixels.
        return f"oriented file:{os.path.abspath(source)}:{status.st_size}:{status.st_mtime_ns}"
    image = open_image(source, own_mode=True)  # the mode decides how it is resized
    return f"pixels:{image.mode}:{pixel_hash(image.convert('RGB'))}"


def chunks(items: Sequence[T], size: int, title: str) -> Iterator[Sequence[T]]:
    """Yield the items by ``size``, with a progress bar after two seconds or, off a terminal, log lines.

    Only rank 0 shows anything.
    """
    start = logged = time.monotonic()
    shows = is_main_process()
    with tqdm(total=len(items), desc=title, leave=False, delay=2, disable=None if shows else True) as bar:
        for first in range(0, len(items), size):
            chunk = items[first : first + size]
            yield chunk
            bar.update(len(chunk))
            now, done = time.monotonic(), first + len(chunk)
            if shows and bar.disable and now - logged >= _LOG_SECONDS:
                rate, logged = done / (now - start), now
                left = (len(items) - done) / rate
                logger.info("%s: %d of %d, %.1f per second, %.0f s left", title, done, len(items), rate, left)


def is_main_process() -> bool:
    """Whether this is rank 0; before ``torch.distributed`` is initialised, the launcher's ``RANK`` says it."""
    torch = sys.modules.get("torch")  # a process that has not imported it is in no group
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return bool(torch.distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


class EmbeddingCache:
    """Embeddings of images, or of tokenised texts, under one model and one preprocessing.

    On disk an embedding is ``folder/<fingerprint>/<2 digits>/<key>.emb``: a checksum of key and content, then a
    float32 array in NumPy's format. A file that is cut off, damaged, or of something else or another model fails
    the checksum and is computed again. Files are written whole or not at all, so processes may share a folder.
    """

    def __init__(self, fingerprint: str, folder: str | Path | None = None, max_entries: int | None = None) -> None:
        """Open the cache.

        Args:
            fingerprint: of the model's weights and preprocessing; other fingerprints never share an entry.
            folder: where embeddings are kept on disk, about 2 kB each; None keeps none.
            max_entries: embeddings kept in memory; None is as many as ``MEMORY_SHARE`` has room for. A full cache keeps
                what it has: over epochs of whatever order, the share of the data that is found is then the share that
                it has room for, where dropping the least recently used would find next to nothing.

        Raises:
            ValueError: ``max_entries`` is below 1.
            OSError: the folder cannot be made.
        """
        if max_entries is not None and max_entries < 1:
            raise ValueError(f"max_entries = {max_entries}: expected at least 1")
        self.fingerprint, self.max_entries = fingerprint, max_entries
        self.folder = None if folder is None else Path(folder) / fingerprint
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._memory: dict[str, Embeddings] = {}
        self._write_failed = False

    def capacity(self, width: int) -> int:
        """How many embeddings of ``width`` numbers fit in memory; without ``max_entries``, set by the first call."""
        if self.max_entries is None:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            free = MEMORY_SHARE * psutil.virtual_memory().available / processes
            self.max_entries = max(int(free / entry_bytes(width)), 1)
        return self.max_entries

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the embeddings in memory."""
        return {**self.__dict__, "_memory": {}}

    def embed(
        self,
        items: Sequence[Any],
        encode: Callable[[Sequence[Any]], Embeddings],
        identity: Callable[[Any], str] = image_identity,
        kind: str = "image",
    ) -> Embeddings:
        """Return the embeddings of N images (or of other things), encoding only those that are not known.

        Args:
            items: N images; equal ones are encoded once.
            encode: turns M of them into [M, D] embeddings.
            identity: key of one of them; no other item, of whatever kind, has it.
            kind: what they are, for messages.

        Returns:
            [N, D], float32.

        Raises:
            RewardError: an image cannot be read or has an embedding that is not finite.
        """
        # A scene that is passed several times in one call is drawn once.
        keys_of_objects = {id(item): self._key(identity(item)) for item in {id(item): item for item in items}.values()}
        keys = [keys_of_objects[id(item)] for item in items]
        sources = dict(zip(keys, items, strict=True))
        found = {key: known for key in sources if (known := self._known(key)) is not None}
        missing = [key for key in sources if key not in found]
        for chunk in chunks(missing, _CHUNK, f"embedding {kind}s that are not cached"):
            rows = encode([sources[key] for key in chunk])
            for key, row in zip(chunk, np.asarray(rows, np.float32), strict=True):
                if not np.isfinite(row).all():
                    raise RewardError(f"{kind} {_named(sources[key])} has an embedding that is not finite")
                found[key] = row.copy()
                self._write(key, found[key])
        for key, embedding in found.items():
            if len(self._memory) < self.capacity(len(embedding)):
                self._memory[key] = embedding
        return np.stack([found[key] for key in keys]) if keys else np.zeros((0, 0), np.float32)

    def _key(self, identity: str) -> str:
        return hashlib.blake2b(f"{self.fingerprint}|{identity}".encode(), digest_size=16).hexdigest()

    def _known(self, key: str) -> Embeddings | None:
        known = self._memory.get(key)
        return self._read(key) if known is None else known

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / key[:2] / f"{key}.emb"

    def _read(self, key: str) -> Embeddings | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cached embedding %s cannot be read (%s): it is computed again", path, error)
            return None
        checksum, array = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if checksum != _checksum(key, array):
            logger.warning("cached embedding %s is damaged or of something else: it is computed again", path)
            return None
        embedding: Embeddings = np.load(io.BytesIO(array), allow_pickle=False)
        return embedding

    def _write(self, key: str, embedding: Embeddings) -> None:
        path = self._path(key)
        if path is None:
            return
        buffer = io.BytesIO()
        np.save(buffer, embedding, allow_pickle=False)
        content = buffer.getvalue()
        try:
            # Not waited for: a file that a power cut damages fails its checksum and is computed again.
            with atomic_write(path, sync=False) as file:
                file.write(_checksum(key, content) + content)
        except OSError as error:
            # The embedding is at hand; a full disk must not end a training run.
            if not self._write_failed:
                logger.warning("embeddings cannot be kept in %s (%s): they stay in memory only", self.folder, error)
            self._write_failed = True


class CachedEncoder:
    """A frozen dual encoder with a cache of image embeddings. Terms of a mixture may use the same one."""

    def __init__(
        self, encoder: DualEncoder, cache_dir: str | Path | None = None, cache_images: int | None = None
    ) -> None:
        """Open the cache; ``cache_dir`` and ``cache_images`` are ``folder`` and ``max_entries`` of ``EmbeddingCache``.

        Raises:
            ValueError: ``cache_images`` is below 1.
            OSError: the folder cannot be made.
        """
        self.encoder, self.signature = encoder, encoder.signature
        self.images = EmbeddingCache(encoder.fingerprint, cache_dir, cache_images)

    def embed_images(self, images: Sequence[ImageSource]) -> Embeddings:
        """Return [N, D] embeddings of length 1, float32; an image is encoded once. Raises as ``EmbeddingCache``."""
        return self.images.embed(images, lambda missing: self.encoder.encode_images(missing).numpy())

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Return [N, D] embeddings of length 1, float32, not cached. Raises as the encoder does."""
        embeddings: Embeddings = self.encoder.encode_texts(texts).numpy()
        return embeddings


def entry_bytes(width: int) -> int:
    """Memory of one embedding of ``width`` numbers, in bytes."""
    return 4 * width + _ENTRY_BYTES


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + content, digest_size=_CHECKSUM_BYTES).digest()


def _named(source: ImageSource) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else f"{source!r:.80}"
