"""Checks of a whole dataset before training, which report all problems at once, with counts and
first offenders.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from rewards.base import RewardError
from rewards.images import Renderable, check_frames, open_image, pixel_hash
from rewards.text.tokenize import TOKENIZER, tokenize
from rl_caption.data.base import SHOWN, DataError, LazyImage, Row, RowView, Splits, with_references
from rl_caption.data.features import ImageFeatures, as_image_features
from rl_caption.data.file_checks import (
    ImageFile,
    check_features,
    check_image_files,
    file_of,
    progress,
    refuse_bad_images,
)
from rl_caption.data.plain_files import TextForms

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


@dataclass
class Problem:
    """One kind of problem: how many rows have it (captions, if these are empty; images, if leaked),
    and the first.
    """

    kind: str
    advice: str
    """What to do about it; may be empty."""
    count: int = 0
    offenders: list[str] = field(default_factory=list)
    """The first ``SHOWN``."""

    def __str__(self) -> str:
        named = "; ".join(self.offenders)
        if self.count > len(self.offenders):
            named += f", and {self.count - len(self.offenders)} more"
        return f"{self.count} {self.kind}: {named}" + (f" ({self.advice})" if self.advice else "")


class Findings(dict[str, Problem]):
    """Problems by kind."""

    def add(
        self,
        problem_name: str,
        offender: str,
        count: int = 1,
    ) -> None:
        """Count a problem of a kind, and remember the first offenders."""
        problem = self.setdefault(problem_name, Problem(problem_name, ADVICE.get(problem_name, "")))
        problem.count += count
        if len(problem.offenders) < SHOWN:
            problem.offenders.append(offender)


@dataclass(frozen=True)
class CheckReport:
    """Problems found in the checked splits of a dataset, and the good rows."""

    rows: Mapping[str, int]
    problems: tuple[Problem, ...]
    kept: Mapping[str, Mapping[int, list[str] | None]]
    """Split -> index of each row to keep, ascending -> its non-empty references, or None where all
    are good.
    """
    skips: bool
    """Whether bad rows are left out (``data.on_bad: skip``)."""
    warnings: tuple[str, ...] = ()
    """Of references that are likely not meant as they are (``TextForms``)."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem at all."""
        return not self.problems

    def __str__(self) -> str:
        counts = ", ".join(f"{split} {count}" for split, count in self.rows.items())
        found = f"{len(self.problems) or 'no'} problem{'s' * (len(self.problems) != 1)}"
        lines = [f"data: {found} in {sum(self.rows.values())} rows ({counts})"]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.skips and self.problems:
            left_out = [
                f"{split} {count - len(self.kept[split])} of {count} rows"
                for split, count in self.rows.items()
            ]
            lines.append(f"left out: {', '.join(left_out)}")
        return "\n".join([*lines, *(f"WARNING: {sentence}" for sentence in self.warnings)])

    def good_rows_of(self, data: Splits) -> Splits:
        """The checked dataset with its good rows only. Splits that were not checked stay as they
        are.
        """
        splits = dict(data)
        for split, kept in self.kept.items():
            splits[split] = RowView(data[split], partial(_good, kept), [*kept])
        return Splits(splits, data.source)


def _good(references: Mapping[int, list[str] | None], index: int, row: Row) -> Row:
    good = references[index]
    if good is None:
        return row
    chosen = [number for number, text in enumerate(row["references"]) if text in good]
    return with_references(row, chosen)


