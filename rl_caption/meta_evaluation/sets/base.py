"""What a set of judgements is: captions that people rated, or pairs of captions of which one is better."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rewards.images import ImageSource


class JudgingSetError(ValueError):
    """A set of judgements cannot be used; the message names the file, what is wrong, and what to get where."""


@dataclass(frozen=True)
class RatedCaptions:
    """N judgements, each a rating of one caption of one image. Several ratings of a caption are several judgements."""

    name: str
    captions: Sequence[str]
    """[N] as written."""
    ratings: Sequence[float]
    """[N], higher is better."""
    image_ids: Sequence[str]
    """[N]"""
    images: Sequence[ImageSource] | None
    """[N], not opened; None where the set was found without its images."""
    references: Sequence[Sequence[str]] | None
    """[N] lists, or None where the set has none."""
    published: Literal["tau_b", "tau_c", "pearson", "spearman"] | None
    """Which correlation papers print for this set; None where nobody does. ``spearman`` is that of CxC's protocol."""
    convention: str
    """What is compared with what, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Why judgements of the files are not among the N -> how many."""
    within_images: bool = False
    """Whether the captions of one image are compared with each other, too."""


@dataclass(frozen=True)
class CaptionPairs:
    """P pairs of captions of one image each, and which of the two is better."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    preference: Sequence[float]
    """[P] 1 where the first is better, 0 where the second is, 0.5 where people are divided evenly."""
    kinds: Sequence[str]
    """[P] category of each pair."""
    image_ids: Sequence[str]
    images: Sequence[ImageSource] | None
    references: Mapping[str, Sequence[Sequence[str]]]
    """Condition, such as ``4 references`` or ``draw 1`` -> [P] lists. Empty where the set has no references."""
    convention: str
    """What counts as right, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    averaged: bool = False
    """Whether the conditions are draws of one experiment, whose accuracies are averaged; else each is reported."""
    ties: Literal["wrong", "half"] = "wrong"
    """What a pair with two equal scores counts."""
    shown_kinds: bool = True
    """Whether each kind is a figure; without, only the summary is."""
    summary: Literal["pairs", "kinds"] = "pairs"
    """What the summary averages over: all pairs alike, or the accuracies of the kinds."""


JudgedSet = RatedCaptions | CaptionPairs


def require(folder: Path, name: str, names: Sequence[str], source: str) -> Path:
    """Return the first of ``names`` that is in ``folder``.

    Args:
        folder: where the set is.
        name: of the set.
        names: files, any of which will do, or one.
        source: where they come from.

    Raises:
        JudgingSetError: none of them is there.
    """
    for file in names:
        if (folder / file).is_file():
            return folder / file
    raise JudgingSetError(f"{name} needs {' or '.join(names)} in {str(folder)!r}, which is not there. Get it: {source}")


def image_folder(folder: Path, images: Path | None, names: Sequence[str]) -> Path | None:
    """Return the folder of the images: ``images``, or the first of ``names`` that is below ``folder``, or None.

    Raises:
        JudgingSetError: ``images`` is no folder.
    """
    if images is not None:
        if not images.is_dir():
            raise JudgingSetError(f"images = {str(images)!r} is not a folder: expected the one with the set's images")
        return images
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def check_count(name: str, what: str, found: int, published: int, partial: bool) -> None:
    """Compare a count with the published one.

    Raises:
        JudgingSetError: they differ, and the caller does not want a part of the set.
    """
    if found != published and not partial:
        raise JudgingSetError(
            f"{name} has {found} {what}, published are {published}: the files are incomplete or of another version, "
            "and figures would not compare. Set partial to judge by what is there"
        )


def read_text(path: Path, fallback: str | None = None) -> str:
    """Read a text file in UTF-8, or in the encoding ``fallback`` where it is not that.

    Raises:
        JudgingSetError: it cannot be read, is in another encoding, or is damaged (NUL bytes).
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JudgingSetError(f"{path}: {error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if fallback is None:
            line = content.count(b"\n", 0, error.start) + 1
            raise JudgingSetError(f"{path}, line {line}: {error}: expected text in UTF-8") from error
        text = content.decode(fallback)
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise JudgingSetError(f"{path}, line {line} has NUL bytes: the file is damaged, get it again")
    return text


def parse_json(text: str, where: str) -> Any:
    """Parse JSON.

    Raises:
        JudgingSetError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise JudgingSetError(f"{where} is not JSON that can be read ({error}): {text!r:.80}") from error


