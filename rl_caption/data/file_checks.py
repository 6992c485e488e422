"""Checks, in parallel, that images and region features exist and can be read."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from tqdm.auto import tqdm

from rewards.base import RewardError
from rewards.images import file_stamp, image_file, open_image, pixel_hash
from rewards.videos import VideoFrame, read_frames
from rl_caption.data.base import SHOWN, DataError, LazyImage
from rl_caption.data.features import ImageFeatures
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import json_object

T = TypeVar("T")
R = TypeVar("R")


class Checkable(Protocol):
    """What is read once and then remembered: the file of an image, a stored image, features."""

    @property
    def where(self) -> str:
        """Its name in messages, and in a cache."""

    def stamp(self) -> Any:
        """What is different, as JSON, after it was replaced; None where that is not known.

        Raises ``OSError`` if it is missing.
        """


C = TypeVar("C", bound=Checkable)


class Verdict(NamedTuple):
    """Result of a check."""

    content: Any = None
    """Hash of the decoded RGB pixels, equal for copies of an image, or the size of a region
    feature; None where nothing was read.
    """
    error: str | None = None
    """Why it cannot be used, including its name; None if it can."""
    missing: bool = False


class ImageFile(NamedTuple):
    """An image file, or a video (a file, or a folder of images) of which ``num_frames`` frames are
    read.
    """

    path: str
    num_frames: int | None = None

    @property
    def where(self) -> str:
        """The path, and how many frames."""
        return repr(self.path) if self.num_frames is None else f"{self.path!r}, {self.num_frames}"

    def stamp(self) -> Any:
        """``file_stamp``: to read every file for a hash would take minutes. None of a folder."""
        stamp = [*file_stamp(self.path)]
        return None if os.path.isdir(self.path) else stamp


def file_of(source: Any) -> ImageFile | LazyImage | None:
    """What is behind a row's ``image``; None where the image is in memory or rendered."""
    if isinstance(source, LazyImage):
        return source
    if isinstance(source, str | Path):
        return ImageFile(str(source))
    if isinstance(source, tuple) and source and isinstance(source[0], VideoFrame):
        return ImageFile(source[0].path, source[0].count)
    return None


def missing_files(images: Iterable[Any]) -> list[str]:
    """The files among rows' images that do not exist."""
    files = [file for file in map(file_of, images) if file is not None]
    verdicts = check_image_files(files, check_pixels=False)
    return [getattr(file, "path", file.where) for file in verdicts if verdicts[file].missing]


def check_image_files(
    files: Iterable[ImageFile | LazyImage],
    num_workers: int = 4,
    check_pixels: bool = True,
    cache: str | Path | None = None,
) -> dict[ImageFile | LazyImage, Verdict]:
    """Check every image, or video, once: it exists, it is an image, and every pixel decodes.

    Args:
        files: each is checked once.
        num_workers: threads; Pillow decodes outside the interpreter lock.
        check_pixels: decode every image; False only checks that it exists.
        cache: a JSON file that remembers good images, so that the next run decodes only what is
            new.
    """
    check = check_image_file if check_pixels else None
    return _check_all(files, check, num_workers, cache, "checking images")


def check_image_file(file: ImageFile | LazyImage) -> Verdict:
    """Decode one image, or the frames that stand for a video, and hash the pixels."""
    try:
        if isinstance(file, LazyImage):
            return Verdict(pixel_hash(open_image(file)))
        if file.num_frames is not None:
            hashes = [pixel_hash(frame) for frame in read_frames(file.path, file.num_frames)]
            return Verdict(hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest())
        with image_file(file.path) as image:
            # checksums, where the format has them; the image cannot be used afterwards
            image.verify()
        return Verdict(pixel_hash(open_image(file.path)))
    except RewardError as error:
        return Verdict(error=str(error))


