"""Videos as a few frames: a folder of images, an animated image (GIF, WebP, ...) or a
video file (PyAV).
"""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import Image

from rewards.base import RewardError, naming
from rewards.images import (
    IMAGE_SUFFIXES,
    file_hash,
    file_stamp,
    image_file,
    image_identity,
    list_images,
    open_image,
)

KEPT = 4
"""Number of videos whose decoded frames a process caches, as a file is decoded whole
but its frames are read singly.
"""


def uniform(
    total: int, count: int, span: tuple[float, float] = (0.0, 1.0)
) -> list[int]:
    """Indices of ``count`` of ``total`` frames: the centres of equal segments, floor((i
    + 1/2) total / count).

    A video with fewer frames than ``count`` gives some of them several times. ``span``
    selects a part of the video, (start, end) as fractions of its length: the frames
    from floor(start total) up to floor(end total), at least one.
    """
    first = min(int(span[0] * total), total - 1)
    length = max(min(int(span[1] * total), total) - first, 1)
    return [first + (2 * index + 1) * length // (2 * count) for index in range(count)]


@dataclass(frozen=True)
class VideoFrame:
    """One of ``count`` uniformly sampled frames of a video: an ``ImageSource`` that is
    read when it is rendered.

    ``path`` is a folder of images in natural order of their names (2 before 10), an
    image file, animated or not (recognised by its suffix), or any video file that PyAV
    decodes (needs the extra ``video``).
    """

    path: str
    index: int
    count: int
    span: tuple[float, float] = (0.0, 1.0)
    """Start and end of the part of the video to sample from, as fractions of its length."""

    def render(self) -> Image.Image:
        """Return the frame as RGB.

        Raises:
            RewardError: the video is missing, damaged or has no frame, or PyAV is
                needed and not installed.
        """
        if os.path.isdir(self.path):
            return open_image(self._file())
        frames = _decode(self.path, self.count, self.span, file_hash(self.path))
        return frames[self.index].copy()

    def identity(self) -> str:
        """Cache key, without decoding; see ``rewards.images.image_identity``."""
        if os.path.isdir(self.path):
            return image_identity(self._file())
        return f"video content:{file_hash(self.path)}:{self.index}/{self.count}:{self.span}"

    def _file(self) -> str:
        files = _frame_files(self.path, file_stamp(self.path))
        return files[uniform(len(files), self.count, self.span)[self.index]]


def video_frames(
    path: str | Path, count: int, span: tuple[float, float] = (0.0, 1.0)
) -> tuple[VideoFrame, ...]:
    """The ``count`` frames by which a video, or a part of it, is represented; nothing is read yet."""
    return tuple(VideoFrame(str(path), index, count, span) for index in range(count))


def read_frames(
    path: str | Path, count: int, span: tuple[float, float] = (0.0, 1.0)
) -> list[Image.Image]:
    """Decode the frames of ``video_frames``, RGB. Raises as ``VideoFrame.render``."""
    if os.path.isdir(path):
        return [open_image(frame) for frame in video_frames(path, count, span)]
    return (
        _animation_frames if Path(path).suffix.lower() in IMAGE_SUFFIXES else _video
    )(str(path), count, span)


@lru_cache(maxsize=1024)
def _frame_files(folder: str, stamp: tuple[int, int, int, int]) -> list[str]:
    """Paths of the images in a folder, in natural order; cached until ``stamp``, the
    folder's ``file_stamp``, changes.
    """

    def natural(file: Path) -> list[tuple[int, str]]:
        """Sort key that puts frame 10 after frame 9."""
        return [
            (int(piece), "") if piece.isdecimal() else (-1, piece)
            for piece in re.split(r"(\d+)", file.name)
        ]

    files = sorted(list_images(folder, recursive=False), key=natural)
    if not files:
        raise RewardError(
            f"video {folder!r} is a folder without images: expected its frames"
        )
    return [str(file) for file in files]


@lru_cache(maxsize=KEPT)
def _decode(
    path: str, count: int, span: tuple[float, float], content: str
) -> list[Image.Image]:
    """``read_frames`` of a file, cached while its ``file_hash`` is ``content``."""
    return read_frames(path, count, span)


def _animation_frames(
    path: str, count: int, span: tuple[float, float]
) -> list[Image.Image]:
    with image_file(path) as image:
        frames = []
        for index in uniform(getattr(image, "n_frames", 1), count, span):
            image.seek(index)
            image.load()
            frames.append(open_image(image))
        return frames


def _video(path: str, count: int, span: tuple[float, float]) -> list[Image.Image]:
    import av

    with naming(
        f"video {path!r} cannot be read",
        (av.error.FFmpegError, OSError, ValueError),
        RewardError,
    ):
        # Decoded to be counted, too: what a container says of its number of frames may be wrong or
        # missing.
        with av.open(path) as container:
            total = (
                sum(1 for _ in container.decode(video=0))
                if container.streams.video
                else 0
            )
        if total == 0:
            raise RewardError(f"video {path!r} has no frame")
        indices = uniform(total, count, span)
        with av.open(path) as container:
            every = enumerate(container.decode(video=0))
            frames = {
                index: frame.to_image().rotate(
                    getattr(frame, "rotation", 0), expand=True
                )
                for index, frame in every
                if index in indices
            }
    return [frames[index] for index in indices]