@dataclass(slots=True)
class _Entry:
    """What the checks remember of a row, without pixels and captions."""

    split: str
    index: int
    image_id: str
    file: ImageFile | LazyImage | None = None
    content: str | None = None
    features: ImageFeatures | None = None
    references: list[str] | None = None
    """The non-empty references, where some are empty."""
    bad: bool = False

    @property
    def path(self) -> str | None:
        return os.path.abspath(self.file.path) if isinstance(self.file, ImageFile) else None


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
    findings, forms = Findings(), TextForms()
    names = list(dict.fromkeys(splits))
    entries: list[_Entry] = []
    for name in names:
        entries += _read_split(data, name, check_images, needs, findings, forms)
    if check_images:
        _check_files(entries, num_workers, check_pixels, cache, findings)
    _check_features(entries, num_workers, cache, findings)
    for (split, image_id), group in _repeated(entries, lambda e: (e.split, e.image_id)).items():
        times = f"{split} image {image_id!r}, {len(group)} times"
        findings.add(DUPLICATE_IDS, times, len(group) - 1)
        for entry in [entry for entry in group if not entry.bad][1:]:
            entry.bad = True
    every = [*entries, *_other_splits(data, names)]
    if check_images and check_pixels:
        _hash_copies(every, names, num_workers, cache)
    for kind, what in LEAKED.items():
        _check_leaks(every, names, kind, attrgetter(what), findings)
    kept: dict[str, dict[int, list[str] | None]] = {name: {} for name in names}
    for entry in entries:
        if not entry.bad:
            kept[entry.split][entry.index] = entry.references
    report = CheckReport(
        rows={name: len(data[name]) for name in names},
        problems=tuple(findings[kind] for kind in ADVICE if kind in findings),
        kept=kept,
        skips=on_bad == "skip",
        warnings=tuple(forms.warnings(tokenizer)),
    )
    if on_bad == "fail" and not report.ok:
        raise DataError(str(report))
    empty = [name for name in names if not kept[name]]
    if empty:
        raise DataError(f"{report}\nno rows are left in {', '.join(empty)}")
    return report


def check_row_images(
    rows: Sequence[Row],
    needed_by: str,
    check_pixels: bool = True,
    cache: str | Path | None = None,
) -> None:
    """Check the image files of rows whose captioner reads features, but of which ``needed_by`` (a
    reward) reads the pixels.

    Raises ``DataError`` with the count and the first offenders.
    """
    files = [file for row in rows if (file := file_of(row["image"])) is not None]
    refuse_bad_images(files, needed_by, check_pixels=check_pixels, cache=cache)


def _read_split(
    data: Splits,
    split: str,
    check_images: bool,
    needs: Collection[str],
    findings: Findings,
    forms: TextForms,
) -> Iterator[_Entry]:
    """Check ids, captions and in-memory images of a split; yield what the other checks need of each
    row.
    """
    for index, row in enumerate(progress(data[split], f"checking {split}", "row")):
        source = row.get("image")
        entry = _Entry(split, index, row["image_id"], file_of(source))
        name = f"{split} image {entry.image_id!r}"
        if source is None and "image" in needs:
            findings.add(NO_IMAGES, name)
            entry.bad = True
        elif check_images and source is not None and entry.file is None:
            try:
                entry.content = _content(source)
            except RewardError as error:
                findings.add(UNREADABLE, f"{name}: {error}")
                entry.bad = True
        if row.get("features") is not None:
            entry.features = as_image_features(row["features"], entry.image_id)
        good = []
        for number, caption in enumerate(row["references"], start=1):
            forms.add(f"reference of {name}", caption)
            if _has_tokens(caption):
                good.append(caption)
            else:
                findings.add(EMPTY_CAPTIONS, f"{name}, caption {number}")
        if len(good) < len(row["references"]):
            entry.references = good
        if not good and "text" in needs:
            findings.add(NO_REFERENCES, name)
            entry.bad = True
        yield entry


def _other_splits(data: Splits, names: Collection[str]) -> Iterator[_Entry]:
    """What the checks of leakage need of the rows of further splits, where images are files."""
    for name in [name for name in data if name not in names]:
        rows = data[name]
        for index in progress(range(len(rows)), f"looking through {name}", "row"):
            with suppress(DataError):  # a row that lacks what this training needs
                row = rows[index]
                file = file_of(row.get("image"))
                if file is None:
                    break
                yield _Entry(name, index, row["image_id"], file)


