"""Rows, splits and images: the interface between the data formats and the rest of the package."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, TypeVar, overload

from PIL import Image

from rewards.base import RewardError
from rewards.images import Frames, ImageSource, frames_of, open_image
from rewards.language.caption_qa import ImageQuestion
from rewards.videos import VideoFrame
from rl_caption.runtime.errors import UserError

AnyRow = TypeVar("AnyRow", bound=Mapping[str, Any])
SHOWN = 3
"""How many offending rows or files an error message names."""
ImageSize = tuple[float, float]
"""Width and height in pixels."""
COLUMNS = ("references", "image_id", "image", "questions")
"""Columns of rows that rewards may use (``rewards.base.Reward``)."""
BY_REFERENCE = ("negatives", "positive_images")
"""Columns that hold one entry per reference, in the order of ``references``."""


class DataError(UserError, ValueError):
    """A dataset cannot be used as it is. The message names file, row and value, and says what is
    expected.
    """


class Row(TypedDict):
    """One image with its captions."""

    image_id: str
    """Unique within a split."""
    image: NotRequired[ImageSource | Frames]
    """A path, a PIL image, or an object with ``render()``; for a video, a list or tuple of frames,
    each one of these. Absent only in datasets of captions without images (``data.format:
    captions``).
    """
    references: list[str]
    """Untokenised captions written by people. Empty only for inference, and in datasets of images
    without captions (``data.format: images``).
    """
    size: NotRequired[ImageSize]
    """Width and height of the image in pixels, where the dataset file has them."""
    prompt: NotRequired[str]
    """Text that the caption continues, where the data has prompts."""
    features: NotRequired[Any]
    """Region features of the image (``ImageFeatures``, or the path of their file), for captioners
    that read regions.
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


class DataModule(Protocol):
    """A dataset with named splits. ``split`` is cheap: it does not open (or render) images."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, such as ``("train", "val", "test")``."""
        ...

    def split(self, name: str) -> Sequence[Row]:
        """Return the rows of one split, always in the same order. Raises ``DataError`` for an
        unknown name.
        """
        ...


class RowView(Sequence[Row]):
    """A lazy sequence of rows: ``make(index, item)`` turns an item of ``items`` into a row whenever
    it is accessed.

    ``indices`` selects items, in this order (None: all).
    """

    def __init__(
        self,
        items: Sequence[Any],
        make: Callable[[int, Any], Row],
        indices: Sequence[int] | None = None,
    ) -> None:
        self._items, self._make = items, make
        self._indices = range(len(items)) if indices is None else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return RowView(self._items, self._make, self._indices[index])
        chosen = self._indices[index]
        return self._make(chosen, self._items[chosen])


class Splits:
    """A ``DataModule`` over rows by split. ``source`` is the file or folder that error messages
    name.
    """

    def __init__(self, rows: Mapping[str, Sequence[Row]], source: str | Path) -> None:
        self._rows, self._source = rows, source

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._rows)

    def split(self, name: str) -> Sequence[Row]:
        """Return the rows of one split, always in the same order. Raises ``DataError`` for an
        unknown name.
        """
        if name not in self._rows:
            raise DataError(f"no split {name!r} in {self._source}: it has {', '.join(self._rows)}")
        return self._rows[name]


def load_image(source: ImageSource | Frames) -> Image.Image:
    """Open an image with ``rewards.images.open_image``. Raises ``DataError`` instead of
    ``RewardError``.
    """
    try:
        return open_image(source)
    except RewardError as error:
        raise DataError(str(error)) from error


def pixel_key(image_id: str, source: ImageSource | Frames) -> tuple[str, tuple[Any, ...]]:
    """Key of an image or video in a cache of pixels: its id and, as ids are unique within a split
    only, its files.
    """
    frames = source if isinstance(source, list | tuple) else [source]
    return image_id, tuple(frame for frame in frames if isinstance(frame, str | Path | VideoFrame))


def thumbnail(source: ImageSource | Frames, side: int) -> Image.Image:
    """Shrink an image to at most ``side`` by ``side`` pixels; the frames of a video are put side by
    side.

    Raises ``DataError`` where the image cannot be opened.
    """
    frames = [load_image(frame) for frame in frames_of(source)]
    for frame in frames:
        frame.thumbnail((side, side))
    strip = Image.new(
        "RGB", (sum(frame.width for frame in frames), max(frame.height for frame in frames))
    )
    left = 0
    for frame in frames:
        strip.paste(frame, (left, 0))
        left += frame.width
    return strip


def with_references(row: AnyRow, chosen: Sequence[int]) -> AnyRow:
    """Copy a row with only the ``chosen`` references (ascending indices) and their entries in
    ``BY_REFERENCE``.
    """
    lists = {
        name: row[name] for name in ("references", *BY_REFERENCE) if isinstance(row.get(name), list)
    }
    copy: Any = {
        **row,
        **{
            name: [entries[index] for index in chosen if index < len(entries)]
            for name, entries in lists.items()
        },
    }
    return copy  # type: ignore[no-any-return]


def reward_inputs(
    rows: Sequence[Mapping[str, Any]], finished: Sequence[bool] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Prompts and columns to call a reward with, for N captions and their N rows.

    A row without a prompt gets "". The columns are those of ``COLUMNS`` that all rows have, and
    ``finished`` where it
    is given: whether each caption ended with EOS. Rewards take a missing ``finished`` to mean that
    all did.
    """
    columns: dict[str, Any] = {
        name: [row[name] for row in rows] for name in COLUMNS if all(name in row for row in rows)
    }
    if finished is not None:
        columns["finished"] = list(finished)
    return [row.get("prompt", "") for row in rows], columns
