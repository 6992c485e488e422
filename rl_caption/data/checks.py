"""Checks of a whole dataset before training, which report all problems at once, with counts and
first offenders.
"""

import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

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
T = TypeVar("T")
R = TypeVar("R")
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
        """Name in messages, and in a cache."""
        return repr(self.path)

    def stamp(self) -> Any:
        """``file_stamp``: to read every file for a hash would take minutes. None of a folder."""
        stamp = [*file_stamp(self.path), self.num_frames]
        return None if os.path.isdir(self.path) else stamp

    def check(self) -> str:
        """Decode it, and hash the pixels. Raises ``RewardError``."""
        if self.num_frames is not None:
            return " ".join(map(pixel_hash, read_frames(self.path, self.num_frames)))
        with image_file(self.path) as image:
            # checksums, where the format has them; the image cannot be used afterwards
            image.verify()
        return pixel_hash(open_image(self.path))


C = TypeVar("C", bound=ImageFile | LazyImage | ImageFeatures)


@dataclass(frozen=True)
class CheckReport:
    """Problems found in the checked splits of a dataset, and the good rows."""

    rows: Mapping[str, int]
    problems: Mapping[str, Sequence[str]]
    """Kind -> what has it: rows, captions if these are empty, images if they leaked."""
    kept: Mapping[str, Mapping[int, list[int] | None]]
    """Split -> index of each row to keep, ascending -> indices of its non-empty references, or None
    where all are good.
    """
    skips: bool
    """Whether bad rows are left out (``data.on_bad: skip``)."""
    warnings: Sequence[str] = ()
    """Of references that are likely not meant as they are (``TextForms``)."""

    def __str__(self) -> str:
        counts = ", ".join(f"{split} {count}" for split, count in self.rows.items())
        total = sum(self.rows.values())
        lines = [
            f"data: {len(self.problems) or 'no'} problems in {total} rows ({counts})"
        ]
        for kind, offenders in self.problems.items():
            lines.append(
                f"  - {len(offenders)} {kind}: {first_of(offenders)} ({ADVICE[kind]})"
            )
        if self.skips and self.problems:
            left_out = [
                f"{split} {count - len(self.kept[split])} of {count} rows"
                for split, count in self.rows.items()
            ]
            lines.append(f"left out: {', '.join(left_out)}")
        lines += [f"WARNING: {sentence}" for sentence in self.warnings]
        return "\n".join(lines)

    def good_rows_of(self, data: Splits) -> Splits:
        """The checked dataset with its good rows only. Splits that were not checked stay as they
        are.
        """
        splits = dict(data)
        for split, kept in self.kept.items():
            splits[split] = RowView(data[split], partial(_good, kept), [*kept])
        return Splits(splits, data.source)


def first_of(offenders: Sequence[str]) -> str:
    """The first ``SHOWN``, and how many more there are."""
    more = len(offenders) - SHOWN
    return "; ".join(offenders[:SHOWN]) + (f", and {more} more" if more > 0 else "")


def _good(references: Mapping[int, list[int] | None], index: int, row: Row) -> Row:
    chosen = references[index]
    return row if chosen is None else with_references(row, chosen)


@dataclass(slots=True)
class _Entry:
    """What the checks remember of a row, without pixels and captions."""

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
        if isinstance(self.file, ImageFile):
            return os.path.abspath(self.file.path)
        return None

    @property
    def size(self) -> int | None:
        """Size of the image file in bytes; None where there is none."""
        path = self.path or ""
        return os.path.getsize(path) if os.path.isfile(path) else None


