"""Batches of image-caption pairs for embedding models: pixels and token ids, prepared
in the loader's workers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import Texts
from rewards.images import ImageSource, open_image
from rewards.text.tokenize import tokenize
from rl_caption.data.base import Row, pixel_key
from rl_caption.data.loader import augment, row_generator
from rl_caption.data.rand_augment import rand_augment

T = TypeVar("T")
Captions = Literal["random", "first"]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class PairBatch:
    """A batch of B images with one caption each; for one tower, B images or B captions."""

    rows: Sequence[Row]
    inputs: dict[str, Tensor]
    """Inputs of the model, each under the name of its embedding: pixels [B, 3, S, S]
    where the name starts with ``image``, else token ids [B, L].
    """
    captions: list[str]
    targets: dict[str, Tensor] = field(default_factory=dict)
    """Further inputs of the loss, float32. ``triplet`` [B]: 1 where the row has a
    triplet, else 0. ``false`` [B, n]: 1 where the row has its n-th hard negative, else
    0. ``image_group``, ``text_group``, ``text_short_group``, ... [B]: numbers that are
    equal for equal images, or texts.
    """

    def to(self, device: torch.device) -> PairBatch:
        """The batch with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """The batch in page-locked memory, from which copies to a GPU run while it
        computes; called by the loader.
        """
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PairBatch:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        targets = {name: change(tensor) for name, tensor in self.targets.items()}
        return replace(self, inputs=inputs, targets=targets)


class PixelCache:
    """Preprocessed pixels of images, kept as uint8 up to ``cache_bytes``; further
    images are prepared every time.
    """

    def __init__(self, preprocessing: Preprocessing, cache_bytes: int = 0) -> None:
        self.preprocessing = preprocessing
        self.cache_bytes = cache_bytes
        self.cached: dict[tuple[str, tuple[Any, ...]], Tensor] = {}

    def square(self, image_id: str, source: ImageSource) -> Tensor:
        """The resized and cropped image [3, S, S], uint8.

        Raises ``RewardError`` if the image is missing or unreadable.
        """
        key = pixel_key(image_id, source)
        square = self.cached.get(key)
        if square is None:
            square = self.preprocessing.square(open_image(source, own_mode=True))
            if (len(self.cached) + 1) * square.numel() <= self.cache_bytes:
                self.cached[key] = square
        return square

    def of(self, row: Row) -> Tensor:
        """Normalised pixels [3, S, S], float32, of a row's image."""
        image: Any = row["image"]
        return self.preprocessing.normalise(self.square(row["image_id"], image))


def draw(items: Sequence[T], row: Row, seed: int, step: int, what: str) -> T:
    """One of ``items``, a pure function of (seed, step, what, image id)."""
    generator = row_generator(seed, step, f"{what}/{row['image_id']}")
    return items[int(generator.integers(len(items)))]


def caption_index(row: Row, captions: Captions, seed: int, step: int) -> int:
    """Index of the reference of an image that a step uses: a pure function of (seed,
    step, image id).
    """
    if captions == "first":
        return 0
    return draw(range(len(row["references"])), row, seed, step, "caption")


def sampled_sentences(
    caption: str, least: int, most: int, generator: np.random.Generator
) -> str:
    """``least`` to ``most`` random sentences of a caption, in their order; the whole
    caption where it has fewer.
    """
    sentences = _SENTENCE_END.split(caption.strip())
    count = min(int(generator.integers(least, most + 1)), len(sentences))
    chosen = sorted(generator.permutation(len(sentences))[:count])
    return " ".join(sentences[index] for index in chosen)


@dataclass(frozen=True)
class Addition:
    """Further texts, images and targets of a task for a batch of B pairs.

    Args:
        texts: name of an input -> B texts.
        targets: further inputs of the loss.
        images: name of an input -> B pairs of a unique id and an image.
    """

    texts: dict[str, list[str]] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    images: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)


