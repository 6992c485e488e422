"""Fingerprints of data, by which a resumed program sees whether its data are the same.
No file is opened.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rewards.videos import VideoFrame
from rl_caption.data.features import ImageFeatures

TEXTS = (
    "references",
    "prompt",
    "long_reference",
    "short_references",
    "positive_captions",
    "negatives",
    "target",
)
FILES = ("image", "features", "positive_images")
PARTS = ("ids", "texts", "files", "times")
TIMES = " times"
"""Suffix of the names whose differences are only reported: a copy of a folder may have
new times.
"""


def fingerprint(splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Number and hashes of the rows of each split, in their order.

    ``SPLIT ids`` hashes the image ids, ``SPLIT texts`` the columns ``TEXTS``, ``SPLIT
    files`` the names and sizes of image and feature files (without their folders), and
    ``SPLIT times`` their times of change in seconds. Missing files count as empty;
    images that are no files are left out.
    """
    hashes: dict[str, str] = {}
    for split, rows in splits.items():
        digests = {aspect: hashlib.blake2b(digest_size=8) for aspect in PARTS}
        for row in rows:
            paths = chain.from_iterable(_files(row.get(key)) for key in FILES)
            files = [(path.name, *size_and_time(path)) for path in dict.fromkeys(paths)]
            content = {
                "ids": row["image_id"],
                "texts": [row.get(key) for key in TEXTS],
                "files": [(name, size) for name, size, _ in files],
                "times": [time for *_, time in files],
            }
            for aspect, values in content.items():
                digests[aspect].update(json.dumps(values).encode())
        for aspect, digest in digests.items():
            hashes[f"{split} {aspect}"] = f"{len(rows)} rows {digest.hexdigest()}"
    return hashes


def changes(
    before: Mapping[str, str], now: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Differences between two fingerprints, as ``NAME: BEFORE -> NOW``: of data, and of
    times.
    """
    data: list[str] = []
    times: list[str] = []
    for name in now:
        if before.get(name) != now[name]:
            changed = times if name.endswith(TIMES) else data
            changed.append(f"{name}: {before.get(name)} -> {now[name]}")
    return data, times


def _files(value: Any) -> Iterator[Path]:
    """The files of an image, of frames of a video, or of region features."""
    if isinstance(value, str | Path):
        yield Path(value)
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_files, value))
    elif isinstance(value, ImageFeatures):
        yield Path(value.place)
        if value.file is not None:
            yield value.file.path
    elif isinstance(value, VideoFrame):
        path = Path(value.path)
        yield from sorted(path.iterdir()) if path.is_dir() else [path]


def size_and_time(path: str | Path) -> tuple[int, int]:
    """Size in bytes, and time of change in seconds; zeros where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, int(status.st_mtime)
