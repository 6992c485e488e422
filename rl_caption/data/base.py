"""Rows, splits and images: the interface between the data formats and the rest of the package."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from PIL import Image
from typing_extensions import TypedDict

from rewards.base import RewardError, naming
from rewards.images import (
    UNREADABLE,
    Frames,
    ImageSource,
    image_identity,
    open_image,
    pixel_hash,
)
from rewards.language.caption_qa import ImageQuestion
from rewards.videos import VideoFrame
from rl_caption.runtime.errors import UserError

SHOWN = 3
"""Number of offending rows or files that an error message names."""
COLUMNS = ("references", "image_id", "image", "questions")
"""Columns of rows that rewards may use (``rewards.base.Reward``)."""
BY_REFERENCE = ("negatives", "positive_images")
"""Columns that hold one entry per reference, in the order of ``references``."""


class DataError(UserError, ValueError):
    """A dataset cannot be used as it is. The message names file, row and value, and
    says what is expected.
    """


class Row(TypedDict):
    """One image with its captions."""

    image_id: str
    """Unique within a split."""
    image: NotRequired[ImageSource | Frames]
    """A path, a PIL image, or an object with ``render()``; for a video, a list or tuple
    of frames, each one of these. Absent only in datasets of captions without images
    (``data.format: captions``).
    """
    references: list[str]
    """Untokenised captions written by people. Empty only for inference, and in datasets
    of images without captions (``data.format: images``).
    """
    prompt: NotRequired[str]
    """Text that the caption continues, where the data has prompts."""
    features: NotRequired[Any]
    """Region features of the image (``ImageFeatures``, or the path of their file), for
    captioners that read regions.
    """
    scene: NotRequired[Any]
    """The generated scene that the image shows (``data.format: scenes``)."""
    long_reference: NotRequired[str]
    """A detailed description of the image, where the data has one."""
    positive_captions: NotRequired[list[str]]
    """True captions of the image that were generated, not written by people."""
    positive_images: NotRequired[list[ImageSource]]
    """Generated images, one per reference, in the order of ``references``."""
    negatives: NotRequired[list[list[str]]]
    """False captions (hard negatives) of the image, one list per reference."""
    questions: NotRequired[list[ImageQuestion]]
    """Multiple-choice questions about the image, for the reward ``caption_qa``."""
    target: NotRequired[float]
    """Regression target of the single reference (``data.format: caption_targets``)."""
    short_references: NotRequired[list[str]]
    """The original ``references``, where the long description replaced them
    (``data.long_captions``).
    """


class RowView(Sequence[Row]):
    """A lazy sequence of rows: ``make`` turns an item of ``items`` into a row whenever
    it is accessed.
    """

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Row]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        """A row, or a view of the rows of a slice."""
        item = self._items[index]
        is_slice = isinstance(index, slice)
        return RowView(item, self._make) if is_slice else self._make(item)


class Splits(dict[str, Sequence[Row]]):
    """The rows of a dataset by split, always in the same order. No image is open.

    ``source`` is the file or folder that messages name. An unknown split is a ``DataError``.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]],
        source: str | Path = "",
    ) -> None:
        super().__init__(rows)
        self.source = source

    def __missing__(self, name: str) -> Sequence[Row]:
        raise DataError(f"no split {name!r} in {self.source}: it has {', '.join(self)}")


@dataclass(frozen=True)
class LazyImage:
    """An image that is read and decoded when it is used, from bytes or from a table.

    Args:
        where: the place of its row, for errors.
        source: the bytes of a file, or a table of ``datasets`` with one column of images.
        row: number of the row in the table.
    """

    where: str = field(compare=False)
    source: Any = field(repr=False)
    row: int = 0

    def read(self) -> str | bytes:
        """The bytes of the file, or its path."""
        if isinstance(self.source, bytes):
            return self.source
        (value,) = self.source[self.row].values()
        return value if isinstance(value, bytes) else value["bytes"] or value["path"]

    def render(self) -> Image.Image:
        """Decode it. Raises ``RewardError``, which names the row."""
        with naming(self.where, (*UNREADABLE, RewardError), RewardError):
            content: Any = self.read()
            if isinstance(content, bytes):
                content = Image.open(io.BytesIO(content))
            return open_image(content, own_mode=True)

    def identity(self) -> str:
        """Key of the image in caches: a hash of its file's content."""
        content = self.read()
        if isinstance(content, str):
            return image_identity(content)
        return hashlib.blake2b(content).hexdigest()

    stamp = identity

    def check(self) -> str:
        """Decode it and return a hash of its pixels. Raises ``RewardError``."""
        return pixel_hash(open_image(self))


def load_image(source: ImageSource | Frames) -> Image.Image:
    """Open an image with ``rewards.images.open_image``. Raises ``DataError`` instead of
    ``RewardError``.
    """
    try:
        return open_image(source)
    except RewardError as error:
        raise DataError(str(error)) from error


def pixel_key(
    image_id: str, source: ImageSource | Frames
) -> tuple[str, tuple[Any, ...]]:
    """Key of an image or video in a cache of pixels: its id and, as ids are unique
    within a split only, its files.
    """
    frames = source if isinstance(source, list | tuple) else [source]
    return image_id, tuple(
        frame for frame in frames if isinstance(frame, str | Path | VideoFrame)
    )


def with_references(row: Any, chosen: Sequence[int]) -> Any:
    """Copy a row with only the ``chosen`` references (ascending indices) and their
    entries in ``BY_REFERENCE``.
    """
    copy = dict(row)
    for name in ("references", *BY_REFERENCE):
        entries = row.get(name)
        if isinstance(entries, list):
            copy[name] = [entries[index] for index in chosen if index < len(entries)]
    return copy


def reward_inputs(
    rows: Sequence[Mapping[str, Any]], finished: Sequence[bool] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Prompts and columns to call a reward with, for N captions and their N rows.

    A row without a prompt gets "". The columns are the ``COLUMNS`` that all rows have,
    and ``finished`` where it is given: whether each caption ended with EOS. Without
    ``finished``, rewards assume that all captions did.
    """
    columns: dict[str, Any] = {
        name: [row[name] for row in rows]
        for name in COLUMNS
        if all(name in row for row in rows)
    }
    if finished is not None:
        columns["finished"] = list(finished)
    return [row.get("prompt", "") for row in rows], columns
