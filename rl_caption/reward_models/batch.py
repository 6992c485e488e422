"""Batches of image-caption pairs for embedding models: pixels and token ids, prepared in the loader's workers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import TextEncoder
from rewards.images import Frames, ImageSource, frames_of, open_image
from rewards.text.detail_units import detail_units_of
from rewards.text.tokenize import tokenize
from rl_caption.data.base import SHOWN, DataError, Row, pixel_key
from rl_caption.data.file_checks import ImageFile, check_image_files
from rl_caption.data.loader import augment, draw_view, row_generator, step_indices
from rl_caption.data.negatives import NegativeSource, PositiveSource
from rl_caption.data.rand_augment import rand_augment
from rl_caption.reward_models.triplets import Donor, Per, Triplet, make_triplets

T = TypeVar("T")
Captions = Literal["random", "first"]
ShortSource = Literal["first_sentence", "references"]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class PairBatch:
    """A batch of B images with one caption each; of one tower, B images or B captions alone."""

    rows: Sequence[Row]
    inputs: dict[str, Tensor]
    """Inputs of the model, each under the name of its embedding. ``image``: pixels [B, 3, S, S], of videos
    [B, T, 3, S, S]; ``text``: token ids [B, L]. Where a frozen encoder ran before training, its features instead:
    [B, R, D] of images, [B, D] of texts. Names of images start with ``image``; all others are texts."""
    captions: list[str]
    targets: dict[str, Tensor] = field(default_factory=dict)
    """Further inputs of the loss. ``triplet`` [B]: 1 where the row has a triplet, else 0. ``false`` [B, n]: 1 where the
    row has its n-th hard negative, else 0. ``image_group`` and ``text_group``, ``text_short_group``, ... [B]: numbers
    that are equal for equal images, or texts."""
    false_captions: Sequence[Sequence[str]] = ()
    """Hard negatives of the captions: n lists of B texts, "" where a caption has none."""

    def to(self, device: torch.device) -> PairBatch:
        """The batch with its tensors on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """The batch in page-locked memory, from where a GPU copies while it computes; called by the loader."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PairBatch:
        inputs = {name: change(tensor) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, targets={name: change(tensor) for name, tensor in self.targets.items()})


class PixelCache:
    """Preprocessed pixels of images. They are kept as uint8 up to ``cache_bytes``; the rest is prepared every time."""

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
            frames = [self.preprocessing.square(open_image(frame, own_mode=True)) for frame in frames_of(source)]
            square = torch.stack(frames) if isinstance(source, list | tuple) else frames[0]
            if (len(self.cached) + 1) * square.numel() <= self.cache_bytes:
                self.cached[key] = square
        return square

    def of(self, row: Row) -> Tensor:
        """The pixels of a row's image."""
        return self(row["image_id"], row["image"])


class FeatureCache:
    """Features of images by a frozen encoder, read from ``data.features_root`` and kept in memory where they fit.

    Args:
        pool: from a grid [1, R, D] to one vector [1, D] an image, which is kept; None keeps the grid, as float16.
        cache_bytes: memory for the features.
    """

    def __init__(self, pool: Callable[[Tensor], Tensor] | None, cache_bytes: int = 0) -> None:
        self.pool, self.cache_bytes = pool, cache_bytes
        self.cached: dict[str, Tensor] = {}

    def of(self, row: Row) -> Tensor:
        """Features [R, D], float32, of a row's image; R is 1 if pooled. ``DataError`` if they are unreadable."""
        key = row["features"].where
        known = self.cached.get(key)
        if known is None:
            known = torch.from_numpy(row["features"].load())
            known = known.half() if self.pool is None else self.pool(known[None])
            if (len(self.cached) + 1) * known.nbytes <= self.cache_bytes:
                self.cached[key] = known
        return known.float()