@dataclass
class PairCollate:
    """Collate function: from B pairs (row, step) to a ``PairBatch`` on the CPU.

    Args:
        pixels: prepares images; None leaves images out (a text tower alone).
        tokens: prepares captions; None leaves captions out (an image tower alone).
        captions: which reference a step learns.
        augmentations: names of ``augment``, and ``rand_augment``: another random view
            of an image at every step.
        seed: random seed of all choices.
        plain_captions: fraction of (image, step), in [0, 1], whose texts are as a
            word-level captioner writes them: lower-case words of the caption tokeniser,
            no punctuation. The choice is a pure function of (seed, step, image id).
        groups: add the targets ``image_group``, ``text_group`` and one of each further
            text.
        sentences: least and most number of sentences of a caption to use; None uses
            whole captions.
        additions: functions of the task, from pairs (row, step) and their captions to
            further inputs.
    """

    pixels: PixelCache | None
    tokens: Texts | None
    captions: Captions = "random"
    augmentations: Sequence[str] = ()
    seed: int = 0
    plain_captions: float = 0.0
    groups: bool = False
    sentences: Sequence[int] | None = None
    additions: Sequence[Callable[[Sequence[tuple[Row, int]], list[str]], Addition]] = ()

    def __call__(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        rows = [row for row, _ in items]
        steps = [step for _, step in items]
        ids = [row["image_id"] for row in rows]
        batch = PairBatch(rows, {}, [])
        pairs = Addition()
        if self.pixels is not None:  # else rows need no images
            images = [row["image"] for row in rows]
            pairs.images["image"] = list(zip(ids, images, strict=True))
        if self.tokens is not None:  # else rows need no captions
            batch.captions.extend(self._caption(row, step) for row, step in items)
            pairs.texts["text"] = batch.captions
        for addition in self.additions:
            added = addition(items, batch.captions)
            pairs.texts.update(added.texts)
            pairs.images.update(added.images)
            batch.targets.update(added.targets)
        for name, column in pairs.images.items():
            views = []
            for (image_id, image), step in zip(column, steps, strict=True):
                views.append(self._view(image_id, image, step))
            batch.inputs[name] = torch.stack(views)
        if self.groups:
            batch.targets["image_group"] = _groups(ids)
        for name, whole in pairs.texts.items():
            texts = []
            for text, image_id, step in zip(whole, ids, steps, strict=True):
                if self.plain_captions:
                    draws = row_generator(self.seed, step, f"plain/{image_id}")
                    if draws.random() < self.plain_captions:
                        text = " ".join(tokenize(text))
                texts.append(text)
            assert self.tokens is not None
            batch.inputs[name] = self.tokens(texts)
            if self.groups:
                batch.targets[f"{name}_group"] = _groups(texts)
        return batch

    def _caption(self, row: Row, step: int) -> str:
        """The caption of a row that a step uses."""
        caption = row["references"][caption_index(row, self.captions, self.seed, step)]
        if self.sentences is None:
            return caption
        draws = row_generator(self.seed, step, f"sentences/{row['image_id']}")
        least, most = self.sentences
        return sampled_sentences(caption, least, most, draws)

    def _view(self, image_id: str, source: ImageSource, step: int) -> Tensor:
        """Augmented pixels [3, S, S] of an image at a step, float32."""
        assert self.pixels is not None
        square = self.pixels.square(image_id, source)
        if "rand_augment" in self.augmentations:
            square = rand_augment(square, self.seed, step, image_id)
        pixels = self.pixels.preprocessing.normalise(square)
        if not self.augmentations:
            return pixels
        return augment(pixels, self.augmentations, self.seed, step, image_id)


def _groups(keys: Sequence[str]) -> Tensor:
    """A number for each of B keys, equal for equal keys: 24 bits of a hash, which
    float32 holds exactly.
    """
    digests = [hashlib.blake2b(key.encode(), digest_size=3).digest() for key in keys]
    return torch.tensor([float(int.from_bytes(digest)) for digest in digests])
