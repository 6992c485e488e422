"""Image sources (a path, a PIL image, an object that draws one): opening them as RGB, size, hash of the pixels."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from PIL import ExifTags, Image, ImageOps

from rewards.base import RewardError

UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow's decoders raise on damaged files."""


@runtime_checkable
class Renderable(Protocol):
    """An image that is drawn when it is needed (a generated scene). Picklable, so that loader workers can draw it."""

    def render(self) -> Image.Image:
        """Draw the image."""
        ...


ImageSource: TypeAlias = str | Path | Image.Image | Renderable


def open_image(source: ImageSource, *, own_mode: bool = False) -> Image.Image:
    """Open, draw or convert an image: RGB, its EXIF orientation applied, of an animation the first frame.

    16-bit grey becomes 8-bit by its whole range (65535 is white); transparency is dropped. EXIF data that cannot be
    read count as absent. With ``own_mode``, an image of 8 bits keeps its mode (``P``, ``RGBA``, ...).

    Returns:
        A new image, decoded.

    Raises:
        RewardError: there is no such file, or it is not a file, not an image, damaged, larger than
            ``PIL.Image.MAX_IMAGE_PIXELS`` allows, or of numbers whose range is not known; the message names it.
    """
    if isinstance(source, str | Path):
        with image_file(source) as image:
            return _upright(image, own_mode)
    if isinstance(source, Image.Image):
        with _naming(f"{source!r:.200}"):
            return _upright(source, own_mode)
    if isinstance(source, Renderable):
        return open_image(source.render(), own_mode=own_mode)
    raise RewardError(f"{source!r:.80} is not an image: expected a path, a PIL image or an object with render()")


@contextlib.contextmanager
def image_file(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file without decoding it.

    Raises:
        RewardError: as ``open_image``; also for what fails inside the block.
    """
    with _naming(repr(str(path))):
        # What is no file, such as a pipe or a device, might never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a file")
        with Image.open(path) as image:
            yield image


def image_size(path: str | Path) -> tuple[int, int]:
    """Width and height of what ``open_image`` makes of a file, in most formats without decoding it. Raises as that."""
    with image_file(path) as image:
        if image.format == "TIFF":  # whether its size is that before or after turning depends on Pillow's version
            return ImageOps.exif_transpose(image).size
        width, height = image.size
        try:
            turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        except UNREADABLE:
            turned = False
        return (height, width) if turned else (width, height)


def pixel_hash(image: Image.Image) -> str:
    """Hash the pixels and the size of an RGB image: equal for copies, whatever the file format or metadata."""
    size = f"{image.width}x{image.height}".encode()[:16]
    return hashlib.blake2b(image.tobytes(), digest_size=16, person=size).hexdigest()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RewardError(f"image {name} cannot be read: {reason or type(error).__name__}") from error


def _upright(image: Image.Image, own_mode: bool) -> Image.Image:
    image.load()
    try:
        image = ImageOps.exif_transpose(image)
    except UNREADABLE:  # it is decoded already, so this is the EXIF data's
        image = image.copy()
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    return image if own_mode or image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits; Pillow's own conversion would cut values off at 255."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    # 32-bit integers hold 16-bit grey where the file is a PGM, or where one is above 255.
    if image.mode == "F" or (image.mode == "I" and not (low >= 0 and 255 < high <= 65535) and image.format != "PPM"):
        raise ValueError(
            f"its mode is {image.mode}, with values from {low} to {high}, of which black and white are not known; "
            "expected 8 or 16 bits per channel"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
