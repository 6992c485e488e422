"""Checks, in parallel, that files of images and region features exist and can be read."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm.auto import tqdm

from rewards.base import RewardError
from rewards.images import file_stamp, image_file, open_image, pixel_hash
from rewards.videos import VideoFrame, read_frames
from rl_caption.data.base import SHOWN, DataError
from rl_caption.data.features import ImageFeatures
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import json_object

T = TypeVar("T")
R = TypeVar("R")
_BLOCK = 4096


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

    @property
    def key(self) -> str:
        """Key in a cache; it gets another form whenever the hash of an image changes."""
        return f"{self.path}, {self.num_frames or 'image'}"


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
    memory = _Memory(cache)
    stamps: dict[ImageFile, Any] = {}
    verdicts: dict[ImageFile, Verdict] = {}
    for file in dict.fromkeys(files):
        try:
            stamps[file] = [*file_stamp(file.path)]
        except OSError as error:
            verdicts[file] = Verdict(error=f"{file.path!r}: {error.strerror}", missing=True)
            continue
        content = memory.get(file.key, stamps[file])
        if content is not None or not check_pixels:
            verdicts[file] = Verdict(content)
    unseen = [file for file in stamps if file not in verdicts]
    found = in_parallel(check_image_file, unseen, num_workers, "checking images")
    for file, verdict in zip(unseen, found, strict=True):
        verdicts[file] = verdict
        if verdict.content is not None and not os.path.isdir(file.path):
            memory.put(file.key, stamps[file], verdict.content)
    memory.save()
    return verdicts


def refuse_bad_images(
    files: Iterable[ImageFile],
    reader: str,
    num_workers: int = 4,
    check_pixels: bool = True,
    cache: str | Path | None = None,
) -> None:
    """Check image files that ``reader`` needs, as ``check_image_files`` does.

    Raises ``DataError`` with the count and the first that cannot be used.
    """
    verdicts = check_image_files(files, num_workers, check_pixels, cache)
    bad = [verdict.error for verdict in verdicts.values() if verdict.error is not None]
    if bad:
        first = "; ".join(bad[:SHOWN])
        raise DataError(
            f"{reader} looks at images, and {len(bad)} of {len(verdicts)} cannot be used: {first}"
        )


class _Memory:
    """Results of checks in a JSON file, by key; each counts as long as its stamp is the same."""

    def __init__(self, file: str | Path | None) -> None:
        self.file, self._changed = file, False
        self._results: dict[str, Any] = {}
        if file is not None and Path(file).is_file():
            self._results = json_object(Path(file).read_bytes(), str(file))

    def get(self, key: str, stamp: Any) -> Any:
        """The result of a key; None where there is none, or of another stamp."""
        stored, result = self._results.get(key, (None, None))
        return result if stored == stamp else None

    def put(self, key: str, stamp: Any, result: Any) -> None:
        """Remember a result."""
        self._results[key] = [stamp, result]
        self._changed = True

    def save(self) -> None:
        """Write the file, where there is one and something is new."""
        if self.file is not None and self._changed:
            write_text(self.file, json.dumps(self._results))


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
    features: Sequence[ImageFeatures], num_workers: int = 4, cache: str | Path | None = None
) -> list[str | None]:
    """Check the headers of the region features of N images. Returns an error message (image, file,
    shape) or None for each.

    Args:
        features: N features. All must have the feature size D of the majority.
        num_workers: threads, used for a folder of files.
        cache: as of ``check_image_files``, by path or HDF5 key.
    """
    memory = _Memory(cache)
    keys, stamps = [item.where for item in features], [item.stamp() for item in features]
    found: list[Any] = [memory.get(*entry) for entry in zip(keys, stamps, strict=True)]
    unseen = [index for index, result in enumerate(found) if result is None]
    threads = num_workers if all(item.store.parallel for item in features) else 1
    results = in_parallel(lambda n: _dim(features[n]), unseen, threads, "checking features")
    for index, result in zip(unseen, results, strict=True):
        found[index] = result
        if isinstance(result, int):
            memory.put(keys[index], stamps[index], result)
    memory.save()
    dims = Counter(result for result in found if isinstance(result, int))
    usual = max(dims, key=dims.__getitem__, default=0)
    errors: list[str | None] = []
    for item, result in zip(features, found, strict=True):
        if isinstance(result, int):
            error = f"{item.where}: D is {result}, others have {usual}"
            result = None if result == usual else error
        errors.append(result)
    return errors


def _dim(item: ImageFeatures) -> int | str:
    try:
        return item.check()
    except DataError as error:
        return str(error)


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
