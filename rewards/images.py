"""Image sources (a path, a PIL image, an object that draws one; lists of them for videos): opening, size, hashes."""

import contextlib
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from PIL import ExifTags, Image, ImageOps

from rewards.base import RewardError, naming

T = TypeVar("T")
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
"""Suffixes, in lower case, of the files in a folder that count as images."""
UNREADABLE = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, ZeroDivisionError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""What Pillow's decoders raise on damaged files."""


@runtime_checkable
class Renderable(Protocol):
    """An image that is drawn when it is needed, such as a generated scene. It has to be picklable, for data loaders.

    It may also have a method ``identity() -> str``: a cache key that is cheaper than drawing the image
    (``rewards.videos`` has one).
    """

    def render(self) -> Image.Image:
        """Draw the image."""
        ...


ImageSource: TypeAlias = str | Path | Image.Image | Renderable
Frames: TypeAlias = list[ImageSource] | tuple[ImageSource, ...]
"""The frames of a video, at least one."""


def frames_of(source: ImageSource | Frames) -> Frames:
    """The frames of a video; an image counts as a video of one frame. Raises ``RewardError`` for an empty list."""
    if isinstance(source, list | tuple) and not source:
        raise RewardError("a video has no frame: expected a list of at least one image")
    return source if isinstance(source, list | tuple) else [source]


def open_image(source: ImageSource | Frames, *, own_mode: bool = False) -> Image.Image:
    """Decode or draw an image: RGB, turned as its EXIF orientation says, the first frame of an animated file.

    16-bit grey becomes 8-bit by its full range (65535 is white); transparency is dropped. Unreadable EXIF data count as
    absent. With ``own_mode``, an 8-bit image keeps its mode (``P``, ``RGBA``, ...). The result is a new image.

    Raises:
        RewardError: the file does not exist, is no regular file or no image, is damaged, is larger than
            ``PIL.Image.MAX_IMAGE_PIXELS`` allows, or has numbers of an unknown range; or ``source`` is several frames.
    """
    if isinstance(source, str | Path):
        with image_file(source) as image:
            return _upright(image, own_mode)
    if isinstance(source, Image.Image):
        with _naming(f"{source!r:.200}"):
            return _upright(source, own_mode)
    if isinstance(source, Renderable):
        return open_image(source.render(), own_mode=own_mode)
    if isinstance(source, list | tuple):
        raise RewardError(f"{source!r:.80} is a video of {len(source)} frames: expected one image")
    raise RewardError(f"{source!r:.80} is not an image: expected a path, a PIL image or an object with render()")


@contextlib.contextmanager
def image_file(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file without decoding it. Raises as ``open_image``, also for what fails inside the block."""
    with _naming(repr(str(path))):
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe or a device might never end
            raise ValueError("it is not a file")
        with Image.open(path) as image:
            yield image


def image_size(path: str | Path) -> tuple[int, int]:
    """Width and height of what ``open_image`` returns for a file, in most formats without decoding it."""
    with image_file(path) as image:
        if image.format == "TIFF":  # Pillow's versions differ in whether its size is that before or after turning
            return ImageOps.exif_transpose(image).size
        width, height = image.size
        try:
            turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        except UNREADABLE:
            turned = False
        return (height, width) if turned else (width, height)


def image_identity(source: ImageSource | Frames) -> str:
    """Cache key of an image or video: equal images have equal keys, and the order of frames does not matter.

    The key of a file is its absolute path, size and modification time in nanoseconds, so the file is not read. The key
    of any other image is its ``identity()`` or, without one, a hash of its pixels, for which a scene is drawn. The
    column ``image_id`` is not used, because two datasets may have the same ids.

    Raises:
        RewardError: a file does not exist, or ``source`` is not an image; for a video, with the index of the frame.
    """
    frames = frames_of(source)
    if len(frames) > 1:
        keys = sorted(_of_frame(index, frame, image_identity) for index, frame in enumerate(frames))
        return "frames:" + hashlib.blake2b("\n".join(keys).encode(), digest_size=16).hexdigest()
    (frame,) = frames
    if isinstance(frame, str | Path):
        size, changed = file_stamp(frame, "image")
        # "oriented" tells apart embeddings that older versions computed without applying the EXIF orientation.
        return f"oriented file:{os.path.abspath(frame)}:{size}:{changed}"
    if hasattr(frame, "identity"):
        return str(frame.identity())
    image = open_image(frame, own_mode=True)  # the mode matters: images are resized in their own
    # Resized colours are weighted by their opacity.
    seen = image if image.mode in ("RGBA", "LA") else image.convert("RGB")
    return f"pixels:{image.mode}:{pixel_hash(seen)}"


def file_stamp(path: str | Path, kind: str) -> tuple[int, int]:
    """Size in bytes and time of the last change, in nanoseconds, of a file, which messages call ``kind``.

    Raises ``RewardError`` if there is no such file.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"{kind} {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    return status.st_size, status.st_mtime_ns


def check_frames(frames: Frames) -> None:
    """Decode every frame of a video. Raises ``RewardError`` with the index of the first that cannot be decoded."""
    for index, frame in enumerate(frames):
        _of_frame(index, frame, open_image)


def _of_frame(index: int, frame: ImageSource, read: Callable[[ImageSource], T]) -> T:
    with naming(f"frame {index} of a video", (RewardError,), RewardError):
        return read(frame)


def pixel_hash(image: Image.Image) -> str:
    """Hash of an image's pixels and size; file format and metadata do not matter. Compare images of one mode only."""
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
    """8-bit grey from more bits; Pillow's own conversion clips values at 255."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    # 32-bit integers hold 16-bit grey where the file is a PGM, or where one is above 255.
    if image.mode == "F" or (image.mode == "I" and not (low >= 0 and 255 < high <= 65535) and image.format != "PPM"):
        raise ValueError(
            f"its mode is {image.mode}, with values from {low} to {high}, of which black and white are not known; "
            "expected 8 or 16 bits per channel"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
