"""Checks of a whole dataset before training, which report all problems at once, with
counts and first offenders.
"""

import json
import logging
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image

from rewards.base import RewardError
from rewards.images import check_frames, file_stamp, image_file, open_image, pixel_hash
from rewards.text.tokenize import TOKENIZER, tokenize
from rewards.videos import VideoFrame, read_frames
from rl_caption.data.base import (
    SHOWN,
    DataError,
    LazyImage,
    Row,
    RowView,
    Splits,
    with_references,
)
from rl_caption.data.features import ImageFeatures, as_image_features
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import TextForms, progress, read_json

logger = logging.getLogger(__name__)
MISSING = "missing images"
UNREADABLE = "unreadable images"
BAD_FEATURES = "missing or unusable features"
EMPTY_CAPTIONS = "empty captions"
NO_IMAGES = "rows without an image"
NO_REFERENCES = "images without references"
DUPLICATE_IDS = "duplicate image ids in a split"
LEAKED_IDS = "image ids in two splits"
LEAKED_FILES = "image files in two splits"
LEAKED_CONTENT = "equal images in two splits"
LEAKED = {LEAKED_IDS: "image_id", LEAKED_FILES: "path", LEAKED_CONTENT: "content"}
"""Kind of leakage -> what two splits share."""
ADVICE = {
    MISSING: "complete the images, or set data.image_root to their folder (and of Karpathy JSON "
    "data.image_extension, data.flatten), or data.on_bad: skip",
    UNREADABLE: "replace the files, or set data.on_bad: skip",
    BAD_FEATURES: "extract them again, or set data.on_bad: skip",
    EMPTY_CAPTIONS: "remove them, or set data.on_bad: skip",
    NO_IMAGES: "add images; only the task distill with towers: text does without",
    NO_REFERENCES: "add captions, or set data.on_bad: skip; only distill with towers: image does",
    DUPLICATE_IDS: "write one row per image, with all its references",
    LEAKED_IDS: "use one id per image, and each image in one split",
    LEAKED_FILES: "keep each image in one split; data.on_bad: skip takes them out of train",
    LEAKED_CONTENT: "keep each image in one split; data.on_bad: skip takes them out of train",
}
"""Kind of problem -> what to do about it, in the order of the report."""


class Verdict(NamedTuple):
    """Result of reading an image, or features."""

    content: Any = None
    """Hash of the decoded RGB pixels, equal for copies of an image; None where nothing was read."""
    error: str | None = None
    """Why it cannot be used, including its name; None if it can."""
    missing: bool = False


class ImageFile(NamedTuple):
    """An image file, or a video (a file, or a folder of images) and its ``num_frames``
    to read.
    """

    path: str
    num_frames: int | None = None

    @property
    def where(self) -> str:
        """Name in messages, and in a cache."""
        return repr(self.path)

    def stamp(self) -> Any:
        """``file_stamp`` of the file, faster than a hash of its content; None for a
        folder.
        """
        stamp = [*file_stamp(self.path), self.num_frames]
        return None if os.path.isdir(self.path) else stamp

    def check(self) -> str:
        """Decode it and return a hash of its pixels. Raises ``RewardError``."""
        if self.num_frames is not None:
            return " ".join(map(pixel_hash, read_frames(self.path, self.num_frames)))
        with image_file(self.path) as image:
            # checksums, where the format has them; the image cannot be used afterwards
            image.verify()
        return pixel_hash(open_image(self.path))


@dataclass(frozen=True)
class CheckReport:
    """Problems found in the checked splits of a dataset, and the good rows."""

    rows: Mapping[str, int]
    problems: Mapping[str, Sequence[str]]
    """Kind of problem -> the rows, empty captions or leaked images that have it."""
    kept: Mapping[str, Mapping[int, list[int] | None]]
    """Split -> index of each row to keep, ascending -> indices of its non-empty
    references, or None where all are good.
    """
    warnings: Sequence[str] = ()
    """Warnings of references whose form costs scores (``TextForms``)."""

    def __str__(self) -> str:
        counts = ", ".join(f"{split} {count}" for split, count in self.rows.items())
        number, total = len(self.problems) or "no", sum(self.rows.values())
        lines = [f"data: {number} problems in {total} rows ({counts})"]
        for problem, offenders in self.problems.items():
            first = first_of(offenders)
            lines.append(f"  - {len(offenders)} {problem}: {first} ({ADVICE[problem]})")
        lines += [f"WARNING: {sentence}" for sentence in self.warnings]
        return "\n".join(lines)

    def good_rows_of(self, data: Splits) -> Splits:
        """The checked dataset with its good rows only. Splits that were not checked
        stay as they are.
        """
        splits = dict(data)
        for split, kept in self.kept.items():
            splits[split] = RowView([*kept.items()], partial(_good_row, data[split]))
        return Splits(splits, data.source)