def check_data(
    data: Splits,
    splits: Sequence[str],
    on_bad: Literal["fail", "skip"] = "fail",
    num_workers: int = 4,
    check_pixels: bool = True,
    check_images: bool = True,
    cache: str | Path | None = None,
    needs: Collection[str] = ("image", "text"),
    tokenizer: str | None = TOKENIZER,
) -> CheckReport:
    """Check splits of a dataset: image files, captions, ids, and leakage of images between these
    and all other splits.

    Rendered images have no file to check. Of region features headers are read; loading checks their
    values. Of all other splits, ids and image files are compared.

    Args:
        data: the dataset.
        splits: the splits to check.
        on_bad: ``fail`` raises if there is any problem; ``skip`` leaves out bad rows and empty
            captions. An image in several splits then stays in the evaluation split (test before val
            before train).
        num_workers: threads that read files.
        check_pixels: decode every image. False only checks that the file exists, and finds no equal
            images.
        check_images: False where only features are read, so that image files may be absent.
        cache: a JSON file that remembers good images and features for the next run.
        needs: what every row must have: an ``image``, a reference (``text``). What is there is
            checked in any case.
        tokenizer: ``data.tokenizer``, by which captions are split into words; None where only a
            model reads them.

    Raises:
        DataError: with ``fail`` there is a problem, or with ``skip`` a split has no rows left (the
            message is the report); or a split is unknown.
    """
    found: dict[str, list[str]] = {kind: [] for kind in ADVICE}
    forms = TextForms()
    entries: list[_Entry] = []
    for split in dict.fromkeys(splits):
        rows = progress(data[split], f"checking {split}", "row")
        for index, row in enumerate(rows):
            entry = _Entry(split, index, row["image_id"], _file_of(row.get("image")))
            for kind, problem in _problems(entry, row, check_images, needs, forms):
                found[kind].append(problem)
            entries.append(entry)
    others = list(_other_splits(data, splits))
    owners: list[tuple[_Entry, Any]] = [(entry, entry.features) for entry in entries]
    if check_images:
        owners += [(entry, entry.file) for entry in entries]
        sizes = {entry.size for entry in entries if check_pixels} - {None}
        owners += [(entry, entry.file) for entry in others if entry.size in sizes]
    owners = [owner for owner in owners if owner[1] is not None]
    verdicts = verify((item for _, item in owners), num_workers, check_pixels, cache)
    dims = Counter(
        verdicts[item].content
        for _, item in owners
        if isinstance(item, ImageFeatures) and verdicts[item].error is None
    )
    usual = max(dims, key=dims.__getitem__, default=None)
    for entry, item in owners:
        content, error, missing = verdicts[item]
        kind = MISSING if missing else UNREADABLE
        if isinstance(item, ImageFeatures):
            kind = BAD_FEATURES
            if error is None and content != usual:
                error = f"{item.where}: D is {content}, others have {usual}"
        else:
            entry.content = content
        if error is not None and entry.split in splits:
            found[kind].append(f"{entry.split} {error}")
            entry.bad = True
    for group in _repeated(entries, attrgetter("split", "image_id")):
        for entry in group[1:]:
            found[DUPLICATE_IDS].append(f"{entry.split} image {entry.image_id!r} again")
        for entry in [entry for entry in group if not entry.bad][1:]:
            entry.bad = True
    for kind in LEAKED:
        found[kind] += _leaks([*entries, *others], splits, kind)
    return _report(data, splits, entries, found, forms.warnings(tokenizer), on_bad)


def _report(
    data: Splits,
    splits: Sequence[str],
    entries: Iterable[_Entry],
    found: Mapping[str, list[str]],
    warnings: list[str],
    on_bad: str,
) -> CheckReport:
    """What was found. Raises as ``check_data``."""
    kept: dict[str, dict[int, list[int] | None]] = {split: {} for split in splits}
    for entry in entries:
        if not entry.bad:
            kept[entry.split][entry.index] = entry.references
    report = CheckReport(
        rows={split: len(data[split]) for split in kept},
        problems={kind: offenders for kind, offenders in found.items() if offenders},
        kept=kept,
        skips=on_bad == "skip",
        warnings=warnings,
    )
    if on_bad == "fail" and report.problems:
        raise DataError(str(report))
    empty = [split for split in kept if not kept[split]]
    if empty:
        raise DataError(f"{report}\nno rows are left in {', '.join(empty)}")
    return report


def check_row_images(
    rows: Sequence[Row],
    needed_by: str,
    check_pixels: bool = True,
    cache: str | Path | None = None,
    num_workers: int = 4,
    on_bad: str = "fail",
) -> list[Row]:
    """Check the image files of rows where ``needed_by`` reads their pixels, such as a reward beside
    a captioner of features; return the good rows.

    Raises ``DataError`` with the count and the first offenders unless ``on_bad`` is ``skip``, or
    where none is good.
    """
    files = [_file_of(row.get("image")) for row in rows]
    known = [file for file in files if file is not None]
    verdicts = verify(known, num_workers, check_pixels, cache)
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
    found = map(_file_of, images)
    verdicts = verify((file for file in found if file is not None), read=False)
    return [
        getattr(file, "path", file.where)
        for file, verdict in verdicts.items()
        if verdict.missing
    ]


def _file_of(source: Any) -> ImageFile | LazyImage | None:
    """What is behind a row's ``image``; None where the image is in memory or rendered."""
    if isinstance(source, LazyImage):
        return source
    if isinstance(source, str | Path):
        return ImageFile(str(source))
    if isinstance(source, tuple) and source and isinstance(source[0], VideoFrame):
        return ImageFile(source[0].path, source[0].count)
    return None


