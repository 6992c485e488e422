"""Are image files there, and do they decode? For whole datasets, in parallel, without holding pixels."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from tqdm import tqdm

from rewards.base import RewardError
from rewards.images import image_file, open_image, pixel_hash
from rl_caption.data.files import write_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_BLOCK = 4096
_CACHED = "oriented images"
"""Key of what a cache remembers; another name whenever the hash of an image changes."""
_LOG_SECONDS = 10.0


class Verdict(NamedTuple):
    """What is known of one image file."""

    content: str | None = None
    """Hash of the decoded RGB pixels, the same for copies; None where they were not decoded."""
    error: str | None = None
    """Why the file cannot be used, with its name; None where it can."""
    missing: bool = False
    """Whether there is no such file."""


def check_image_files(
    paths: Sequence[str], num_workers: int = 4, check_pixels: bool = True, cache: str | Path | None = None
) -> dict[str, Verdict]:
    """Check every image file: it exists, it is an image, and every pixel decodes.

    Args:
        paths: the files, each once.
        num_workers: threads; Pillow decodes outside the interpreter lock.
        check_pixels: decode; False only looks whether the files exist.
        cache: a JSON file that remembers the good files by path, size and time of change, so that a second run decodes
            only what is new. It is made if absent and made anew if unreadable.
    """
    known = _read_cache(cache) if cache is not None and check_pixels else {}
    stamps: dict[str, tuple[int, int]] = {}
    verdicts: dict[str, Verdict] = {}
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: no name of a file, such as one with a zero byte
            verdicts[path] = Verdict(error=f"{path!r}: {getattr(error, 'strerror', None) or error}", missing=True)
            continue
        stamps[path] = (status.st_size, status.st_mtime_ns)
        remembered = known.get(path)
        if not check_pixels:
            verdicts[path] = Verdict() if os.path.isfile(path) else Verdict(error=f"{path!r}: not a file", missing=True)
        elif remembered is not None and remembered[:2] == stamps[path]:
            verdicts[path] = Verdict(content=remembered[2])
    unseen = [path for path in paths if path not in verdicts]
    verdicts.update(zip(unseen, in_parallel(check_image_file, unseen, num_workers, "checking images"), strict=True))
    if cache is not None and check_pixels and unseen:
        good = {path: (*stamps[path], verdicts[path].content) for path in stamps if verdicts[path].content}
        _write_cache(cache, {**known, **good})
    return verdicts


def check_image_file(path: str) -> Verdict:
    """Decode one image file and hash its pixels."""
    try:
        with image_file(path) as image:
            image.verify()  # checksums, where the format has them; the image cannot be used afterwards
        return Verdict(content=pixel_hash(open_image(path)))
    except RewardError as error:
        return Verdict(error=str(error))


def in_parallel(function: Callable[[T], R], items: Sequence[T], num_workers: int, title: str) -> Iterator[R]:
    """Yield ``function`` of every item, in order, from threads, with a progress bar or, off a terminal, log lines."""
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        blocks = (items[start : start + _BLOCK] for start in range(0, len(items), _BLOCK))
        yield from _with_progress(
            (result for block in blocks for result in pool.map(function, block)), len(items), title
        )


def _with_progress(results: Iterable[R], total: int, title: str) -> Iterator[R]:
    if sys.stderr.isatty():
        yield from tqdm(results, total=total, desc=title, unit="file", leave=False)
        return
    start = logged = time.monotonic()
    for done, result in enumerate(results, start=1):
        yield result
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS:
            rate, logged = done / (now - start), now
            logger.info(
                "%s: %d of %d files, %.0f files/s, %.0f s left", title, done, total, rate, (total - done) / rate
            )


def _read_cache(cache: str | Path) -> dict[str, tuple[int, int, str]]:
    try:
        entries = json.loads(Path(cache).read_bytes())[_CACHED]
        return {str(path): (int(size), int(mtime), str(content)) for path, (size, mtime, content) in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_cache(cache: str | Path, entries: dict[str, tuple[int, int, str | None]]) -> None:
    write_text(cache, json.dumps({_CACHED: entries}))