def refuse_bad_images(
    files: Iterable[ImageFile | LazyImage],
    reader: str,
    num_workers: int = 4,
    check_pixels: bool = True,
    cache: str | Path | None = None,
) -> None:
    """Check images that ``reader`` needs, as ``check_image_files`` does.

    Raises ``DataError`` with the count and the first that cannot be used.
    """
    verdicts = check_image_files(files, num_workers, check_pixels, cache)
    bad = [verdict.error for verdict in verdicts.values() if verdict.error is not None]
    if bad:
        first = "; ".join(bad[:SHOWN])
        raise DataError(
            f"{reader} looks at images, and {len(bad)} of {len(verdicts)} cannot be used: {first}"
        )


def check_features(
    features: Sequence[ImageFeatures], num_workers: int = 4, cache: str | Path | None = None
) -> list[str | None]:
    """Check the headers of the region features of N images. Returns an error message (image, file,
    shape) or None for each.

    ``num_workers`` threads read a folder of files. All must have the feature size D of the
    majority. ``cache`` is that of ``check_image_files``.
    """
    threads = num_workers if all(item.store.parallel for item in features) else 1
    verdicts = _check_all(features, _check_header, threads, cache, "checking features")
    dims = Counter(verdict.content for verdict in verdicts.values() if verdict.error is None)
    usual = max(dims, key=dims.__getitem__, default=None)
    errors = []
    for item in features:
        dim, error, _ = verdicts[item]
        if error is None and dim != usual:
            error = f"{item.where}: D is {dim}, others have {usual}"
        errors.append(error)
    return errors


def _check_header(item: ImageFeatures) -> Verdict:
    try:
        return Verdict(item.check())
    except DataError as error:
        return Verdict(error=str(error))


def _check_all(
    items: Iterable[C],
    check: Callable[[C], Verdict] | None,
    num_workers: int,
    cache: str | Path | None,
    title: str,
) -> dict[C, Verdict]:
    """Check each item once, by threads; None only looks whether they exist.

    ``cache`` is a JSON file of good results by name, each with the stamp that it counts for.
    """
    stored: dict[str, Any] = {}
    if cache is not None and Path(cache).is_file():
        stored = json_object(Path(cache).read_bytes(), str(cache))
    verdicts: dict[C, Verdict] = {}
    unseen: dict[C, Any] = {}
    for item in dict.fromkeys(items):
        try:
            stamp = item.stamp()
        except OSError as error:
            reason = f"{item.where}: {error.strerror or error}"
            verdicts[item] = Verdict(error=reason, missing=True)
            continue
        known, content = stored.get(item.where, (None, None))
        if check is None:
            verdicts[item] = Verdict()
        elif stamp is not None and known == stamp:
            verdicts[item] = Verdict(content)
        else:
            unseen[item] = stamp
    if check is not None and unseen:
        results = in_parallel(check, list(unseen), num_workers, title)
        for (item, stamp), verdict in zip(unseen.items(), results, strict=True):
            verdicts[item] = verdict
            if verdict.error is None and stamp is not None:
                stored[item.where] = [stamp, verdict.content]
        if cache is not None:
            write_text(cache, json.dumps(stored))
    return verdicts


def in_parallel(
    function: Callable[[T], R],
    items: Sequence[T],
    num_workers: int,
    title: str,
) -> Iterator[R]:
    """Yield ``function(item)`` for every item in order, computed by threads, with the display of
    ``progress``.
    """
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        yield from progress(pool.map(function, items), title, total=len(items))


def progress(
    items: Iterable[T],
    title: str,
    unit: str = "file",
    total: int | None = None,
) -> Iterator[T]:
    """Yield the items; show a bar in the main process after two seconds, or a line each ten seconds
    where there is no terminal.

    ``total`` is the number of items, by default their length.
    """
    yield from tqdm(
        items,
        title,
        total,
        leave=False,
        unit=unit,
        delay=2,
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        disable=os.environ.get("RANK", "0") != "0",
    )
