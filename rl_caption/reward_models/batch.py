"""Image-caption pairs for embedding models: pixels and token ids, prepared in loader workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rewards.clip.preprocessing import Preprocessing
from rewards.images import ImageSource, open_image
from rewards.text.tokenize import tokenize
from rl_caption.data.base import Row
from rl_caption.data.loader import augment, row_generator
from rl_caption.reward_models.triplets import Triplet

Captions = Literal["random", "first"]


@dataclass(frozen=True)
class PairBatch:
    """B images with one caption each."""

    rows: Sequence[Row]
    inputs: dict[str, Tensor]
    """What the model embeds, by the name of the embedding: ``image`` is pixels [B, 3, S, S], ``text`` token ids [B, L].
    A name that starts with ``image`` is pixels, any other is token ids."""
    captions: list[str]
    targets: dict[str, Tensor] = field(default_factory=dict)
    """What the loss is told beside the embeddings, [B] each, such as ``triplet``: 1 where the row has one, else 0."""

    def to(self, device: torch.device) -> PairBatch:
        """The batch with its tensors on ``device``."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """The batch in page-locked memory, from where a GPU copies while it computes; called by the loader."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> PairBatch:
        inputs, targets = (
            {name: change(tensor) for name, tensor in own.items()} for own in (self.inputs, self.targets)
        )
        return PairBatch(self.rows, inputs, self.captions, targets)


class PixelCache:
    """Preprocessed pixels of images, kept as bytes: what is cached is neither decoded nor drawn again.

    Args:
        preprocessing: of the model.
        cache_bytes: memory for pixels; images that do not fit are prepared every time.
    """

    def __init__(self, preprocessing: Preprocessing, cache_bytes: int = 0) -> None:
        self.preprocessing, self.cache_bytes = preprocessing, cache_bytes
        self.cached: dict[tuple[str, str], Tensor] = {}

    def __call__(self, row: Row) -> Tensor:
        """Normalised pixels [3, S, S] of a row's image, float32.

        Raises:
            RewardError: the image is missing or unreadable.
        """
        return self.pixels_of(row["image_id"], row["image"])

    def pixels_of(self, image_id: str, source: ImageSource) -> Tensor:
        """The same of any image; one that is no file is known by ``image_id`` alone."""
        key = (image_id, str(source) if isinstance(source, str | Path) else "")
        square = self.cached.get(key)
        if square is None:
            square = self.preprocessing.square(open_image(source, own_mode=True))
            if (len(self.cached) + 1) * square.numel() <= self.cache_bytes:
                self.cached[key] = square
        return self.preprocessing.normalise(square)


class TokenCache:
    """Captions to CLIP's token ids; the ids of a caption are kept.

    Args:
        tokenizer: open_clip's ``SimpleTokenizer``.
        context_length: longest caption in tokens, start and end included; longer ones lose their end, as in CLIP.
        trims: ids are cut after the longest caption of a batch; else they have ``context_length``.
    """

    def __init__(self, tokenizer: Any, context_length: int, trims: bool) -> None:
        self.tokenizer, self.context_length, self.trims = tokenizer, context_length, trims
        self.cached: dict[str, list[int]] = {}

    def ids(self, caption: str, keep: bool = True) -> list[int]:
        """Start, tokens, end: at most ``context_length``."""
        known = self.cached.get(caption)
        if known is None:
            tokens = self.tokenizer.encode(caption)[: self.context_length - 2]
            known = [self.tokenizer.sot_token_id, *tokens, self.tokenizer.eot_token_id]
            if keep:
                self.cached[caption] = known
        return known

    def __call__(self, captions: Sequence[str], keep: bool = True) -> Tensor:
        """Ids [B, L], padded with 0; ``keep`` is for captions that come again."""
        encoded = [self.ids(caption, keep) for caption in captions]
        length = max(len(ids) for ids in encoded) if self.trims else self.context_length
        padded = torch.zeros(len(encoded), length, dtype=torch.long)
        for row, ids in enumerate(encoded):
            padded[row, : len(ids)] = torch.tensor(ids)
        return padded

    def too_long(self, captions: Sequence[str]) -> int:
        """How many of the captions lose their end."""
        return sum(len(self.tokenizer.encode(caption)) + 2 > self.context_length for caption in captions)


def choose_caption(row: Row, captions: Captions, seed: int, step: int) -> str:
    """The reference of an image that a step learns: a pure function of (seed, step, image id)."""
    return row["references"][caption_index(row, captions, seed, step)]


def caption_index(row: Row, captions: Captions, seed: int, step: int) -> int:
    """Which reference ``choose_caption`` takes."""
    return 0 if captions == "first" else _drawn(row["references"], row, seed, step, "caption")


def _drawn(items: Sequence[Any], row: Row, seed: int, step: int, what: str) -> int:
    return int(row_generator(seed, step, f"{what}/{row['image_id']}").integers(len(items)))


