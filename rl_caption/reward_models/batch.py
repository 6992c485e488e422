"""Batches of image-caption pairs for embedding models: pixels and token ids, prepared in the
loader's workers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import TextEncoder
from rewards.images import Frames, ImageSource, frames_of, open_image
from rewards.text.tokenize import tokenize
from rl_caption.data.base import Row, pixel_key
from rl_caption.data.loader import augment, draw_view, row_generator
from rl_caption.data.rand_augment import rand_augment
from rl_caption.runtime.errors import ConfigError

T = TypeVar("T")
Captions = Literal["random", "first"]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class PairBatch:
    """A batch of B images with one caption each; of one tower, B images or B captions alone."""

    rows: Sequence[Row]
    inputs: dict[str, Tensor]
    """Inputs of the model, each under the name of its embedding. ``image``: pixels [B, 3, S, S], of
    videos [B, T, 3, S, S]; ``text``: token ids [B, L]. Where a frozen encoder ran before training,
    its features instead: [B, R, D] of images, [B, D] of texts. Names of images start with
    ``image``; all others are texts.
    """
    captions: list[str]
    targets: dict[str, Tensor] = field(default_factory=dict)
    """Further inputs of the loss. ``triplet`` [B]: 1 where the row has a triplet, else 0. ``false``
    [B, n]: 1 where the row has its n-th hard negative, else 0. ``image_group`` and ``text_group``,
    ``text_short_group``, ... [B]: numbers that are equal for equal images, or texts.
    """

    def to(self, device: torch.device) -> PairBatch:
        """The batch with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """The batch in page-locked memory, from where a GPU copies while it computes; called by the
        loader.
        """
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PairBatch:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        targets = {name: change(tensor) for name, tensor in self.targets.items()}
        return replace(self, inputs=inputs, targets=targets)


class PixelCache:
    """Preprocessed pixels of images. They are kept as uint8 up to ``cache_bytes``; the rest is
    prepared every time.
    """

    def __init__(self, preprocessing: Preprocessing, cache_bytes: int = 0) -> None:
        self.preprocessing, self.cache_bytes = preprocessing, cache_bytes
        self.cached: dict[tuple[str, tuple[Any, ...]], Tensor] = {}

    def __call__(self, image_id: str, source: ImageSource | Frames) -> Tensor:
        """Normalised pixels [3, S, S], float32; of a video of T frames [T, 3, S, S].

        Raises ``RewardError`` if the image is missing or unreadable.
        """
        return self.preprocessing.normalise(self.square(image_id, source))

    def square(self, image_id: str, source: ImageSource | Frames) -> Tensor:
        """The same before normalisation, uint8."""
        key = pixel_key(image_id, source)
        square = self.cached.get(key)
        if square is None:
            frames = [open_image(frame, own_mode=True) for frame in frames_of(source)]
            squares = list(map(self.preprocessing.square, frames))
            square = torch.stack(squares) if isinstance(source, list | tuple) else squares[0]
            if (len(self.cached) + 1) * square.numel() <= self.cache_bytes:
                self.cached[key] = square
        return square

    def of(self, row: Row) -> Tensor:
        """The pixels of a row's image."""
        return self(row["image_id"], row["image"])


class FeatureCache:
    """Features of images by a frozen encoder, read from ``data.features_root`` and kept in memory
    where they fit.

    Args:
        pool: from a grid [1, R, D] to one vector [1, D] an image, which is kept; None keeps the
            grid, as float16.
        cache_bytes: memory for the features.
    """

    def __init__(self, pool: Callable[[Tensor], Tensor] | None, cache_bytes: int = 0) -> None:
        self.pool, self.cache_bytes = pool, cache_bytes
        self.cached: dict[str, Tensor] = {}

    def of(self, row: Row) -> Tensor:
        """Features [R, D], float32, of a row's image; R is 1 if pooled. ``DataError`` if they are
        unreadable.
        """
        key = row["features"].where
        features = self.cached.get(key)
        if features is None:
            features = torch.from_numpy(row["features"].load())
            features = features.half() if self.pool is None else self.pool(features[None])
            if (len(self.cached) + 1) * features.nbytes <= self.cache_bytes:
                self.cached[key] = features
        return features.float()