@dataclass
class Texts:
    """Turns captions into what a text tower reads: token ids, or features that a frozen encoder computed before.

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
        return ids if self.trims else pad(ids, (0, self.context_length - ids.shape[1]))

    def too_long(self, captions: Sequence[str]) -> int:
        """How many of the captions are truncated."""
        return sum(self.encoder.count_tokens(caption) > self.context_length for caption in captions)


def _draw(items: Sequence[T], row: Row, seed: int, step: int, what: str) -> T:
    """One of ``items``, a pure function of (seed, step, what, image id)."""
    return items[int(row_generator(seed, step, f"{what}/{row['image_id']}").integers(len(items)))]


def caption_index(row: Row, captions: Captions, seed: int, step: int) -> int:
    """Index of the reference that a step learns of an image: a pure function of (seed, step, image id)."""
    return 0 if captions == "first" else _draw(range(len(row["references"])), row, seed, step, "caption")


def short_caption(row: Row, caption: str, step: int, source: ShortSource, seed: int) -> str:
    """The short caption of a row in a step, for Long-CLIP's second term: a pure function of (seed, step, image id).

    ``first_sentence`` is ``caption`` up to the first full stop before a space or line end (Long-CLIP's code, which
    leaves the full stop out); ``references`` draws one of the row's ``short_references``.
    """
    if source == "first_sentence":
        head, stop, _ = caption.replace("\n", " ").partition(". ")
        return head + stop.strip()
    return _draw(row["short_references"], row, seed, step, "short")


def hard_negatives(
    source: NegativeSource, count: int, row: Row, caption: str, seed: int, step: int
) -> tuple[list[str], list[float]]:
    """``count`` false captions of a row, "" where the source has fewer; and 1 for each that it has, else 0."""
    found = source(row, caption, row_generator(seed, step, f"negatives/{row['image_id']}"))[:count]
    missing = count - len(found)
    return [text for _, text in found] + [""] * missing, [1.0] * len(found) + [0.0] * missing


def sampled_sentences(caption: str, least: int, most: int, generator: np.random.Generator) -> str:
    """``least`` to ``most`` random sentences of a caption, in their order; all of them where it has fewer."""
    sentences = _SENTENCE_END.split(caption.strip())
    count = min(int(generator.integers(least, most + 1)), len(sentences))
    return " ".join(sentences[index] for index in sorted(generator.permutation(len(sentences))[:count]))


def plain_form(caption: str) -> str:
    """A caption as a word-level captioner writes it: lower-case words of the caption tokeniser, no punctuation."""
    return " ".join(tokenize(caption))


def triplet_texts(triplets: Sequence[Triplet | None], tokens: Texts) -> tuple[dict[str, list[str]], Tensor]:
    """The texts ``base``, ``positive`` and ``negative`` of B triplets, and which triplets count, [B] of 1 and 0.

    A triplet that is None does not count, nor does one with a text longer than the context: truncated, its texts would
    be equal. The texts of both are "".
    """
    kept = [triplet if triplet is not None and not tokens.too_long(triplet) else None for triplet in triplets]
    columns = {name: [getattr(triplet, name, "") for triplet in kept] for name in Triplet._fields}
    return columns, torch.tensor([triplet is not None for triplet in kept], dtype=torch.float32)


@dataclass
class StepTriplets:
    """From a step to the triplets of its global batch: ``batch_size`` images of the training ``rows``.

    False details come from the whole global batch, or from ``donors``, so that every process and micro-batch has the
    same triplets for its rows. The other fields are those of ``PairCollate`` and ``make_triplets``.
    """

    rows: Sequence[Row]
    batch_size: int
    seed: int
    captions: Captions
    shuffle_rate: float
    per: Per
    donors: Sequence[Donor] | None = None

    def __post_init__(self) -> None:
        self._step = -1
        self._made: dict[str, Triplet | None] = {}

    def __call__(self, step: int) -> dict[str, Triplet | None]:
        """Image id -> its triplet; None where its caption has fewer than two details."""
        if step != self._step:
            order = step_indices(len(self.rows), self.batch_size, step, self.seed)
            batch = {row["image_id"]: row for row in (self.rows[index] for index in order)}
            chosen = [row["references"][caption_index(row, self.captions, self.seed, step)] for row in batch.values()]
            seed = int(row_generator(self.seed, step, "triplets").integers(2**31))
            made = make_triplets(chosen, [*batch], seed, self.shuffle_rate, self.per, self.donors)
            self._step, self._made = step, dict(zip(batch, made, strict=True))
        return self._made


def donors_of(rows: Sequence[Row]) -> list[Donor]:
    """The first reference of each row, cut into detail units that false details are taken from."""
    units = detail_units_of([row["references"][0] for row in rows])
    return [Donor(row["image_id"], own) for row, own in zip(rows, units, strict=True)]


@dataclass
class PairCollate:
    """Collate function: from B pairs (row, step) to a ``PairBatch`` on the CPU.

    Args:
        pixels: prepares images, or reads their features; None leaves images out (a text tower alone).
        tokens: prepares captions; None leaves captions out (an image tower alone).
        captions: which reference a step learns.
        augmentations: names of ``augment``, and ``rand_augment``: another random view of an image at every step.
        seed: of all random choices.
        short: source of a short caption, the input ``text_short``; None leaves it out.
        triplets: from a step to the triplets of its images, the inputs ``text_base``, ``text_positive`` and
            ``text_negative``; None leaves them out.
        plain_captions: fraction of (image, step) whose texts are in ``plain_form``, in [0, 1]; which ones is a pure
            function of (seed, step, image id).
        positives: generated positives to add. ``image``: the image that was generated for the chosen caption, as the
            input ``image_generated``; ``text``: a random caption that was generated for the image, as the input
            ``text_generated``.
        groups: add the targets ``image_group``, ``text_group`` and those of further texts.
        sentences: [least, most]: learn so many random sentences of each caption; None learns whole captions.
        negatives: source of false captions, the inputs ``text_false0`` and so on, with the target ``false``
            [B, ``num_negatives``]; None leaves them out.
        num_negatives: false captions of each caption.
        negatives_share: fraction of (image, step) that have negatives.
        paraphrases: source of paraphrases, the first of which takes the place of the caption; None has none.
        paraphrases_share: fraction of (image, step) that learn a paraphrase.
    """

    pixels: PixelCache | FeatureCache | None
    tokens: Texts | None
    captions: Captions = "random"
    augmentations: Sequence[str] = ()
    seed: int = 0
    short: ShortSource | None = None
    triplets: Callable[[int], dict[str, Triplet | None]] | None = None
    plain_captions: float = 0.0
    positives: Collection[str] = ()
    groups: bool = False
    sentences: Sequence[int] | None = None
    negatives: NegativeSource | None = None
    num_negatives: int = 0
    negatives_share: float = 1.0
    paraphrases: PositiveSource | None = None
    paraphrases_share: float = 0.0

    def __call__(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        rows = [row for row, _ in items]
        if self.tokens is None:  # rows need no captions
            return PairBatch(rows, self._images(items, []), [])
        index = [caption_index(row, self.captions, self.seed, step) for row, step in items]
        captions = [self._caption(row, own, step) for (row, step), own in zip(items, index, strict=True)]
        inputs = self._images(items, index)
        texts, targets = self._texts(items, captions, self.tokens)
        plain = [self._chance(self.plain_captions, "plain", row, step) for row, step in items]
        for name, column in texts.items():
            texts[name] = [plain_form(text) if own else text for text, own in zip(column, plain, strict=True)]
            inputs[name] = self.tokens(texts[name])
        if self.groups:
            targets["image_group"] = _groups([row["image_id"] for row in rows])
            targets |= {f"{name}_group": _groups(column) for name, column in texts.items()}
        false = [texts[f"text_false{n}"] for n in range(self.num_negatives)] if "false" in targets else []
        return PairBatch(rows, inputs, captions, targets, false)

    def _caption(self, row: Row, index: int, step: int) -> str:
        """A reference as a step learns it: some of its sentences, or a paraphrase, where these are asked for."""
        caption = row["references"][index]
        if self.sentences is not None:
            least, most = self.sentences
            draws = row_generator(self.seed, step, f"sentences/{row['image_id']}")
            caption = sampled_sentences(caption, least, most, draws)
        if self.paraphrases is not None and self._chance(self.paraphrases_share, "reworded", row, step):
            draws = row_generator(self.seed, step, f"wording/{row['image_id']}")
            caption = next(iter(self.paraphrases(row, caption, draws)), caption)
        return caption

    def _images(self, items: Sequence[tuple[Row, int]], index: Sequence[int]) -> dict[str, Tensor]:
        if self.pixels is None:
            return {}
        if isinstance(self.pixels, FeatureCache):
            # Training images alone have views: a step below 0 is validation's.
            seen = (row if step < 0 else draw_view(row, self.seed, step) for row, step in items)
            return {"image": torch.stack([self.pixels.of(row) for row in seen])}
        views = {"image": [self._view(row["image_id"], row["image"], step) for row, step in items]}
        if "image" in self.positives:
            views["image_generated"] = [
                self._view(f"{row['image_id']}/generated/{own}", row["positive_images"][own], step)
                for (row, step), own in zip(items, index, strict=True)
            ]
        return {name: torch.stack(own) for name, own in views.items()}

    def _texts(
        self, items: Sequence[tuple[Row, int]], captions: list[str], tokens: Texts
    ) -> tuple[dict[str, list[str]], dict[str, Tensor]]:
        """All texts of a batch by the name of their input, and the targets that say which of them count."""
        texts, targets = {"text": captions}, dict[str, Tensor]()
        if "text" in self.positives:
            texts["text_generated"] = [
                _draw(row["positive_captions"], row, self.seed, step, "generated") for row, step in items
            ]
        if self.short is not None:
            texts["text_short"] = [
                short_caption(row, caption, step, self.short, self.seed)
                for (row, step), caption in zip(items, captions, strict=True)
            ]
        if self.negatives is not None:
            none = [""] * self.num_negatives, [0.0] * self.num_negatives
            found = [
                hard_negatives(self.negatives, self.num_negatives, row, caption, self.seed, step)
                if self._chance(self.negatives_share, "has negatives", row, step)
                else none
                for (row, step), caption in zip(items, captions, strict=True)
            ]
            texts |= {f"text_false{n}": [own[n] for own, _ in found] for n in range(self.num_negatives)}
            targets["false"] = torch.tensor([counts for _, counts in found])
        if self.triplets is not None:
            made = [self.triplets(step)[row["image_id"]] for row, step in items]
            columns, targets["triplet"] = triplet_texts(made, tokens)
            texts |= {f"text_{name}": column for name, column in columns.items()}
        return texts, targets

    def _chance(self, share: float, what: str, row: Row, step: int) -> bool:
        """True with probability ``share``: a pure function of (seed, step, ``what``, image id)."""
        if share in (0, 1):
            return share == 1
        return float(row_generator(self.seed, step, f"{what}/{row['image_id']}").random()) < share

    def _view(self, image_id: str, source: ImageSource | Frames, step: int) -> Tensor:
        """An image as a step sees it; of a video the same view of all frames."""
        assert isinstance(self.pixels, PixelCache)
        square, views = self.pixels.square(image_id, source), []
        for frame in square if square.ndim == 4 else [square]:
            if "rand_augment" in self.augmentations:
                frame = rand_augment(frame, self.seed, step, image_id)
            pixels = self.pixels.preprocessing.normalise(frame)
            views.append(
                augment(pixels, self.augmentations, self.seed, step, image_id) if self.augmentations else pixels
            )
        return torch.stack(views) if square.ndim == 4 else views[0]


def _groups(keys: Sequence[str]) -> Tensor:
    """A number for each of B keys, equal for equal keys: 24 bits of a hash, which float32 holds exactly."""
    digests = [hashlib.blake2b(key.encode(), digest_size=3).digest() for key in keys]
    return torch.tensor([float(int.from_bytes(digest)) for digest in digests])


def check_positives(
    rows: Sequence[Row],
    wanted: Collection[str],
    captions: Captions,
    check_pixels: bool = True,
    cache: str | Path | None = None,
    split: str = "train",
) -> None:
    """Check that every row of a split has the positives that its steps may draw (docs/pac.md).

    ``wanted``: ``image`` for ``positive_images``, of which each reference that is learnt needs its own; ``text`` for
    ``positive_captions``, of which a row needs one. ``check_pixels`` and ``cache`` are those of ``check_image_files``.

    Raises:
        DataError: positives are missing, or files of images cannot be read; with the count and the first offenders.
    """
    wrong, paths = [], dict[str, str]()
    for row in rows if wanted else ():
        if "text" in wanted and not row.get("positive_captions"):
            wrong.append(f"{split} {row['image_id']!r} has no positive_captions")
        if "image" in wanted:
            images, texts = row.get("positive_images", []), len(row["references"])
            if not (1 if captions == "first" else texts) <= len(images) <= texts:
                wrong.append(f"{split} {row['image_id']!r} has {len(images)} positive_images for {texts} reference(s)")
            paths |= {str(image): row["image_id"] for image in images if isinstance(image, str | Path)}
    if wrong:
        raise DataError(
            f"{'; '.join(wrong[:SHOWN])} ({len(wrong)} in all): expected positive_captions generated for the image, "
            "and positive_images generated for its references, one each in their order (the first alone with "
            "train.captions: first). A weight of 0 (loss.positive_captions, loss.positive_images) needs none"
        )
    verdicts = check_image_files(map(ImageFile, paths), check_pixels=check_pixels, cache=cache)
    bad = [f"{split} {paths[path]!r}, {path!r}: {own.error}" for (path, _), own in verdicts.items() if own.error]
    if bad:
        raise DataError(f"{len(bad)} of {len(paths)} positive_images cannot be used: {'; '.join(bad[:SHOWN])}")