def verify(
    items: Iterable[C],
    num_workers: int = 4,
    read: bool = True,
    cache: str | Path | None = None,
) -> dict[C, Verdict]:
    """Read each item once, by threads; without ``read`` only look whether images exist.

    ``cache`` is a JSON file of good results by name, each with the stamp that it counts for.
    """
    stored: dict[str, Any] = {}
    if cache is not None and Path(cache).is_file():
        stored = read_json(Path(cache), DataError)
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
        is_read = read or isinstance(item, ImageFeatures)
        if is_read and (stamp is None or known != stamp):
            unseen[item] = stamp
        else:
            verdicts[item] = Verdict(content if is_read else None)

    results = in_parallel(_verdict, [*unseen], num_workers, "checking files")
    for (item, stamp), verdict in zip(unseen.items(), results, strict=True):
        verdicts[item] = verdict
        if verdict.error is None and stamp is not None:
            stored[item.where] = [stamp, verdict.content]
    if unseen and cache is not None:
        write_text(cache, json.dumps(stored))
    return verdicts


def _verdict(item: ImageFile | LazyImage | ImageFeatures) -> Verdict:
    try:
        return Verdict(item.check())
    except (RewardError, DataError) as error:
        return Verdict(error=str(error))


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


def _problems(
    entry: _Entry,
    row: Row,
    check_images: bool,
    needs: Collection[str],
    forms: TextForms,
) -> Iterator[tuple[str, str]]:
    """Yield kind and place of what is wrong with captions and an in-memory image, and complete the
    entry.
    """
    source = row.get("image")
    name = f"{entry.split} image {entry.image_id!r}"
    if source is None and "image" in needs:
        yield NO_IMAGES, name
        entry.bad = True
    elif check_images and entry.file is None:
        try:
            if isinstance(source, Image.Image):
                entry.content = pixel_hash(open_image(source))
            elif isinstance(source, list | tuple):
                check_frames(source)
        except RewardError as error:
            yield UNREADABLE, f"{name}: {error}"
            entry.bad = True
    if row.get("features") is not None:
        entry.features = as_image_features(row["features"], entry.image_id)
    good = []
    for index, caption in enumerate(row["references"]):
        forms.add(f"reference of {name}", caption)
        # Punctuation is no word: metrics drop it.
        if any(map(str.isalnum, caption)) or tokenize(caption):
            good.append(index)
        else:
            yield EMPTY_CAPTIONS, f"{name}, caption {index + 1}"
    if len(good) < len(row["references"]):
        entry.references = good
    if not good and "text" in needs:
        yield NO_REFERENCES, name
        entry.bad = True


def _other_splits(data: Splits, names: Collection[str]) -> Iterator[_Entry]:
    """What the checks of leakage need of the rows of further splits, where images are files."""
    for name in [name for name in data if name not in names]:
        rows = data[name]
        for index in progress(range(len(rows)), f"looking through {name}", "row"):
            with suppress(DataError):  # a row that lacks what this training needs
                row = rows[index]
                file = _file_of(row.get("image"))
                if file is None:
                    break
                yield _Entry(name, index, row["image_id"], file)


def _leaks(
    entries: Iterable[_Entry], splits: Collection[str], kind: str
) -> Iterator[str]:
    """Yield what several splits contain, one of ``splits`` at least; only its rows in the most
    valuable stay good.
    """
    for group in _repeated(entries, attrgetter(LEAKED[kind])):
        owners = dict.fromkeys(entry.split for entry in group)
        shared = [getattr(group[0], LEAKED[kind])]
        if kind == LEAKED_CONTENT:
            shared = [*dict.fromkeys(entry.path or entry.image_id for entry in group)]
            # A file that is in two splits is named as a file, and not once more as equal content.
            if len(shared) == 1:
                continue
        if len(owners) < 2 or not owners.keys() & {*splits}:
            continue
        yield f"{' = '.join(map(repr, shared))} in {' and '.join(owners)}"
        good = [entry for entry in group if not entry.bad]
        kept = max((entry.split for entry in good), key=_value_of_split, default=None)
        for entry in good:
            entry.bad = entry.split != kept


def _value_of_split(split: str) -> int:
    """Rank of a split by the harm of losing a row: training data 0, validation 1, test 2."""
    if split.startswith("train") or split == "restval":
        return 0
    return 1 if split.startswith(("val", "dev")) else 2


def _repeated(
    entries: Iterable[_Entry], key: Callable[[_Entry], Hashable]
) -> list[list[_Entry]]:
    """Groups of entries that share their key."""
    groups: dict[Hashable, list[_Entry]] = defaultdict(list)
    for entry in entries:
        if key(entry) is not None:
            groups[key(entry)].append(entry)
    return [group for group in groups.values() if len(group) > 1]
