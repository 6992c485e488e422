"""Checks of a whole dataset before any training: every problem at once, with counts and the first offenders."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from rewards.base import RewardError
from rewards.images import Renderable, check_frames, pixel_hash
from rewards.text.tokenize import tokenize
from rl_caption.data.base import SHOWN, DataError, DataModule, Row, RowView, Splits, load_image, with_references
from rl_caption.data.features import ImageFeatures, as_image_features
from rl_caption.data.file_checks import ImageFile, check_features, check_image_files, file_of, progress

_ONE_SPLIT = "keep each image in one split; data.on_bad: skip takes them out of train"
ADVICE = {
    (MISSING := "missing images"): "complete the images, or set data.on_bad: skip",
    (UNREADABLE := "unreadable images"): "replace the files, or set data.on_bad: skip",
    (BAD_FEATURES := "missing or unusable features"): "extract them again, or set data.on_bad: skip",
    (EMPTY_CAPTIONS := "empty captions"): "remove them, or set data.on_bad: skip",
    (NO_IMAGES := "rows without an image"): "add images; only the tasks distill_text and grammar do without",
    (NO_REFERENCES := "images without references"): "add captions, or set data.on_bad: skip; only the task "
    "distill_image does without",
    (DUPLICATE_IDS := "duplicate image ids in a split"): "write one row per image, with all its references",
    (LEAKED_IDS := "image ids in two splits"): "use one id per image, and each image in one split",
    (LEAKED_FILES := "image files in two splits"): _ONE_SPLIT,
    (LEAKED_CONTENT := "equal images in two splits"): _ONE_SPLIT,
}
"""Kind of problem -> what would be right, in the order of the report."""


@dataclass
class Problem:
    """One kind of problem: how many rows (of empty captions, captions; of leakage, images), and the first ``SHOWN``."""

    kind: str
    advice: str
    """What would be right; may be empty."""
    count: int = 0
    offenders: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f", and {self.count - len(self.offenders)} more" if self.count > len(self.offenders) else ""
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.count} {self.kind}: {'; '.join(self.offenders)}{more}{advice}"


class Findings(dict[str, Problem]):
    """Problems by kind, as they are found."""

    def add(self, kind: str, offender: str, count: int = 1) -> None:
        """Count more of a kind; the first offenders are named."""
        problem = self.setdefault(kind, Problem(kind, ADVICE.get(kind, "")))
        problem.count += count
        if len(problem.offenders) < SHOWN:
            problem.offenders.append(offender)


@dataclass(frozen=True)
class CheckReport:
    """What the checks found in some splits of a dataset, and which rows are good."""

    rows: Mapping[str, int]
    problems: tuple[Problem, ...]
    kept: Mapping[str, Mapping[int, list[str] | None]]
    """Per split, indices of the rows to keep, ascending; with the references of those that lost empty ones."""
    skips: bool
    """Whether the bad rows are left out (``data.on_bad: skip``), which the text then says."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem at all."""
        return not self.problems

    def __str__(self) -> str:
        splits = ", ".join(f"{split} {count}" for split, count in self.rows.items())
        if self.ok:
            return f"data: no problems in {sum(self.rows.values())} rows ({splits})"
        lines = [f"data: {len(self.problems)} kinds of problem in {sum(self.rows.values())} rows ({splits}):"]
        lines += [f"  - {problem}" for problem in self.problems]
        if self.skips:
            left_out = [f"{name} {n - len(self.kept[name])} of {n} rows" for name, n in self.rows.items()]
            captions = sum(problem.count for problem in self.problems if problem.kind == EMPTY_CAPTIONS)
            lines.append(f"left out: {', '.join(left_out)}; empty captions: {captions}")
        return "\n".join(lines)

    def filtered(self, data: DataModule) -> DataModule:
        """``data``, which must be what was checked, with the good rows only; other splits stay as they are."""
        splits = {split: data.split(split) for split in data.splits}
        for split, kept in self.kept.items():
            if len(splits[split]) != self.rows[split]:
                raise DataError(f"split {split!r} has {len(splits[split])} rows, but {self.rows[split]} were checked")
            splits[split] = RowView(splits[split], partial(_good, kept), [*kept])
        return Splits(splits, getattr(data, "path", "the data"))


def _good(references: Mapping[int, list[str] | None], index: int, row: Row) -> Row:
    good = references[index]
    if good is None:
        return row
    return with_references(row, [n for n, caption in enumerate(row["references"]) if caption in good])