def _whole_number(digits: str) -> float:
    """What no number of a set can be becomes infinite, so that whoever knows the row refuses it."""
    return int(digits) if len(digits) < 300 else float("inf")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises as ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path), str(path))


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each object of a file of JSON lines stands, and the object; empty lines are skipped.

    Raises:
        JudgingSetError: it cannot be read, or a line is no object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            item = parse_json(line, where)
            if not isinstance(item, dict):
                raise JudgingSetError(f"{where} is {line!r:.80}: expected an object")
            yield where, item


def csv_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield where each row of a CSV file with a header stands, and its fields by column.

    Args:
        path: the file.
        columns: which it must have; it may have others.

    Raises:
        JudgingSetError: it cannot be read, lacks a column, or a row has more or fewer fields than the header.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        head = next(reader, [])
        if not set(columns) <= set(head):
            raise JudgingSetError(f"{path} has the columns {head[:20]!r:.200}: expected {', '.join(columns)}")
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(head):
                raise JudgingSetError(f"{where} has {len(row)} fields: expected {len(head)}, as in the first line")
            yield where, dict(zip(head, row, strict=True))
    except csv.Error as error:
        raise JudgingSetError(f"{path}, line {reader.line_num}: {error}") from error


def tab_rows(path: Path, columns: int) -> list[list[str]]:
    """Read a file of lines of ``columns`` fields, separated by tabs; empty lines are skipped.

    Raises:
        JudgingSetError: it cannot be read, or a line has another number of fields.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            fields = line.rstrip("\r").split("\t")
            if len(fields) != columns:
                raise JudgingSetError(
                    f"{path}, line {number} has {len(fields)} fields: {line!r:.80}: expected {columns}, divided by tabs"
                )
            rows.append(fields)
    return rows


def list_of(content: Any, path: Path, key: str | None = None) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, or of the one under ``key`` of an object.

    Raises:
        JudgingSetError: there is no such list, or one of its items is no object.
    """
    found = content if key is None else content.get(key) if isinstance(content, dict) else None
    name = "" if key is None else key
    if not isinstance(found, list):
        wanted = f"an object with {key!r}, a list of objects" if key else "a list of objects"
        raise JudgingSetError(f"{path} is {content!r:.80}: expected {wanted}")
    for number, item in enumerate(found):
        if not isinstance(item, dict):
            raise JudgingSetError(f"{path}, {name}[{number}] is {item!r:.80}: expected an object")
    return found


def text_of(item: Any, key: str, where: str) -> str:
    """Return ``item[key]``, which must be text.

    Raises:
        JudgingSetError: ``item`` is no object, or the value is no text.
    """
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise JudgingSetError(f"{where}: {key!r} is {value!r:.80}: expected text")
    return value


def texts_of(value: Any, where: str) -> list[str]:
    """Return a list of texts with single spaces, less empty ones.

    Raises:
        JudgingSetError: it is none, or has no text.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise JudgingSetError(f"{where} is {value!r:.80}: expected a list of texts")
    texts = [single_spaced(text) for text in value if text.strip()]
    if not texts:
        raise JudgingSetError(f"{where} is {value!r:.80}: expected at least one text")
    return texts


def number_of(text: Any, where: str) -> float:
    """Return a number that stands in a file, as text or as a number.

    Raises:
        JudgingSetError: it is none, or is not finite.
    """
    try:
        value = math.nan if isinstance(text, bool) else float(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise JudgingSetError(f"{where} is {text!r:.80}: expected a number") from error
    if not math.isfinite(value):
        raise JudgingSetError(f"{where} is {text!r:.80}: expected a finite number")
    return value


def single_spaced(text: str) -> str:
    """Return the text with single spaces, and none around it."""
    return " ".join(text.split())
