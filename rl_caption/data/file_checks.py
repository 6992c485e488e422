"""Checks, in parallel, that files of images and region features exist and can be read."""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from tqdm.auto import tqdm

from rewards.base import RewardError
from rewards.images import file_stamp, image_file, open_image, pixel_hash
from rewards.videos import VideoFrame, read_frames
from rl_caption.data.base import DataError
from rl_caption.data.features import ImageFeatures
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import json_object

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_BLOCK = 4096
_CACHED = "images"
"""Key of the entries in an image cache; it gets another name whenever the hash of an image changes.
"""
_LOG_SECONDS = 10.0


class Verdict(NamedTuple):
    """Result of checking one image file."""

    content: str | None = None
    """Hash of the decoded RGB pixels, equal for copies of an image; None where the file was not
    decoded.
    """
    error: str | None = None
    """Why the file cannot be used, including its name; None if it can."""
    missing: bool = False


class ImageFile(NamedTuple):
    """An image file, or a video (a file, or a folder of images) of which ``num_frames`` frames are
    read.
    """

    path: str
    num_frames: int | None = None


def file_of(source: Any) -> ImageFile | None:
    """The file behind a row's ``image``; None where the image is in memory or rendered."""
    if isinstance(source, str | Path):
        return ImageFile(str(source))
    if isinstance(source, tuple) and source and isinstance(source[0], VideoFrame):
        return ImageFile(source[0].path, source[0].count)
    return None


def missing_files(images: Iterable[Any]) -> list[str]:
    """The files among rows' images that do not exist."""
    verdicts = check_image_files(
        [file for file in map(file_of, images) if file is not None], check_pixels=False
    )
    return [file.path for file, verdict in verdicts.items() if verdict.missing]


def check_image_files(
    files: Iterable[ImageFile],
    num_workers: int = 4,
    check_pixels: bool = True,
    cache: str | Path | None = None,
) -> dict[ImageFile, Verdict]:
    """Check every image file, or video, once: it exists, it is an image, and every pixel decodes.

    Args:
        files: each is checked once.
        num_workers: threads; Pillow decodes outside the interpreter lock.
        check_pixels: decode every file; False only checks that it exists.
        cache: a JSON file that remembers good files by path and ``file_stamp``, so that the next
            run decodes only what is new; to read every file for a hash would take minutes. Folders
            of frames are not remembered.
    """
    stored = _read_cache(cache)
    stamps: dict[ImageFile, list[int]] = {}
    verdicts: dict[ImageFile, Verdict] = {}
    for file in dict.fromkeys(files):
        try:
            stamps[file] = [*file_stamp(file.path)]
        except OSError as error:
            verdicts[file] = Verdict(error=f"{file.path!r}: {error.strerror}", missing=True)
            continue
        if not check_pixels:
            verdicts[file] = Verdict()
            continue
        *stamp, content = stored.get(_cache_key(file), {}).get(file.path, [None])
        if stamp == stamps[file]:
            verdicts[file] = Verdict(content=content)
    unseen = [file for file in stamps if file not in verdicts]
    verdicts.update(
        zip(
            unseen,
            in_parallel(check_image_file, unseen, num_workers, "checking images"),
            strict=True,
        )
    )
    if cache is not None and unseen:
        for file in unseen:
            if verdicts[file].content is not None and not os.path.isdir(file.path):
                stored.setdefault(_cache_key(file), {})[file.path] = [
                    *stamps[file],
                    verdicts[file].content,
                ]
        write_text(cache, json.dumps(stored))
    return verdicts


def _cache_key(file: ImageFile) -> str:
    return _CACHED if file.num_frames is None else f"{_CACHED}, {file.num_frames} frames"


def check_image_file(file: ImageFile) -> Verdict:
    """Decode one image file, or the frames that stand for a video, and hash the pixels."""
    try:
        if file.num_frames is not None:
            hashes = [pixel_hash(frame) for frame in read_frames(file.path, file.num_frames)]
            return Verdict(
                content=hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
            )
        with image_file(file.path) as image:
            # checksums, where the format has them; the image cannot be used afterwards
            image.verify()
        return Verdict(content=pixel_hash(open_image(file.path)))
    except RewardError as error:
        return Verdict(error=str(error))