@dataclass(slots=True)
class _Entry:
    """What the checks remember of a row: no pixels, no captions."""

    split: str
    index: int
    image_id: str
    file: ImageFile | None = None
    content: str | None = None
    features: ImageFeatures | None = None
    references: list[str] | None = None
    """The good ones, where some are empty."""
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
) -> CheckReport:
    """Check some splits of a dataset: files, captions, ids, and images that are in two splits.

    Images that are drawn when needed have no file to check. Of region features only the header is read here, unless
    ``check_values``; values are checked again when they are loaded.

    Args:
        data: the dataset; where it has ``explain_missing(paths)``, the report has its advice about missing images.
        splits: the splits that will be used; leakage is looked for between them.
        on_bad: ``fail`` raises at the first problem, with the report of all; ``skip`` leaves the bad rows and the empty
            captions out. An image in two splits stays in the evaluation split (test before val before train).
        num_workers: threads that read files.
        check_pixels: decode every image; False only looks whether the file exists, and cannot see equal images.
        check_images: False where only features are read, and image files may be absent.
        cache: a JSON file that remembers the good images, and next to it the good features, for the next run.
        check_values: read the values of all region features: finite, and boxes in the image.
        needs: what every row must have: an ``image``, a reference (``text``). What is there is checked all the same.

    Raises:
        DataError: ``fail`` and there is a problem, or ``skip`` and a split has no rows left; the message is the whole
            report. Also an unknown split or ``on_bad``.
    """
    if on_bad not in ("fail", "skip"):
        raise DataError(f"data.on_bad is {on_bad!r}: expected fail or skip")
    findings, names = Findings(), list(dict.fromkeys(splits))
    entries = [entry for name in names for entry in _read_split(data, name, check_images, needs, findings)]
    missing = _check_files(entries, num_workers, check_pixels, cache, findings) if check_images else []
    _check_features(entries, num_workers, cache, check_values, findings)
    _check_duplicates(entries, findings)
    _check_leaks(entries, LEAKED_IDS, lambda entry: entry.image_id, findings)
    _check_leaks(entries, LEAKED_FILES, lambda entry: os.path.abspath(entry.path) if entry.path else None, findings)
    _check_leaks(entries, LEAKED_CONTENT, lambda entry: entry.content, findings)
    if missing and hasattr(data, "explain_missing"):
        findings[MISSING].advice = data.explain_missing(missing)
    problems = tuple(findings[kind] for kind in ADVICE if kind in findings)
    rows = {name: sum(entry.split == name for entry in entries) for name in names}
    good = [entry for entry in entries if not entry.bad]
    kept = {name: {each.index: each.references for each in good if each.split == name} for name in names}
    report = CheckReport(rows, problems, kept, skips=on_bad == "skip")
    if on_bad == "fail" and not report.ok:
        raise DataError(str(report))
    empty = [name for name in names if not kept[name]]
    if empty:
        raise DataError(f"{report}\nno rows are left in {', '.join(empty)}")
    return report


def check_row_images(
    rows: Sequence[Row], needed_by: str, check_pixels: bool = True, cache: str | Path | None = None
) -> None:
    """Check the image files of rows whose captioner reads features, where ``needed_by`` (in messages) looks at them.

    ``check_pixels`` and ``cache`` are as for ``check_data``. Raises ``DataError`` with the count and the first
    offenders.
    """
    files = [file for row in rows if (file := file_of(row["image"])) is not None]
    verdicts = check_image_files(files, check_pixels=check_pixels, cache=cache)
    bad = [verdict.error for verdict in verdicts.values() if verdict.error is not None]
    if bad:
        raise DataError(
            f"{needed_by} looks at images, and {len(bad)} of {len(verdicts)} cannot be used: {'; '.join(bad[:SHOWN])}; "
            "set data.image_root to their folder, or leave the reward out"
        )


def _read_split(
    data: DataModule, split: str, check_images: bool, needs: Collection[str], findings: Findings
) -> Iterator[_Entry]:
    """Check the captions of every row, and remember what the other checks need."""
    for index, row in enumerate(progress(data.split(split), f"checking {split}", "row")):
        entry, source = _Entry(split, index, row["image_id"]), row.get("image")
        name = f"{split} image {entry.image_id!r}"
        if not isinstance(entry.image_id, str):
            raise DataError(f"{name}, row {index}: the image_id is no text: expected a string, as in files of captions")
        entry.file = file_of(source)
        if source is None and "image" in needs:
            findings.add(NO_IMAGES, name)
            entry.bad = True
        elif source is not None and entry.file is None:
            try:
                entry.content = _content(source, check_images)
            except (DataError, RewardError) as error:
                findings.add(UNREADABLE, f"{name}: {error}")
                entry.bad = True
        if row.get("features") is not None:
            entry.features = as_image_features(row["features"], entry.image_id)
        empty = [number for number, caption in enumerate(row["references"], start=1) if not _has_tokens(caption)]
        if empty:
            findings.add(EMPTY_CAPTIONS, f"{name}, caption {empty[0]}", len(empty))
            entry.references = [caption for caption in row["references"] if _has_tokens(caption)]
        if len(empty) == len(row["references"]) and "text" in needs:
            findings.add(NO_REFERENCES, name)
            entry.bad = True
        yield entry


