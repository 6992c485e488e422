"""Checks of a whole dataset before training, which report all problems at once, with counts and
first offenders.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from rewards.base import RewardError
from rewards.images import Renderable, check_frames, open_image, pixel_hash
from rewards.text.tokenize import TOKENIZER, tokenize
from rl_caption.data.base import (
    SHOWN,
    DataError,
    DataModule,
    Row,
    RowView,
    Splits,
    with_references,
)
from rl_caption.data.features import ImageFeatures, as_image_features
from rl_caption.data.file_checks import (
    ImageFile,
    check_features,
    check_image_files,
    file_of,
    progress,
)
from rl_caption.data.plain_files import TextForms

_ONE_SPLIT = "keep each image in one split; data.on_bad: skip takes them out of train"
ADVICE = {
    (
        MISSING := "missing images"
    ): "complete the images, or set data.image_root to their folder (and of Karpathy JSON "
    "data.image_extension, data.flatten), or data.on_bad: skip",
    (UNREADABLE := "unreadable images"): "replace the files, or set data.on_bad: skip",
    (
        BAD_FEATURES := "missing or unusable features"
    ): "extract them again, or set data.on_bad: skip",
    (EMPTY_CAPTIONS := "empty captions"): "remove them, or set data.on_bad: skip",
    (NO_IMAGES := "rows without an image"): "add images; only the task distill_text does without",
    (
        NO_REFERENCES := "images without references"
    ): "add captions, or set data.on_bad: skip; only the task distill_image does without",
    (
        DUPLICATE_IDS := "duplicate image ids in a split"
    ): "write one row per image, with all its references",
    (LEAKED_IDS := "image ids in two splits"): "use one id per image, and each image in one split",
    (LEAKED_FILES := "image files in two splits"): _ONE_SPLIT,
    (LEAKED_CONTENT := "equal images in two splits"): _ONE_SPLIT,
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
        more = (
            f", and {self.count - len(self.offenders)} more"
            if self.count > len(self.offenders)
            else ""
        )
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.count} {self.kind}: {'; '.join(self.offenders)}{more}{advice}"


class Findings(dict[str, Problem]):
    """Problems by kind."""

    def add(self, problem_name: str, offender: str, count: int = 1) -> None:
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
        splits = ", ".join(f"{split} {count}" for split, count in self.rows.items())
        warned = [f"WARNING: {sentence}" for sentence in self.warnings]
        if self.ok:
            return "\n".join(
                [f"data: no problems in {sum(self.rows.values())} rows ({splits})", *warned]
            )
        summary = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"data: {summary} in {sum(self.rows.values())} rows ({splits}):"]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.skips:
            left_out = [
                f"{name} {n - len(self.kept[name])} of {n} rows" for name, n in self.rows.items()
            ]
            captions = sum(
                problem.count for problem in self.problems if problem.kind == EMPTY_CAPTIONS
            )
            lines.append(f"left out: {', '.join(left_out)}; empty captions: {captions}")
        return "\n".join([*lines, *warned])

    def good_rows_of(self, data: DataModule) -> DataModule:
        """The checked dataset with its good rows only. Splits that were not checked stay as they
        are.
        """
        splits = {split: data.split(split) for split in data.splits}
        for split, kept in self.kept.items():
            splits[split] = RowView(splits[split], partial(_good, kept), [*kept])
        return Splits(splits, getattr(data, "path", "the data"))


def _good(references: Mapping[int, list[str] | None], index: int, row: Row) -> Row:
    good = references[index]
    if good is None:
        return row
    return with_references(
        row, [n for n, caption in enumerate(row["references"]) if caption in good]
    )


@dataclass(slots=True)
class _Entry:
    """What the checks remember of a row, without pixels and captions."""

    split: str
    index: int
    image_id: str
    file: ImageFile | None = None
    content: str | None = None
    features: ImageFeatures | None = None
    references: list[str] | None = None
    """The non-empty references, where some are empty."""
    bad: bool = False

    @property
    def path(self) -> str | None:
        return None if self.file is None else self.file.path


def check_data(
    data: DataModule,
    splits: Sequence[str],
    on_bad: Literal["fail", "skip"] = "fail",
    num_workers: int = 4,
    check_pixels: bool = True,
    check_images: bool = True,
    cache: str | Path | None = None,
    check_values: bool = False,
    needs: Collection[str] = ("image", "text"),
    tokenizer: str | None = TOKENIZER,
) -> CheckReport:
    """Check splits of a dataset: image files, captions, ids, and leakage of images between these
    and all other splits.

    Rendered images have no file to check. Region features are checked by their headers, with
    ``check_values`` also by their values; loading checks values in any case. Of all other splits,
    ids and image files are compared.

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
        cache: a JSON file that remembers good images for the next run (and, beside it, good
            features).
        check_values: read the values of all region features: finite, and boxes inside the image.
        needs: what every row must have: an ``image``, a reference (``text``). What is there is
            checked in any case.
        tokenizer: ``data.tokenizer``, by which captions are split into words; None where only a
            model reads them.

    Raises:
        DataError: with ``fail`` there is a problem, or with ``skip`` a split has no rows left (the
            message is the report); or a split is unknown.
    """
    findings, forms, names = Findings(), TextForms(), list(dict.fromkeys(splits))
    entries = [
        entry
        for name in names
        for entry in _read_split(data, name, check_images, needs, findings, forms)
    ]
    if check_images:
        _check_files(entries, num_workers, check_pixels, cache, findings)
    _check_features(entries, num_workers, cache, check_values, findings)
    _check_duplicates(entries, findings)
    every = [*entries, *_other_splits(data, names)]
    if check_images and check_pixels:
        _hash_copies(every, names, num_workers, cache)
    _check_leaks(every, names, LEAKED_IDS, lambda entry: entry.image_id, findings)
    _check_leaks(
        every,
        names,
        LEAKED_FILES,
        lambda entry: os.path.abspath(entry.path) if entry.path else None,
        findings,
    )
    _check_leaks(every, names, LEAKED_CONTENT, lambda entry: entry.content, findings)
    problems = tuple(findings[problem_name] for problem_name in ADVICE if problem_name in findings)
    rows = {name: sum(entry.split == name for entry in entries) for name in names}
    good = [entry for entry in entries if not entry.bad]
    kept = {
        name: {entry.index: entry.references for entry in good if entry.split == name}
        for name in names
    }
    report = CheckReport(
        rows, problems, kept, skips=on_bad == "skip", warnings=tuple(forms.warnings(tokenizer))
    )
    if on_bad == "fail" and not report.ok:
        raise DataError(str(report))
    empty = [name for name in names if not kept[name]]
    if empty:
        raise DataError(f"{report}\nno rows are left in {', '.join(empty)}")
    return report


def check_row_images(
    rows: Sequence[Row], needed_by: str, check_pixels: bool = True, cache: str | Path | None = None
) -> None:
    """Check the image files of rows whose captioner reads features, but of which a reward reads the
    pixels.

    ``needed_by`` names that reward in messages; ``check_pixels`` and ``cache`` are as for
    ``check_data``. Raises ``DataError`` with the count and the first offenders.
    """
    files = [file for row in rows if (file := file_of(row["image"])) is not None]
    verdicts = check_image_files(files, check_pixels=check_pixels, cache=cache)
    bad = [verdict.error for verdict in verdicts.values() if verdict.error is not None]
    if bad:
        raise DataError(
            f"{needed_by} looks at images, and {len(bad)} of {len(verdicts)} cannot be used: "
            f"{'; '.join(bad[:SHOWN])}; "
            "set data.image_root to their folder, or leave the reward out"
        )


def _read_split(
    data: DataModule,
    split: str,
    check_images: bool,
    needs: Collection[str],
    findings: Findings,
    forms: TextForms,
) -> Iterator[_Entry]:
    """Check ids, captions and in-memory images of a split; yield what the other checks need of each
    row.
    """
    for index, row in enumerate(progress(data.split(split), f"checking {split}", "row")):
        entry, source = _Entry(split, index, row["image_id"]), row.get("image")
        name = f"{split} image {entry.image_id!r}"
        entry.file = file_of(source)
        if source is None and "image" in needs:
            findings.add(NO_IMAGES, name)
            entry.bad = True
        elif source is not None and entry.file is None:
            try:
                entry.content = _content(source, check_images)
            except RewardError as error:
                findings.add(UNREADABLE, f"{name}: {error}")
                entry.bad = True
        if row.get("features") is not None:
            entry.features = as_image_features(row["features"], entry.image_id)
        for caption in row["references"]:
            forms.add(f"reference of {name}", caption)
        empty = [
            number
            for number, caption in enumerate(row["references"], start=1)
            if not _has_tokens(caption)
        ]
        if empty:
            findings.add(EMPTY_CAPTIONS, f"{name}, caption {empty[0]}", len(empty))
            entry.references = [caption for caption in row["references"] if _has_tokens(caption)]
        if len(empty) == len(row["references"]) and "text" in needs:
            findings.add(NO_REFERENCES, name)
            entry.bad = True
        yield entry


def _other_splits(data: DataModule, names: Collection[str]) -> Iterator[_Entry]:
    """What the checks of leakage need of the rows of further splits, where images are files."""
    for name in [name for name in data.splits if name not in names]:
        rows = data.split(name)
        for index in progress(range(len(rows)), f"looking through {name}", "row"):
            with suppress(
                DataError
            ):  # a row that lacks what this training needs, but not the others
                row = rows[index]
                file = file_of(row.get("image"))
                if file is None:
                    break
                yield _Entry(name, index, row["image_id"], file)


def _hash_copies(
    entries: Sequence[_Entry], names: Collection[str], num_workers: int, cache: str | Path | None
) -> None:
    """Set the content of the files of splits other than ``names`` that have the size of a file in
    another split.
    """
    sizes: dict[int, set[str]] = {}
    files: list[tuple[_Entry, ImageFile, int]] = []
    for entry in entries:
        if entry.file is not None and os.path.isfile(entry.file.path):
            files.append((entry, entry.file, os.path.getsize(entry.file.path)))
            sizes.setdefault(files[-1][2], set()).add(entry.split)
    copies = [
        (entry, file)
        for entry, file, size in files
        if entry.split not in names and len(sizes[size]) > 1
    ]
    verdicts = check_image_files((file for _, file in copies), num_workers, cache=cache)
    for entry, file in copies:
        entry.content = verdicts[file].content


def _content(source: Any, check_images: bool) -> str | None:
    """Check an image that is no file; return the hash of a PIL image. Raises ``RewardError``."""
    if isinstance(source, Image.Image):
        return pixel_hash(open_image(source)) if check_images else None
    if isinstance(source, list | tuple) and source:
        check_frames(
            [frame for frame in source if check_images and not isinstance(frame, Renderable)]
        )
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
        if verdict.missing:
            findings.add(MISSING, f"{entry.split} {file.path!r}")
        elif verdict.error is not None:
            findings.add(UNREADABLE, f"{entry.split} {verdict.error}")
        entry.bad |= verdict.error is not None


def _check_features(
    entries: Sequence[_Entry],
    num_workers: int,
    cache: str | Path | None,
    check_values: bool,
    findings: Findings,
) -> None:
    features = [(entry, entry.features) for entry in entries if entry.features is not None]
    features += [
        (entry, view) for entry, item in features if entry.split == "train" for view in item.views
    ]
    errors = check_features([item for _, item in features], num_workers, cache, check_values)
    for (entry, _), error in zip(features, errors, strict=True):
        if error is not None:
            findings.add(BAD_FEATURES, f"{entry.split}: {error}")
            entry.bad = True


def _check_duplicates(entries: Sequence[_Entry], findings: Findings) -> None:
    """Find ids that occur several times in a split; the first good row stays."""
    for (split, image_id), group in _entries_of_repeated_keys(
        entries, lambda entry: (entry.split, entry.image_id)
    ).items():
        findings.add(
            DUPLICATE_IDS, f"{split} image {image_id!r}, {len(group)} times", len(group) - 1
        )
        for entry in [entry for entry in group if not entry.bad][1:]:
            entry.bad = True


def _check_leaks(
    entries: Sequence[_Entry],
    names: Collection[str],
    problem_name: str,
    key: Callable[[_Entry], Hashable | None],
    findings: Findings,
) -> None:
    """Find what several splits contain, one of ``names`` at least; only its rows in the most
    valuable stay good.
    """
    for value, group in _entries_of_repeated_keys(entries, key).items():
        first = {entry.split: entry for entry in reversed(group)}
        splits = list(dict.fromkeys(entry.split for entry in group))
        # A file that is in two splits is named as a file, and not once more as equal content.
        files = {os.path.abspath(entry.path) if entry.path else None for entry in group}
        same_file = problem_name == LEAKED_CONTENT and len(files) == 1 and None not in files
        if len(splits) < 2 or same_file or not set(splits) & set(names):
            continue
        named = " = ".join(
            f"{split} {first[split].path or first[split].image_id!r}" for split in splits
        )
        findings.add(
            problem_name,
            named if problem_name == LEAKED_CONTENT else f"{value!r} in {' and '.join(splits)}",
        )
        good = [entry for entry in group if not entry.bad]
        kept = max((entry.split for entry in good), key=_value_of_split, default=None)
        for entry in good:
            entry.bad = entry.split != kept


def _value_of_split(split: str) -> int:
    """Rank of a split by the harm of losing a row: training data 0, validation 1, test 2."""
    if split.startswith("train") or split == "restval":
        return 0
    return 1 if split.startswith(("val", "dev")) else 2


def _entries_of_repeated_keys(
    entries: Sequence[_Entry], key: Callable[[_Entry], Any]
) -> dict[Any, list[_Entry]]:
    """Entries that share their key with another entry, by key."""
    counts, groups = Counter(map(key, entries)), dict[Any, list[_Entry]]()
    for entry in entries:
        value = key(entry)
        if value is not None and counts[value] > 1:
            groups.setdefault(value, []).append(entry)
    return groups
