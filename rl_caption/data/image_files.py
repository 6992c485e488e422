"""Are image files there, and do they decode? For whole datasets, in parallel, without holding pixels."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from PIL import Image
from tqdm import tqdm

from rl_caption.data.base import UNREADABLE
from rl_caption.data.files import write_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_BLOCK = 4096
_LOG_SECONDS = 10.0


class Verdict(NamedTuple):
    """What is known of one image file."""

    content: str | None = None
    """Hash of the decoded RGB pixels, the same for copies; None where they were not decoded."""
    error: str | None = None
    """Why the file cannot be used; None where it can."""
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
        except OSError as error:
            verdicts[path] = Verdict(error=error.strerror or str(error), missing=True)
            continue
        stamps[path] = (status.st_size, status.st_mtime_ns)
        remembered = known.get(path)
        if not check_pixels:
            verdicts[path] = Verdict() if os.path.isfile(path) else Verdict(error="not a file", missing=True)
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
        with Image.open(path) as image:
            image.verify()  # checksums, where the format has them; the image cannot be used afterwards
        with Image.open(path) as image:
            return Verdict(content=pixel_hash(image))
    except UNREADABLE as error:
        return Verdict(error=str(error) or type(error).__name__)


def pixel_hash(image: Image.Image) -> str:
    """Hash the RGB pixels and the size of an image: equal for copies, whatever the file format or metadata."""
    rgb = image.convert("RGB")
    return hashlib.blake2b(rgb.tobytes(), digest_size=16, person=f"{rgb.width}x{rgb.height}".encode()[:16]).hexdigest()


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
        entries = json.loads(Path(cache).read_bytes())["images"]
        return {str(path): (int(size), int(mtime), str(content)) for path, (size, mtime, content) in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_cache(cache: str | Path, entries: dict[str, tuple[int, int, str | None]]) -> None:
    write_text(cache, json.dumps({"images": entries}))