def first_of(offenders: Sequence[str]) -> str:
    """Text of the first ``SHOWN`` offenders and the number of further ones."""
    more = len(offenders) - SHOWN
    return "; ".join(offenders[:SHOWN]) + (f", and {more} more" if more > 0 else "")


def _good_row(rows: Sequence[Row], kept: tuple[int, list[int] | None]) -> Row:
    index, references = kept
    row = rows[index]
    return row if references is None else with_references(row, references)


@dataclass(slots=True)
class _Entry:
    """A checked row, without pixels and captions."""

    split: str
    index: int
    image_id: str
    file: ImageFile | LazyImage | None = None
    content: str | None = None
    features: ImageFeatures | None = None
    references: list[int] | None = None
    """Indices of the non-empty references, where some are empty."""
    bad: bool = False

    @property
    def path(self) -> str | None:
        """Absolute path of the image file; None where it is none."""
        path = getattr(self.file, "path", None)
        return path and os.path.abspath(path)

    @property
    def size(self) -> int | None:
        """Size of the image file in bytes; None where there is none."""
        path = self.path or ""
        return os.path.getsize(path) if os.path.isfile(path) else None


def check_data(
    data: Splits,
    splits: Collection[str],
    on_bad: Literal["fail", "skip"] = "fail",
    check_pixels: bool = True,
    check_images: bool = True,
    cache: str | Path | None = None,
    needs: Collection[str] = ("image", "text"),
    tokenizer: str | None = TOKENIZER,
) -> CheckReport:
    """Check splits of a dataset: image files, captions, ids, and leakage of images
    between these and all other splits.

    Rendered images have no file to check. For region features only the headers are
    read; loading checks their values. Of all other splits, ids and image files are
    compared.

    Args:
        data: the dataset.
        splits: the splits to check.
        on_bad: ``fail`` raises if there is any problem; ``skip`` leaves out bad rows
            and empty captions. An image in several splits then stays in the evaluation
            split (test before val before train).
        check_pixels: decode every image. False only checks that the file exists, and
            finds no equal images.
        check_images: False where only features are read, so that image files may be absent.
        cache: a JSON file that remembers good images and features for the next run.
        needs: what every row must have: an ``image``, a reference (``text``). What is
            there is checked in any case.
        tokenizer: ``data.tokenizer``, by which captions are split into words; None
            where only a model reads them.

    Raises:
        DataError: with ``fail`` there is a problem, or with ``skip`` a split has no
            rows left (the message is the report); or a split is unknown.
    """
    by_problem: dict[str, list[str]] = {problem: [] for problem in ADVICE}
    forms = TextForms()
    entries: list[_Entry] = []
    owners: list[tuple[_Entry, Any]] = []
    for split in dict.fromkeys(splits):
        rows = progress(data[split], f"checking {split}")
        for index, row in enumerate(rows):
            entry = _Entry(split, index, row["image_id"], _file_of(row.get("image")))
            _check_row(entry, row, by_problem, check_images, needs, forms)
            entries.append(entry)
            files = [entry.features, entry.file if check_images else None]
            owners += [(entry, file) for file in files if file is not None]
    others = list(_other_splits(data, splits))
    sizes = {entry.size for entry in entries if check_images and check_pixels}
    owners += [(entry, entry.file) for entry in others if entry.size in sizes - {None}]
    verdicts = verify((item for _, item in owners), check_pixels, cache)
    for entry, item in owners:
        content, error, missing = verdicts[item]
        problem = MISSING if missing else UNREADABLE
        if isinstance(item, ImageFeatures):
            problem = BAD_FEATURES
        else:
            entry.content = content
        if error is not None and entry.split in splits:
            by_problem[problem].append(f"{entry.split} {error}")
            entry.bad = True
    for group in _repeated_entries(entries, "split", "image_id"):
        for entry in group[1:]:
            by_problem[DUPLICATE_IDS].append(
                f"{entry.split} image {entry.image_id!r} again"
            )
        for entry in [entry for entry in group if not entry.bad][1:]:
            entry.bad = True
    for problem in LEAKED:
        by_problem[problem] += _leaks([*entries, *others], splits, problem)

    kept: dict[str, dict[int, list[int] | None]] = {split: {} for split in splits}
    for entry in entries:
        if not entry.bad:
            kept[entry.split][entry.index] = entry.references
    report = CheckReport(
        rows={split: len(data[split]) for split in kept},
        problems={
            problem: offenders for problem, offenders in by_problem.items() if offenders
        },
        kept=kept,
        warnings=forms.warnings(tokenizer),
    )
    if report.problems and (on_bad == "fail" or not all(kept.values())):
        raise DataError(str(report))
    return report


