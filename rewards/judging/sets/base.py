"""What a set of judgements is: captions that people rated, or pairs of captions of which one is better."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    published: Literal["tau_b", "tau_c"] | None
    """Which of Kendall's two correlations papers print for this set; None where nobody does."""
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


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        JudgingSetError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise JudgingSetError(f"{path}: {error}") from error


def tab_rows(path: Path, columns: int) -> list[list[str]]:
    """Read a file of lines of ``columns`` fields, separated by tabs; empty lines are skipped.

    Raises:
        JudgingSetError: it cannot be read, or a line has another number of fields.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgingSetError(f"{path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            fields = line.rstrip("\r").split("\t")
            if len(fields) != columns:
                raise JudgingSetError(
                    f"{path}, line {number} has {len(fields)} fields: {line!r:.80}: expected {columns}, divided by tabs"
                )
            rows.append(fields)
    return rows


def text_of(item: Any, key: str, where: str) -> str:
    """Return ``item[key]``, which must be text.

    Raises:
        JudgingSetError: ``item`` is no object, or the value is no text.
    """
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise JudgingSetError(f"{where}: {key!r} is {value!r:.80}: expected text")
    return value


def number_of(text: Any, where: str) -> float:
    """Return a number that stands in a file, as text or as a number.

    Raises:
        JudgingSetError: it is none, or is not finite.
    """
    try:
        value = float(text)
    except (TypeError, ValueError) as error:
        raise JudgingSetError(f"{where} is {text!r:.80}: expected a number") from error
    if value != value or value in (float("inf"), float("-inf")):
        raise JudgingSetError(f"{where} is {text!r:.80}: expected a finite number")
    return value


def single_spaced(text: str) -> str:
    """Return the text with single spaces, and none around it."""
    return " ".join(text.split())