def check_features(
    features: Sequence[ImageFeatures],
    num_workers: int = 4,
    cache: str | Path | None = None,
    check_values: bool = False,
) -> list[str | None]:
    """Check the region features of N images. Returns an error message (image, file, shape) or None
    for each.

    Args:
        features: N features. All must have the feature size D of the majority.
        num_workers: threads, used for a folder of files.
        cache: the cache of ``check_image_files``. Good features are remembered beside it, in
            ``NAME.features.json``, by path or HDF5 key and ``file_stamp``.
        check_values: read the values too: they must be finite, and boxes inside the image.
            Otherwise only array headers are read.
    """
    memory = None if cache is None else Path(cache).with_suffix(".features.json")
    remembered = _read_cache(memory)
    stamps = [None if memory is None else _stamp(item) for item in features]
    outcomes: list[int | str | None] = [None] * len(features)
    for index, stamp in enumerate(stamps):
        if stamp is not None and stamp[0] in remembered:
            dependencies, dim, read = remembered[stamp[0]]
            # Values that were read need no other look at headers.
            if dependencies == stamp[1] and (read or not check_values):
                outcomes[index] = dim
    unseen = [index for index, outcome in enumerate(outcomes) if outcome is None]
    threads = num_workers if all(item.store.parallel for item in features) else 1
    title = "reading features" if check_values else "checking features"
    results = in_parallel(lambda index: _dim(features[index], check_values), unseen, threads, title)
    for index, result in zip(unseen, results, strict=True):
        outcomes[index], stamp = result, stamps[index]
        if stamp is not None and isinstance(result, int):
            remembered[stamp[0]] = [stamp[1], result, check_values]
    if memory is not None and unseen:
        write_text(memory, json.dumps(remembered))
    usual = Counter(outcome for outcome in outcomes if isinstance(outcome, int)).most_common(1)
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, int):
            differs = f"{features[index].where}: D is {outcome}, others have {usual[0][0]}"
            outcomes[index] = None if outcome == usual[0][0] else differs
    return cast(list[str | None], outcomes)


def _dim(item: ImageFeatures, check_values: bool) -> int | str:
    try:
        return item.load().shape[1] if check_values else item.check()
    except DataError as error:
        return str(error)


def _stamp(item: ImageFeatures) -> tuple[str, list[Any]] | None:
    """Name of the features, and everything that the result of their check depends on."""
    stamp = item.store.stamp(item.location)
    if stamp is None:
        return None
    return stamp[0], [*stamp[1], repr((item.location, astuple(item.store.options)))]


def _read_cache(cache: str | Path | None) -> dict[str, Any]:
    """Content of a cache, which is written whole; empty where there is none."""
    if cache is None or not Path(cache).is_file():
        return {}
    return json_object(Path(cache).read_bytes(), str(cache))


def in_parallel(
    function: Callable[[T], R], items: Sequence[T], num_workers: int, title: str
) -> Iterator[R]:
    """Yield ``function(item)`` for every item in order, computed by threads, with the display of
    ``progress``.
    """
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        blocks = (items[first : first + _BLOCK] for first in range(0, len(items), _BLOCK))
        results = (result for block in blocks for result in pool.map(function, block))
        yield from progress(results, title, total=len(items))


def progress(
    items: Iterable[T], title: str, unit: str = "file", total: int | None = None
) -> Iterator[T]:
    """Yield the items and show progress in the main process: a bar after two seconds, or log lines
    without a terminal.

    ``total`` is the number of items, by default their length; while it is unknown, no remaining
    time is shown.
    """
    total = len(items) if total is None and isinstance(items, Sized) else total
    shows = os.environ.get("RANK", "0") == "0"
    start = logged = time.monotonic()
    with tqdm(
        total=total, desc=title, unit=unit, leave=False, delay=2, disable=None if shows else True
    ) as bar:
        for number, item in enumerate(items, start=1):
            yield item
            bar.update()
            now = time.monotonic()
            if shows and bar.disable and now - logged >= _LOG_SECONDS:
                rate, logged = number / (now - start), now
                left = "" if total is None else f" of {total}, {(total - number) / rate:.0f} s left"
                logger.info("%s: %d%s, %.3g %ss per second", title, number, left, rate, unit)
