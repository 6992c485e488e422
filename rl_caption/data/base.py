"""Rows, splits and images: what every data format provides and everything else consumes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, TypeVar, overload

from PIL import Image

from rewards.base import RewardError
from rewards.images import Frames, ImageSource, frames_of, open_image
from rl_caption.errors import UserError

AnyRow = TypeVar("AnyRow", bound=Mapping[str, Any])
SHOWN = 3
"""Offenders that a message names."""
ImageSize = tuple[float, float]
"""Width and height in pixels."""
COLUMNS = ("references", "image_id", "image")
"""Columns of rows that rewards may use (``rewards.base.Reward``)."""
BY_REFERENCE = ("negatives", "positive_images")
"""Columns of rows with an entry for each reference, in their order."""


class DataError(UserError, ValueError):
    """A dataset cannot be used as it is; the message names the file, the row, the value, and what would be right."""


class Row(TypedDict):
    """One image with its captions."""

    image_id: str
    """Different for all rows of a split."""
    image: NotRequired[ImageSource | Frames]
    """A path, a PIL image, or an object that draws one; of a video its frames, a list or tuple of these. Absent only
    where the data are captions alone (``data.format: captions``)."""
    references: list[str]
    """Captions as people wrote them, untokenised. Empty only where captions are not known (inference), or the data are
    images alone (``data.format: images``)."""
    size: NotRequired[ImageSize]
    """Width and height of the image in pixels, where the file says it."""
    prompt: NotRequired[str]
    """What a caption of this image goes on from, where the data has prompts."""
    features: NotRequired[Any]
    """The image's region features (``ImageFeatures``, or the path of their file), where the captioner reads those."""
    scene: NotRequired[Any]
    """The generated scene behind the image, where the truth is known (``data.format: scenes``)."""
    long_reference: NotRequired[str]
    """One long description, where the data has one."""
    positive_captions: NotRequired[list[str]]
    """Captions that were generated for the image."""
    positive_images: NotRequired[list[ImageSource]]
    """Images that were generated for the references, in their order."""
    negatives: NotRequired[list[list[str]]]
    """False captions of the image, a list for each reference."""
    target: NotRequired[float]
    """What a text model learns to say of the one reference (``data.format: caption_targets``)."""
    short_references: NotRequired[list[str]]
    """The captions that people wrote, where ``references`` is the long description (``data.long_captions``)."""


class DataModule(Protocol):
    """A dataset with named splits. ``split`` is cheap: images are opened (or drawn) only when they are loaded."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, such as ``("train", "val", "test")``."""
        ...

    def split(self, name: str) -> Sequence[Row]:
        """Return the rows of one split, always in the same order. Raises ``DataError`` for an unknown name."""
        ...


class RowView(Sequence[Row]):
    """Rows made of the items of another sequence, each when it is asked for.

    ``make`` is called with the index of an item and the item; ``indices`` are those to take, in order (None: all).
    """

    def __init__(
        self, items: Sequence[Any], make: Callable[[int, Any], Row], indices: Sequence[int] | None = None
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
    """Rows by split, a ``DataModule``; ``source`` is the file or folder that they come from, for messages."""

    def __init__(self, rows: Mapping[str, Sequence[Row]], source: str | Path) -> None:
        self._rows, self._source = rows, source

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, ``train`` first."""
        return tuple(self._rows)

    def split(self, name: str) -> Sequence[Row]:
        """Return the rows of one split, always in the same order. Raises ``DataError`` for an unknown name."""
        if name not in self._rows:
            raise DataError(f"no split {name!r} in {self._source}: it has {', '.join(self._rows)}")
        return self._rows[name]


def load_image(source: ImageSource | Frames) -> Image.Image:
    """``rewards.images.open_image``; where that raises ``RewardError``, this raises ``DataError``."""
    try:
        return open_image(source)
    except RewardError as error:
        raise DataError(str(error)) from error


def thumbnail(source: ImageSource | Frames, side: int) -> Image.Image:
    """An image as a report shows it, at most ``side`` pixels wide and high; of a video its frames side by side.

    Raises ``DataError`` as ``load_image``.
    """
    frames = [load_image(frame) for frame in frames_of(source)]
    for frame in frames:
        frame.thumbnail((side, side))
    strip = Image.new("RGB", (sum(frame.width for frame in frames), max(frame.height for frame in frames)))
    left = 0
    for frame in frames:
        strip.paste(frame, (left, 0))
        left += frame.width
    return strip


def with_references(row: AnyRow, chosen: Sequence[int]) -> AnyRow:
    """A row with those of its references alone, by ascending index, and what goes with them (``BY_REFERENCE``)."""
    lists = {name: row[name] for name in ("references", *BY_REFERENCE) if isinstance(row.get(name), list)}
    made: Any = {**row, **{name: [own[index] for index in chosen if index < len(own)] for name, own in lists.items()}}
    return made  # type: ignore[no-any-return]


def reward_inputs(
    rows: Sequence[Mapping[str, Any]], finished: Sequence[bool] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """N prompts and the columns for a call of a reward on N rows, one for each caption.

    A prompt that is not there is "". Columns are those of ``COLUMNS`` that every row has, and ``finished``, whether
    each caption ended with EOS, where it is given (left out, it means all).
    """
    columns: dict[str, Any] = {
        name: [row[name] for row in rows] for name in COLUMNS if all(name in row for row in rows)
    }
    if finished is not None:
        columns["finished"] = list(finished)
    return [row.get("prompt", "") for row in rows], columns