def triplet_texts(triplets: Sequence[Triplet | None], tokens: TokenCache) -> tuple[dict[str, list[str]], Tensor]:
    """``base``, ``positive`` and ``negative`` of B triplets, and which of them count, [B] of 1 and 0.

    One that is not there, or does not fit the context (cut, its texts would be equal), does not count; its texts are
    empty.
    """
    fits = [triplet is not None and not tokens.too_long(triplet) for triplet in triplets]
    kept = [triplet if fit and triplet else Triplet("", "", "") for triplet, fit in zip(triplets, fits, strict=True)]
    columns = {name: [getattr(triplet, name) for triplet in kept] for name in Triplet._fields}
    return columns, torch.tensor(fits, dtype=torch.float32)


def plain_form(caption: str) -> str:
    """A caption as a word-level captioner writes it: lower-case words of the caption tokeniser, no punctuation."""
    return " ".join(tokenize(caption))


def _formed(captions: Sequence[str], plain: Sequence[bool]) -> list[str]:
    return [plain_form(caption) if own else caption for caption, own in zip(captions, plain, strict=True)]


class PairCollate:
    """(Row, step) pairs to a ``PairBatch``, on the CPU.

    Args:
        pixels: prepares images; None leaves them out (a text tower alone).
        tokens: prepares captions; None leaves their ids out (an image tower alone).
        captions: which reference a step learns.
        augmentations: names of ``augment``: another random view of an image at every step.
        seed: of these choices.
        short: from (row, caption, step) to a short caption, the input ``text_short``; None leaves it out.
        triplets: from a step to the triplets of its images, the inputs ``text_base``, ``text_positive`` and
            ``text_negative``; None leaves them out.
        positives: which positives to add: ``image`` the image that was generated for the chosen caption, the input
            ``image_generated``; ``text`` a random caption that was generated for the image, the input
            ``text_generated``.
        plain_captions: share of (image, step) whose texts are in the form that a word-level captioner writes, in
            [0, 1]; which ones is a pure function of (seed, step, image id).
    """

    def __init__(
        self,
        pixels: PixelCache | None,
        tokens: TokenCache | None,
        captions: Captions = "random",
        augmentations: Sequence[str] = (),
        seed: int = 0,
        short: Callable[[Row, str, int], str] | None = None,
        triplets: Callable[[int], Mapping[str, Triplet | None]] | None = None,
        plain_captions: float = 0.0,
        positives: Collection[Literal["image", "text"]] = (),
    ) -> None:
        self.pixels, self.tokens, self.captions = pixels, tokens, captions
        self.augmentations, self.seed = tuple(augmentations), seed
        self.short, self.triplets, self.plain_captions = short, triplets, plain_captions
        self.positives = frozenset(positives)

    def __call__(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        """Make a batch."""
        chosen = [choose_caption(row, self.captions, self.seed, step) for row, step in items]
        plain = [self._is_plain(row, step) for row, step in items]
        inputs = {}
        if self.pixels is not None:
            inputs["image"] = torch.stack([self._view(row["image_id"], row["image"], step) for row, step in items])
            if "image" in self.positives:
                inputs["image_generated"] = torch.stack([self._generated_view(row, step) for row, step in items])
        if self.tokens is not None:
            inputs["text"] = self.tokens(_formed(chosen, plain))
            if "text" in self.positives:
                inputs["text_generated"] = self.tokens(_formed([self._generated(*item) for item in items], plain))
        targets: dict[str, Tensor] = {}
        if self.tokens is not None and self.short is not None:
            shorts = [self.short(row, caption, step) for (row, step), caption in zip(items, chosen, strict=True)]
            inputs["text_short"] = self.tokens(_formed(shorts, plain))
        if self.tokens is not None and self.triplets is not None:
            found = [self.triplets(step)[row["image_id"]] for row, step in items]
            texts, targets["triplet"] = triplet_texts(found, self.tokens)
            for name, column in texts.items():
                inputs[f"text_{name}"] = self.tokens(_formed(column, plain), keep=False)
        return PairBatch([row for row, _ in items], inputs, chosen, targets)

    def _is_plain(self, row: Row, step: int) -> bool:
        if not self.plain_captions:
            return False
        return float(row_generator(self.seed, step, f"plain/{row['image_id']}").random()) < self.plain_captions

    def _view(self, image_id: str, source: ImageSource, step: int) -> Tensor:
        assert self.pixels is not None
        pixels = self.pixels.pixels_of(image_id, source)
        if not self.augmentations:
            return pixels
        return augment(pixels, self.augmentations, self.seed, step, image_id)

    def _generated_view(self, row: Row, step: int) -> Tensor:
        place = caption_index(row, self.captions, self.seed, step)
        return self._view(f"{row['image_id']}/generated/{place}", row["positive_images"][place], step)

    def _generated(self, row: Row, step: int) -> str:
        captions = row["positive_captions"]
        return captions[_drawn(captions, row, self.seed, step, "generated")]