def check_row_images(
    rows: Sequence[Row],
    needed_by: str,
    check_pixels: bool = True,
    cache: str | Path | None = None,
    on_bad: str = "fail",
) -> list[Row]:
    """Check the image files of rows where ``needed_by`` reads their pixels, such as a
    reward beside a captioner of features; return the good rows.

    Raises ``DataError`` with the count and the first offenders unless ``on_bad`` is
    ``skip``, or where none is good.
    """
    files = [_file_of(row.get("image")) for row in rows]
    verdicts = verify(filter(None, files), check_pixels, cache)
    errors = {
        file: verdict.error for file, verdict in verdicts.items() if verdict.error
    }
    good = [row for row, file in zip(rows, files, strict=True) if file not in errors]
    if errors:
        message = (
            f"{needed_by} looks at images, and {len(errors)} of {len(verdicts)} cannot be used: "
            f"{first_of([*errors.values()])}"
        )
        if on_bad == "fail" or not good:
            raise DataError(message)
        logger.warning("WARNING: %s; left out", message)
    return good


def missing_files(images: Iterable[Any]) -> list[str]:
    """The files among rows' images that do not exist."""
    verdicts = verify(filter(None, map(_file_of, images)), False)
    return [
        getattr(file, "path", file.where)
        for file, verdict in verdicts.items()
        if verdict.missing
    ]


def _file_of(source: Any) -> ImageFile | LazyImage | None:
    """The file of a row's ``image``; None where the image is in memory or rendered."""
    if isinstance(source, LazyImage):
        return source
    if isinstance(source, str | Path):
        return ImageFile(str(source))
    if isinstance(source, tuple) and source and isinstance(source[0], VideoFrame):
        return ImageFile(source[0].path, source[0].count)
    return None


def verify(
    items: Iterable[Any],
    read: bool = True,
    cache: str | Path | None = None,
) -> dict[Any, Verdict]:
    """Read each image (``ImageFile``, ``LazyImage``) or ``ImageFeatures`` once, by
    threads; without ``read`` only look whether images exist.

    ``cache`` is a JSON file of good results by name, each with the stamp of its file.
    """
    stored: dict[str, Any] = {}
    if cache and Path(cache).is_file():
        stored = read_json(Path(cache), DataError)

    def verdict(item: Any) -> Verdict:
        """Whether a file can be read, from the cache where the file has not changed."""
        try:
            stamp = item.stamp()
        except OSError as error:
            return Verdict(None, f"{item.where}: {error.strerror or error}", True)
        if not read and not isinstance(item, ImageFeatures):
            return Verdict()
        stored_stamp, content = stored.get(item.where, (None, None))
        if stamp is None or stored_stamp != stamp:
            try:
                content = item.check()
            except (RewardError, DataError) as error:
                return Verdict(error=str(error))
        if stamp is not None:
            stored[item.where] = [stamp, content]
        return Verdict(content)

    unique = list(dict.fromkeys(items))
    verdicts = in_parallel(verdict, unique, "checking files")
    results = dict(zip(unique, verdicts, strict=True))
    if cache and stored:
        write_text(cache, json.dumps(stored))
    return results