def _content(source: Any, check_images: bool) -> str | None:
    """The hash of an image in memory. ``DataError`` or ``RewardError`` where a row's image, no file, cannot be used."""
    if isinstance(source, Image.Image):
        return pixel_hash(load_image(source)) if check_images else None
    if isinstance(source, list | tuple) and source:
        check_frames([frame for frame in source if check_images and not isinstance(frame, Renderable)])
    elif not isinstance(source, Renderable):
        raise DataError(f"{type(source).__name__} is not an image: expected a path, a PIL image or a scene")
    return None


def _has_tokens(caption: str) -> bool:
    """Whether scorers see anything of a caption: of punctuation alone they do not."""
    return any(map(str.isalnum, caption)) or bool(tokenize(caption))


def _check_files(
    entries: Sequence[_Entry], num_workers: int, check_pixels: bool, cache: str | Path | None, findings: Findings
) -> list[str]:
    """Check the image files, give the entries the hash of their content, and return what is missing."""
    own = [(entry, entry.file) for entry in entries if entry.file is not None]
    verdicts = check_image_files((file for _, file in own), num_workers, check_pixels, cache)
    missing = []
    for entry, file in own:
        verdict = verdicts[file]
        entry.content = verdict.content
        if verdict.missing:
            findings.add(MISSING, f"{entry.split} {file.path!r}")
            missing.append(file.path)
        elif verdict.error is not None:
            findings.add(UNREADABLE, f"{entry.split} {verdict.error}")
        entry.bad |= verdict.error is not None
    return missing


def _check_features(
    entries: Sequence[_Entry], num_workers: int, cache: str | Path | None, check_values: bool, findings: Findings
) -> None:
    found = [(entry, entry.features) for entry in entries if entry.features is not None]
    found += [(entry, view) for entry, own in found if entry.split == "train" for view in own.views]
    errors = check_features([each for _, each in found], num_workers, cache, check_values)
    for (entry, _), error in zip(found, errors, strict=True):
        if error is not None:
            findings.add(BAD_FEATURES, f"{entry.split}: {error}")
            entry.bad = True


def _check_duplicates(entries: Sequence[_Entry], findings: Findings) -> None:
    """Find ids that a split has twice; the first good row stays."""
    for (split, image_id), group in _repeated(entries, lambda entry: (entry.split, entry.image_id)).items():
        findings.add(DUPLICATE_IDS, f"{split} image {image_id!r}, {len(group)} times", len(group) - 1)
        for entry in [entry for entry in group if not entry.bad][1:]:
            entry.bad = True


def _check_leaks(
    entries: Sequence[_Entry], kind: str, key: Callable[[_Entry], Hashable | None], findings: Findings
) -> None:
    """Find what is in several splits; its rows in the most valuable split stay."""
    for value, group in _repeated(entries, key).items():
        first = {entry.split: entry for entry in reversed(group)}
        splits = list(dict.fromkeys(entry.split for entry in group))
        # A file that is in two splits is named as a file, and not once more as equal content.
        same_file = kind == LEAKED_CONTENT and len({entry.path for entry in group}) == 1 and group[0].path is not None
        if len(splits) < 2 or same_file:
            continue
        named = " = ".join(f"{split} {first[split].path or first[split].image_id!r}" for split in splits)
        findings.add(kind, named if kind == LEAKED_CONTENT else f"{value!r} in {' and '.join(splits)}")
        good = [entry for entry in group if not entry.bad]
        kept = max((entry.split for entry in good), key=_value_of_split, default=None)
        for entry in good:
            entry.bad = entry.split != kept


def _value_of_split(split: str) -> int:
    """Rank splits by the harm of losing a row: training data 0, validation 1, tests 2."""
    if split.startswith("train") or split == "restval":
        return 0
    return 1 if split.startswith(("val", "dev")) else 2


def _repeated(entries: Sequence[_Entry], key: Callable[[_Entry], Any]) -> dict[Any, list[_Entry]]:
    """The entries whose key others have, too, by key."""
    counts, groups = Counter(map(key, entries)), dict[Any, list[_Entry]]()
    for entry in entries:
        value = key(entry)
        if value is not None and counts[value] > 1:
            groups.setdefault(value, []).append(entry)
    return groups