@dataclass
class Texts:
    """Turns captions into what a text tower reads: token ids, or features that a frozen encoder
    computed before.

    Args:
        encoder: has the tokenizer.
        context_length: longest caption in tokens, special ones included; longer ones are truncated.
        trims: pad to the longest caption of a batch; else to ``context_length``.
        features: [N, D], one row for each caption of ``index``; None gives token ids.
        index: caption -> its row of ``features``.
    """

    encoder: TextEncoder
    context_length: int
    trims: bool = True
    features: Tensor | None = None
    index: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Ids [B, L], or features [B, D]."""
        if self.features is not None:
            return self.features[[self.index[caption] for caption in captions]]
        ids = self.encoder.tokenize(captions, self.context_length)
        return ids[:, : int(self.encoder.lengths(ids).max())] if self.trims else ids

    def too_long(self, captions: Sequence[str]) -> int:
        """How many of the captions are truncated."""
        return sum(self.encoder.count_tokens(caption) > self.context_length for caption in captions)


def draw(items: Sequence[T], row: Row, seed: int, step: int, what: str) -> T:
    """One of ``items``, a pure function of (seed, step, what, image id)."""
    return items[int(row_generator(seed, step, f"{what}/{row['image_id']}").integers(len(items)))]


def caption_index(row: Row, captions: Captions, seed: int, step: int) -> int:
    """Index of the reference that a step learns of an image: a pure function of (seed, step, image
    id).
    """
    if captions == "first":
        return 0
    return draw(range(len(row["references"])), row, seed, step, "caption")


def sampled_sentences(caption: str, least: int, most: int, generator: np.random.Generator) -> str:
    """``least`` to ``most`` random sentences of a caption, in their order; all of them where it has
    fewer.
    """
    sentences = _SENTENCE_END.split(caption.strip())
    count = min(int(generator.integers(least, most + 1)), len(sentences))
    chosen = sorted(generator.permutation(len(sentences))[:count])
    return " ".join(sentences[index] for index in chosen)


@dataclass(frozen=True)
class Sentences:
    """Learns some random sentences of each caption: a pure function of (seed, step, image id).

    Args:
        count: the least and the most number of sentences.
        seed: of all draws.
    """

    count: Sequence[int]
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.count) != 2 or list(self.count) != sorted(self.count):
            raise ConfigError(f"train.sentences is {self.count}: expected [least, most]")

    def __call__(self, row: Row, caption: str, step: int) -> str:
        least, most = self.count
        draws = row_generator(self.seed, step, f"sentences/{row['image_id']}")
        return sampled_sentences(caption, least, most, draws)


def sentence_wordings(count: Sequence[int] | None, seed: int) -> list[Sentences]:
    """``Sentences`` of the key ``train.sentences``; none where it is null."""
    return [] if count is None else [Sentences(count, seed)]


def plain_form(caption: str) -> str:
    """A caption as a word-level captioner writes it: lower-case words of the caption tokeniser, no
    punctuation.
    """
    return " ".join(tokenize(caption))


def chance(share: float, what: str, row: Row, seed: int, step: int) -> bool:
    """True with probability ``share``: a pure function of (seed, step, ``what``, image id)."""
    if share in (0, 1):
        return share == 1
    return float(row_generator(seed, step, f"{what}/{row['image_id']}").random()) < share


@dataclass(frozen=True)
class Addition:
    """What a task adds to a batch of B pairs.

    Args:
        texts: further texts, B of each, by the name of their input.
        targets: further inputs of the loss.
        images: further images, B of each, by the name of their input: an id that no other image
            has, and the image.
    """

    texts: Mapping[str, list[str]] = field(default_factory=dict)
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    images: Mapping[str, list[tuple[str, ImageSource | Frames]]] = field(default_factory=dict)


@dataclass
class PairCollate:
    """Collate function: from B pairs (row, step) to a ``PairBatch`` on the CPU. What it adds is the
    task's.

    Args:
        pixels: prepares images, or reads their features; None leaves images out (a text tower
            alone).
        tokens: prepares captions; None leaves captions out (an image tower alone).
        captions: which reference a step learns.
        augmentations: names of ``augment``, and ``rand_augment``: another random view of an image
            at every step.
        seed: of all random choices.
        plain_captions: fraction of (image, step) whose texts are in ``plain_form``, in [0, 1];
            which ones is a pure function of (seed, step, image id).
        groups: add the targets ``image_group``, ``text_group`` and those of further texts.
        wordings: from (row, caption, step) to the caption as the step learns it, one after the
            other.
        additions: from the pairs (row, step) and their captions to what is added.
    """

    pixels: PixelCache | FeatureCache | None
    tokens: Texts | None
    captions: Captions = "random"
    augmentations: Sequence[str] = ()
    seed: int = 0
    plain_captions: float = 0.0
    groups: bool = False
    wordings: Sequence[Callable[[Row, str, int], str]] = ()
    additions: Sequence[Callable[[Sequence[tuple[Row, int]], list[str]], Addition]] = ()

    def __call__(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        rows = [row for row, _ in items]
        if self.tokens is None:  # rows need no captions
            return PairBatch(rows, self._images(items, {}), [])
        captions = []
        for row, step in items:
            caption = row["references"][caption_index(row, self.captions, self.seed, step)]
            for wording in self.wordings:
                caption = wording(row, caption, step)
            captions.append(caption)
        texts, targets = {"text": captions}, dict[str, Tensor]()
        images = dict[str, list[tuple[str, ImageSource | Frames]]]()
        for addition in self.additions:
            added = addition(items, captions)
            texts |= added.texts
            targets |= added.targets
            images |= added.images
        inputs = self._images(items, images)
        plain = [chance(self.plain_captions, "plain", row, self.seed, step) for row, step in items]
        for name, column in texts.items():
            pairs = zip(column, plain, strict=True)
            texts[name] = [plain_form(text) if is_plain else text for text, is_plain in pairs]
            inputs[name] = self.tokens(texts[name])
        if self.groups:
            targets["image_group"] = _groups([row["image_id"] for row in rows])
            targets |= {f"{name}_group": _groups(column) for name, column in texts.items()}
        return PairBatch(rows, inputs, captions, targets)

    def _images(
        self,
        items: Sequence[tuple[Row, int]],
        further: Mapping[str, list[tuple[str, ImageSource | Frames]]],
    ) -> dict[str, Tensor]:
        if self.pixels is None:
            return {}
        if isinstance(self.pixels, FeatureCache):
            # Training images alone have views: a step below 0 is validation's.
            views = (row if step < 0 else draw_view(row, self.seed, step) for row, step in items)
            return {"image": torch.stack([self.pixels.of(row) for row in views])}
        own = [(row["image_id"], row["image"]) for row, _ in items]
        inputs = {}
        for name, column in {"image": own, **further}.items():
            images = zip(column, items, strict=True)
            pixels = [self._view(image_id, image, step) for (image_id, image), (_, step) in images]
            inputs[name] = torch.stack(pixels)
        return inputs

    def _view(self, image_id: str, source: ImageSource | Frames, step: int) -> Tensor:
        """An image as a step sees it; of a video the same view of all frames."""
        assert isinstance(self.pixels, PixelCache)
        square, views = self.pixels.square(image_id, source), []
        for frame in square if square.ndim == 4 else [square]:
            if "rand_augment" in self.augmentations:
                frame = rand_augment(frame, self.seed, step, image_id)
            pixels = self.pixels.preprocessing.normalise(frame)
            if self.augmentations:
                pixels = augment(pixels, self.augmentations, self.seed, step, image_id)
            views.append(pixels)
        return torch.stack(views) if square.ndim == 4 else views[0]


def _groups(keys: Sequence[str]) -> Tensor:
    """A number for each of B keys, equal for equal keys: 24 bits of a hash, which float32 holds
    exactly.
    """
    digests = [hashlib.blake2b(key.encode(), digest_size=3).digest() for key in keys]
    return torch.tensor([float(int.from_bytes(digest)) for digest in digests])