def _hash_copies(
    entries: Sequence[_Entry],
    names: Collection[str],
    num_workers: int,
    cache: str | Path | None,
) -> None:
    """Set the content of the files of splits other than ``names`` that have the size of a file in
    another split.
    """
    by_size: dict[int, list[_Entry]] = defaultdict(list)
    for entry in entries:
        if entry.path is not None and os.path.isfile(entry.path):
            by_size[os.path.getsize(entry.path)].append(entry)
    copies = []
    for group in by_size.values():
        if len({entry.split for entry in group}) > 1:
            copies += [entry for entry in group if entry.split not in names]
    files = [entry.file for entry in copies if entry.file is not None]
    verdicts = check_image_files(files, num_workers, cache=cache)
    for entry, file in zip(copies, files, strict=True):
        entry.content = verdicts[file].content


def _content(source: Any) -> str | None:
    """Check an image that is no file; return the hash of a PIL image. Raises ``RewardError``."""
    if isinstance(source, Image.Image):
        return pixel_hash(open_image(source))
    if isinstance(source, list | tuple) and source:
        check_frames([frame for frame in source if not isinstance(frame, Renderable)])
    return None


def _has_tokens(caption: str) -> bool:
    """Whether a caption has a token for the metrics, which drop punctuation."""
    return any(map(str.isalnum, caption)) or bool(tokenize(caption))


def _check_files(
    entries: Sequence[_Entry],
    num_workers: int,
    check_pixels: bool,
    cache: str | Path | None,
    findings: Findings,
) -> None:
    """Check the image files, and record the hashes of their content."""
    with_files = [(entry, entry.file) for entry in entries if entry.file is not None]
    verdicts = check_image_files((file for _, file in with_files), num_workers, check_pixels, cache)
    for entry, file in with_files:
        verdict = verdicts[file]
        entry.content = verdict.content
        if verdict.error is not None:
            kind = MISSING if verdict.missing else UNREADABLE
            findings.add(kind, f"{entry.split} {verdict.error}")
            entry.bad = True


def _check_features(
    entries: Sequence[_Entry],
    num_workers: int,
    cache: str | Path | None,
    findings: Findings,
) -> None:
    features = [(entry, entry.features) for entry in entries if entry.features is not None]
    for entry, item in list(features):
        if entry.split == "train":
            features += [(entry, view) for view in item.views]
    errors = check_features([item for _, item in features], num_workers, cache)
    for (entry, _), error in zip(features, errors, strict=True):
        if error is not None:
            findings.add(BAD_FEATURES, f"{entry.split}: {error}")
            entry.bad = True


def _check_leaks(
    entries: Sequence[_Entry],
    names: Collection[str],
    kind: str,
    key: Callable[[_Entry], Hashable | None],
    findings: Findings,
) -> None:
    """Find what several splits contain, one of ``names`` at least; only its rows in the most
    valuable stay good.
    """
    for value, group in _repeated(entries, key).items():
        first = {entry.split: entry for entry in reversed(group)}
        # A file that is in two splits is named as a file, and not once more as equal content.
        paths = {entry.path for entry in group}
        is_one_file = kind == LEAKED_CONTENT and len(paths) == 1 and None not in paths
        if len(first) < 2 or is_one_file or not first.keys() & {*names}:
            continue
        splits = list(dict.fromkeys(entry.split for entry in group))
        places = [repr(first[split].path or first[split].image_id) for split in splits]
        copies = " = ".join(f"{split} {place}" for split, place in zip(splits, places, strict=True))
        shared = f"{value!r} in {' and '.join(splits)}"
        findings.add(kind, copies if kind == LEAKED_CONTENT else shared)
        good = [entry for entry in group if not entry.bad]
        kept = max((entry.split for entry in good), key=_value_of_split, default=None)
        for entry in good:
            entry.bad = entry.split != kept


def _value_of_split(split: str) -> int:
    """Rank of a split by the harm of losing a row: training data 0, validation 1, test 2."""
    if split.startswith("train") or split == "restval":
        return 0
    return 1 if split.startswith(("val", "dev")) else 2


def _repeated(entries: Sequence[_Entry], key: Callable[[_Entry], Any]) -> dict[Any, list[_Entry]]:
    """Entries that share their key with another entry, by key."""
    groups: dict[Any, list[_Entry]] = defaultdict(list)
    for entry in entries:
        value = key(entry)
        if value is not None:
            groups[value].append(entry)
    return {value: group for value, group in groups.items() if len(group) > 1}
