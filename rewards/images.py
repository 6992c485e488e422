"""Image sources (a path, a PIL image, an object that draws one; lists of them for
videos): listing, opening, hashes.
"""

import contextlib
import hashlib
import os
import struct
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from PIL import Image, ImageOps

from rewards.base import RewardError, naming

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
)
"""Suffixes, in lower case, of the files in a folder that count as images (``list_images``)."""
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)
"""Exceptions of Pillow's decoders for damaged files."""


@runtime_checkable
class Renderable(Protocol):
    """An image that is drawn when it is needed, such as a generated scene. It has to be
    picklable, for data loaders.

    It may also have a method ``identity() -> str``, a cache key that is cheaper than
    drawing the image (``rewards.videos`` has one).
    """

    def render(self) -> Image.Image:
        """Draw the image."""
        ...


ImageSource: TypeAlias = str | Path | Image.Image | Renderable
Frames: TypeAlias = list[ImageSource] | tuple[ImageSource, ...]
"""The frames of a video, at least one."""


def list_images(folder: str | Path, *, recursive: bool = True) -> Iterator[Path]:
    """Yield the images in a folder: files with one of ``IMAGE_SUFFIXES`` whose name
    does not begin with a dot.

    Each folder's files come sorted by name and before its subfolders (``recursive``),
    which are sorted, too; hidden folders are left out, links are followed. Raises
    ``OSError`` where a folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        """Raise what ``os.walk`` would pass over."""
        raise error

    for path, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(
            name for name in folders if recursive and not name.startswith(".")
        )
        for name in sorted(names):
            if (
                not name.startswith(".")
                and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
            ):
                yield Path(path, name)


def frames_of(source: ImageSource | Frames) -> Frames:
    """The frames of a video; an image counts as a video of one frame. Raises
    ``RewardError`` for an empty list.
    """
    if isinstance(source, list | tuple) and not source:
        raise RewardError("a video has no frame: expected a list of at least one image")
    return source if isinstance(source, list | tuple) else [source]


def open_image(source: ImageSource | Frames, *, own_mode: bool = False) -> Image.Image:
    """Decode or draw an image: RGB, turned as its EXIF orientation says, the first
    frame of an animated file.

    16-bit grey becomes 8-bit by its full range (65535 is white); transparency is
    dropped. Unreadable EXIF data count as absent. With ``own_mode``, an 8-bit image
    keeps its mode (``P``, ``RGBA``, ...). The result is a new image.

    Raises:
        RewardError: the file does not exist, is no image, is damaged, is larger than
            ``PIL.Image.MAX_IMAGE_PIXELS`` allows, or has pixel values of an unknown
            range; or ``source`` is several frames.
    """
    if isinstance(source, Image.Image):
        with naming(f"image {source!r:.200} cannot be read", UNREADABLE, RewardError):
            return _upright(source, own_mode)
    if isinstance(source, Renderable):
        return open_image(source.render(), own_mode=own_mode)
    if isinstance(source, list | tuple):
        raise RewardError(
            f"{source!r:.80} is a video of {len(source)} frames: expected one image"
        )
    with image_file(source) as image:
        return _upright(image, own_mode)


@contextlib.contextmanager
def image_file(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file without decoding it. Raises as ``open_image``, also for what
    fails inside the block.
    """
    with (
        naming(f"image {str(path)!r} cannot be read", UNREADABLE, RewardError),
        Image.open(path) as image,
    ):
        yield image


def image_identity(source: ImageSource | Frames) -> str:
    """Cache key of an image or video: equal images have equal keys, and the order of
    frames does not matter.

    The key of a file is a hash of its content (``file_hash``), so that a file that was
    replaced has another key, and a copy has the same. The key of any other image is its
    ``identity()`` or, without one, a hash of its pixels, for which a scene is drawn.
    The column ``image_id`` is not used, because two datasets may have the same ids.

    Raises ``OSError`` where a file cannot be read.
    """
    frames = frames_of(source)
    if len(frames) > 1:
        keys = sorted(map(image_identity, frames))
        return (
            "frames:"
            + hashlib.blake2b("\n".join(keys).encode(), digest_size=16).hexdigest()
        )
    (frame,) = frames
    if isinstance(frame, str | Path):
        return f"content:{file_hash(frame)}"
    if hasattr(frame, "identity"):
        return str(frame.identity())
    image = open_image(
        frame, own_mode=True
    )  # the mode matters: images are resized in their own
    # Resized colours are weighted by their opacity.
    seen = image if image.mode in ("RGBA", "LA") else image.convert("RGB")
    return f"pixels:{image.mode}:{pixel_hash(seen)}"


def file_stamp(path: str | Path) -> tuple[int, int, int, int]:
    """Stamp of a file, which changes when the file is replaced or written to. Raises
    ``OSError`` where there is no such file.

    Returns:
        Size in bytes, times of the last change of the content and of the file's status in
        nanoseconds, inode. Whoever replaces a file can restore the first time (``cp -p``, ``rsync
        -t``), but not the second.
    """
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def file_hash(path: str | Path) -> str:
    """Hash of the content of a file. Raises ``OSError`` where it cannot be read.

    Hashes are cached by path and ``file_stamp``, so that a process reads an unchanged
    file once.
    """
    stamp = file_stamp(path)
    # The clock of a file system ticks coarsely: two changes in one tick have the same time.
    settled = time.time_ns() - max(stamp[1:3]) > 2 * 10**9
    return (_file_hash if settled else _file_hash.__wrapped__)(
        os.path.abspath(path), stamp
    )


@lru_cache(maxsize=1 << 18)
def _file_hash(path: str, stamp: tuple[int, int, int, int]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=16)
        ).hexdigest()


def check_frames(frames: Frames) -> None:
    """Decode every frame of a video. Raises ``RewardError`` with the index of the first
    frame that cannot be decoded.
    """
    for index, frame in enumerate(frames):
        with naming(f"frame {index} of a video", (RewardError,), RewardError):
            open_image(frame)


def pixel_hash(image: Image.Image) -> str:
    """Hash of an image's pixels and size; file format and metadata do not matter.
    Compare images of one mode only.
    """
    size = f"{image.width}x{image.height}".encode()[:16]
    return hashlib.blake2b(image.tobytes(), digest_size=16, person=size).hexdigest()


def _upright(image: Image.Image, own_mode: bool) -> Image.Image:
    image.load()
    try:
        image = ImageOps.exif_transpose(image)
    except UNREADABLE:  # the image is decoded already: the error is in the EXIF data
        image = image.copy()
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bits(image)
    return image if own_mode or image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """8-bit grey from more bits; Pillow's own conversion clips values at 255."""
    values = np.asarray(image)
    low = values.min()
    high = values.max()
    # 32-bit integers hold 16-bit grey where the file is a PGM, or where one is above 255.
    if image.mode == "F" or (
        image.mode == "I"
        and not (low >= 0 and 255 < high <= 65535)
        and image.format != "PPM"
    ):
        raise ValueError(
            f"its mode is {image.mode}, with values from {low} to {high}, and it does not "
            "say which are black and white: expected 8 or 16 bits per channel"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
