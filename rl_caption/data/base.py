"""Rows, splits and images: what every data format provides and everything else consumes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

from PIL import Image


class DataError(ValueError):
    """A dataset cannot be used as it is; the message names the file, the row, the value, and what would be right."""


@runtime_checkable
class Renderable(Protocol):
    """An image that is drawn when it is needed (a generated scene). Picklable, so that loader workers can draw it."""

    def render(self) -> Image.Image:
        """Draw the image as RGB."""
        ...


ImageSource = str | Path | Image.Image | Renderable


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


UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow's decoders raise on damaged files, beside OSError (which UnidentifiedImageError is)."""


def load_image(source: ImageSource) -> Image.Image:
    """Open, draw or pass on an image, as RGB.

    Raises:
        DataError: the file is missing or not a readable image.
    """
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, str | Path):
        try:
            with Image.open(source) as image:
                return image.convert("RGB")
        except UNREADABLE as error:
            raise DataError(f"image {str(source)!r} cannot be read: {error}") from error
    if isinstance(source, Renderable):
        return source.render().convert("RGB")
    raise DataError(f"{type(source).__name__} is not an image: expected a path, a PIL image or a scene")
