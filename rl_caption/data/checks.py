"""Checks of a whole dataset before any training: every problem at once, with counts and the first offenders."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar, runtime_checkable

from PIL import Image

from rewards.images import Renderable, pixel_hash
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, DataModule, Row, load_image
from rl_caption.data.check_report import (
    ADVICE,
    BAD_FEATURES,
    DUPLICATE_IDS,
    EMPTY_CAPTIONS,
    LEAKED_CONTENT,
    LEAKED_FILES,
    LEAKED_IDS,
    MISSING,
    NO_REFERENCES,
    SHOWN,
    UNREADABLE,
    CheckReport,
    Problem,
)
from rl_caption.data.feature_checks import check_features
from rl_caption.data.features import ImageFeatures, as_image_features
from rl_caption.data.image_files import Verdict, check_image_files

__all__ = ["CheckReport", "ExplainsMissing", "Problem", "check_data", "check_row_images"]

K = TypeVar("K", bound=Hashable)


@runtime_checkable
class ExplainsMissing(Protocol):
    """A data module that can say which option would find missing images."""

    def explain_missing(self, missing: Sequence[str]) -> str:
        """Return one clause for the report."""
        ...


@dataclass(frozen=True)
class _Entry:
    """What the checks remember of a row: no pixels, no captions."""

    split: str
    index: int
    image_id: str
    path: str | None
    content: str | None
    features: ImageFeatures | None


@dataclass
class _Findings:
    """Problems and rows to leave out, as they are found."""

    counts: dict[str, int] = field(default_factory=dict)
    offenders: dict[str, list[str]] = field(default_factory=dict)
    dropped: set[tuple[str, int]] = field(default_factory=set)
    references: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def add(self, kind: str, offender: str, count: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        named = self.offenders.setdefault(kind, [])
        if len(named) < SHOWN:
            named.append(offender)

    def drop(self, entry: _Entry) -> None:
        self.dropped.add((entry.split, entry.index))

    def alive(self, entries: Sequence[_Entry]) -> list[_Entry]:
        return [entry for entry in entries if (entry.split, entry.index) not in self.dropped]


def check_data(
    data: DataModule,
    splits: Sequence[str],
    on_bad: Literal["fail", "skip"] = "fail",
    num_workers: int = 4,
    check_pixels: bool = True,
    check_images: bool = True,
    cache: str | Path | None = None,
    check_values: bool = False,
) -> CheckReport:
    """Check some splits of a dataset: files, captions, ids, and images that are in two splits.

    Images that are drawn when needed have no file to check. Of region features only the header is read here, unless
    ``check_values``; values are checked again when they are loaded.

    Args:
        data: the dataset.
        splits: the splits that will be used, together: leakage is looked for between them.
        on_bad: ``fail`` raises at the first problem, with the report of all; ``skip`` leaves the bad rows and the empty
            captions out. An image in two splits stays in the evaluation split (test before val before train).
        num_workers: threads that read files.
        check_pixels: decode every image; False only looks whether the file exists, and cannot see equal images.
        check_images: False where only features are read, and image files may be absent.
        cache: a JSON file that remembers the good images, so that the next run need not decode them again. What is
            remembered of features lies beside it.
        check_values: read the values of all region features: finite, and boxes in the image.

    Returns:
        The report; with ``fail`` it has no problems.

    Raises:
        DataError: ``fail`` and there is a problem, or ``skip`` and a split has no rows left; the message is the whole
            report. Also an unknown split or ``on_bad``.
    """
    if on_bad not in ("fail", "skip"):
        raise DataError(f"data.on_bad is {on_bad!r}: expected fail or skip")
    findings = _Findings()
    names = list(dict.fromkeys(splits))
    entries = [entry for split in names for entry in _read_split(data, split, check_images, findings)]
    if check_images:
        entries = _check_files(entries, num_workers, check_pixels, cache, findings)
    _check_features(entries, num_workers, cache, check_values, findings)
    _check_duplicates(entries, findings)
    for kind, key in (
        (LEAKED_IDS, lambda entry: entry.image_id),
        (LEAKED_FILES, lambda entry: os.path.abspath(entry.path) if entry.path else None),
        (LEAKED_CONTENT, lambda entry: entry.content),
    ):
        _check_leaks(entries, kind, key, findings)
    report = _report(data, names, entries, findings, skips=on_bad == "skip")
    empty = [split for split in names if not report.kept[split]]
    if on_bad == "fail" and not report.ok:
        raise DataError(str(report))
    if empty:
        raise DataError(f"{report}\nno rows are left in {', '.join(empty)}")
    return report


def check_row_images(
    rows: Sequence[Row], needed_by: str, check_pixels: bool = True, cache: str | Path | None = None
) -> None:
    """Check the image files of rows whose captioner reads features, where something else looks at the images.

    Args:
        rows: such as those of all splits that are used.
        needed_by: what looks at the images, for the message.
        check_pixels: decode every image; False only looks whether the file exists.
        cache: as for ``check_data``.

    Raises:
        DataError: image files are missing or unreadable; with the count and the first offenders.
    """
    paths = list(dict.fromkeys(str(row["image"]) for row in rows if isinstance(row["image"], str | Path)))
    verdicts = check_image_files(paths, check_pixels=check_pixels, cache=cache)
    bad = [verdict.error for verdict in verdicts.values() if verdict.error is not None]
    if bad:
        raise DataError(
            f"{needed_by} looks at images, and {len(bad)} of {len(paths)} cannot be used: {'; '.join(bad[:SHOWN])}; "
            "set data.image_root to their folder, or leave the reward out"
        )


def _read_split(data: DataModule, split: str, check_images: bool, findings: _Findings) -> Iterator[_Entry]:
    """Check the captions of every row, and remember what the other checks need."""
    for index, row in enumerate(data.split(split)):
        source, path, content, error = row["image"], None, None, None
        if isinstance(source, str | Path):
            path = str(source)
        elif isinstance(source, Image.Image):
            try:
                content = pixel_hash(load_image(source)) if check_images else None
            except DataError as failure:
                error = str(failure)
        elif not isinstance(source, Renderable):
            error = f"{type(source).__name__} is not an image: expected a path, a PIL image or a scene"
        features = row.get("features")
        features = None if features is None else as_image_features(features, row["image_id"])
        entry = _Entry(split, index, row["image_id"], path, content, features)
        if error is not None:
            findings.add(UNREADABLE, f"{split} image {entry.image_id!r}: {error}")
            findings.drop(entry)
        _check_captions(entry, row["references"], findings)
        yield entry


def _check_captions(entry: _Entry, references: Sequence[str], findings: _Findings) -> None:
    good = [reference for reference in references if _has_tokens(reference)]
    if len(good) < len(references):
        first = next(number for number, reference in enumerate(references, start=1) if not _has_tokens(reference))
        offender = f"{entry.split} image {entry.image_id!r}, caption {first}"
        findings.add(EMPTY_CAPTIONS, offender, len(references) - len(good))
        findings.references.setdefault(entry.split, {})[entry.index] = good
    if not good:
        findings.add(NO_REFERENCES, f"{entry.split} image {entry.image_id!r}")
        findings.drop(entry)


def _has_tokens(caption: str) -> bool:
    """Whether scorers see anything of a caption: of punctuation alone they do not."""
    return any(map(str.isalnum, caption)) or bool(tokenize(caption))


def _check_files(
    entries: list[_Entry], num_workers: int, check_pixels: bool, cache: str | Path | None, findings: _Findings
) -> list[_Entry]:
    """Check the image files, and return the entries with the hash of their content."""
    paths = list(dict.fromkeys(entry.path for entry in entries if entry.path is not None))
    verdicts = check_image_files(paths, num_workers, check_pixels, cache)
    checked = []
    for entry in entries:
        verdict = Verdict(entry.content) if entry.path is None else verdicts[entry.path]
        if verdict.missing:
            findings.add(MISSING, f"{entry.split} {entry.path!r}")
            findings.missing.append(str(entry.path))
        elif verdict.error is not None:
            findings.add(UNREADABLE, f"{entry.split} {verdict.error}")
        checked.append(replace(entry, content=verdict.content))
        if verdict.error is not None:
            findings.drop(entry)
    return checked


def _check_features(
    entries: Sequence[_Entry], num_workers: int, cache: str | Path | None, check_values: bool, findings: _Findings
) -> None:
    having = [entry for entry in entries if entry.features is not None]
    verdicts = check_features([entry.features for entry in having if entry.features], num_workers, cache, check_values)
    for entry, error in zip(having, verdicts, strict=True):
        if error is not None:
            findings.add(BAD_FEATURES, f"{entry.split}: {error}")
            findings.drop(entry)


def _check_duplicates(entries: Sequence[_Entry], findings: _Findings) -> None:
    """Find ids that a split has twice; the first good row stays."""
    for (split, image_id), group in _grouped(entries, lambda entry: (entry.split, entry.image_id)).items():
        if len(group) > 1:
            findings.add(DUPLICATE_IDS, f"{split} image {image_id!r}, {len(group)} times", len(group) - 1)
            for entry in findings.alive(group)[1:]:
                findings.drop(entry)


def _check_leaks(
    entries: Sequence[_Entry], kind: str, key: Callable[[_Entry], Hashable | None], findings: _Findings
) -> None:
    """Find what is in several splits; its rows in the most valuable split stay."""
    for value, group in _grouped(entries, key).items():
        # A file that is in two splits is named as a file, and not once more as equal content.
        same_file = kind == LEAKED_CONTENT and len({entry.path for entry in group}) == 1 and group[0].path is not None
        places = list(dict.fromkeys(entry.split for entry in group))
        if len(places) < 2 or same_file:
            continue
        named = " = ".join(f"{entry.split} {entry.path or entry.image_id!r}" for entry in _first_of_each_split(group))
        findings.add(kind, named if kind == LEAKED_CONTENT else f"{value!r} in {' and '.join(places)}")
        alive = findings.alive(group)
        home = max((entry.split for entry in alive), key=_value_of_split, default=None)
        for entry in alive:
            if entry.split != home:
                findings.drop(entry)


def _first_of_each_split(group: Sequence[_Entry]) -> list[_Entry]:
    first: dict[str, _Entry] = {}
    for entry in group:
        first.setdefault(entry.split, entry)
    return list(first.values())


def _value_of_split(split: str) -> int:
    """Rank splits by the harm of losing a row: training data 0, validation 1, tests 2."""
    if split.startswith("train") or split == "restval":
        return 0
    return 1 if split.startswith(("val", "dev")) else 2


def _grouped(entries: Sequence[_Entry], key: Callable[[_Entry], K | None]) -> dict[K, list[_Entry]]:
    groups: dict[K, list[_Entry]] = {}
    for entry in entries:
        value = key(entry)
        if value is not None:
            groups.setdefault(value, []).append(entry)
    return groups


def _report(
    data: DataModule, names: Sequence[str], entries: Sequence[_Entry], findings: _Findings, skips: bool
) -> CheckReport:
    advice = dict(ADVICE)
    if findings.missing and isinstance(data, ExplainsMissing):
        advice[MISSING] = data.explain_missing(findings.missing)
    problems = tuple(
        Problem(kind, findings.counts[kind], tuple(findings.offenders[kind]), text)
        for kind, text in advice.items()
        if kind in findings.counts
    )
    rows, kept = dict.fromkeys(names, 0), {name: list[int]() for name in names}
    for entry in entries:
        rows[entry.split] += 1
    for entry in findings.alive(entries):
        kept[entry.split].append(entry.index)
    return CheckReport(rows, problems, kept, findings.references, skips)