def in_parallel(function: Any, items: Sequence[Any], title: str) -> Iterator[Any]:
    """Yield ``function(item)`` for every item in order, computed by four threads, with
    the display of ``progress``. A thread takes 16 items at once, because handing one
    over costs more than the check that a file exists.
    """
    chunks = [items[start : start + 16] for start in range(0, len(items), 16)]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda chunk: [*map(function, chunk)], chunks)
        yield from progress(chain.from_iterable(results), title, total=len(items))


def _check_row(
    entry: _Entry,
    row: Row,
    by_problem: Mapping[str, list[str]],
    check_images: bool,
    needs: Collection[str],
    forms: TextForms,
) -> None:
    """Complete the entry, and look for what is wrong with captions and an image in memory."""
    source, captions = row.get("image"), row["references"]
    name = f"{entry.split} image {entry.image_id!r}"
    bad = []
    if source is None and "image" in needs:
        bad.append((NO_IMAGES, name))
    elif check_images and entry.file is None:
        try:
            if isinstance(source, Image.Image):
                entry.content = pixel_hash(open_image(source))
            elif isinstance(source, list | tuple):
                check_frames(source)
        except RewardError as error:
            bad.append((UNREADABLE, f"{name}: {error}"))
    if row.get("features") is not None:
        entry.features = as_image_features(row["features"], entry.image_id)
    good = []
    for index, caption in enumerate(captions):
        forms.add(f"reference of {name}", caption)
        # Punctuation is no word: metrics drop it.
        if any(map(str.isalnum, caption)) or tokenize(caption):
            good.append(index)
        else:
            by_problem[EMPTY_CAPTIONS].append(f"{name}, caption {index + 1}")
    if len(good) < len(captions):
        entry.references = good
    if not good and "text" in needs:
        bad.append((NO_REFERENCES, name))
    for problem, text in bad:
        by_problem[problem].append(text)
        entry.bad = True


def _other_splits(data: Splits, names: Collection[str]) -> Iterator[_Entry]:
    """Yield the rows of other splits with image files, for the checks of leakage."""
    for name in [name for name in data if name not in names]:
        rows = data[name]
        for index in progress(range(len(rows)), f"looking through {name}"):
            with suppress(DataError):  # a row that lacks what this training needs
                row = rows[index]
                file = _file_of(row.get("image"))
                if file is None:
                    break
                yield _Entry(name, index, row["image_id"], file)


def _leaks(
    entries: Iterable[_Entry], splits: Collection[str], problem: str
) -> Iterator[str]:
    """Yield what several splits share, at least one of them in ``splits``. Its rows
    outside the most valuable split are marked as bad.
    """
    for group in _repeated_entries(entries, LEAKED[problem]):
        owners = dict.fromkeys(entry.split for entry in group)
        shared = {getattr(group[0], LEAKED[problem]): None}
        if problem == LEAKED_CONTENT:
            shared = dict.fromkeys(entry.path or entry.image_id for entry in group)
            # A file that is in two splits is named as a file, and not once more as equal content.
            if len(shared) == 1:
                continue
        if len(owners) < 2 or owners.keys().isdisjoint(splits):
            continue
        yield f"{' = '.join(map(repr, shared))} in {' and '.join(owners)}"
        good = [entry for entry in group if not entry.bad]
        kept = max((entry.split for entry in good), key=_value_of_split, default=None)
        for entry in good:
            entry.bad = entry.split != kept


def _value_of_split(split: str) -> int:
    """Rank of a split by the harm of losing a row: training data 0, validation 1, test 2."""
    if split.startswith(("train", "restval")):
        return 0
    return 1 if split.startswith(("val", "dev")) else 2


def _repeated_entries(entries: Iterable[_Entry], *names: str) -> list[list[_Entry]]:
    """Groups of several entries whose attributes ``names`` are equal, and not None."""
    groups: dict[Any, list[_Entry]] = defaultdict(list)
    for entry in entries:
        groups[attrgetter(*names)(entry)].append(entry)
    groups.pop(None, None)
    return [group for group in groups.values() if len(group) > 1]
