"""Rows, splits and images: what every data format provides and everything else consumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, Protocol, TypedDict

from PIL import Image

from rewards.base import RewardError
from rewards.images import ImageSource, open_image


class DataError(ValueError):
    """A dataset cannot be used as it is; the message names the file, the row, the value, and what would be right."""


class Row(TypedDict):
    """One image with its captions."""

    image_id: str
    image: ImageSource
    references: list[str]
    """Captions as people wrote them, untokenised. Empty only where captions are not known (inference)."""
    prompt: NotRequired[str]
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


def load_image(source: ImageSource) -> Image.Image:
    """``rewards.images.open_image``, for data.

    Raises:
        DataError: where that raises ``RewardError``.
    """
    try:
        return open_image(source)
    except RewardError as error:
        raise DataError(str(error)) from error
