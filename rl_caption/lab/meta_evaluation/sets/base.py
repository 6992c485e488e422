"""What a set of judgements is, and readers of its files: JSON, JSON lines, tables, COCO
annotations.

What Python says about a wrong row is raised as a ``DataError`` that names the file and the row.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from rewards.base import naming
from rewards.images import Frames, ImageSource
from rl_caption.data.base import DataError
from rl_caption.data.plain_files import parse_json, shown, single_spaced

COCO_CAPTIONS = "captions_val2014.json"
READING = (LookupError, TypeError, ValueError, AttributeError)
"""What Python raises for a row that is not as expected."""
Image = ImageSource | Frames
Converted = TypeVar("Converted")


@dataclass(frozen=True)
class RatedCaptions:
    """N judgements, each a rating of one caption of one image. Several ratings of a caption are
    several judgements.
    """

    name: str
    captions: Sequence[str]
    """[N] as written."""
    ratings: Sequence[float]
    """[N], higher is better."""
    image_ids: Sequence[str]
    """[N]"""
    images: Sequence[Image] | None
    """[N], not opened; None where the set was found without its images."""
    references: Sequence[Sequence[str]] | None
    """[N] lists, or None where the set has none."""
    published: Literal["tau_b", "tau_c", "pearson"] | None
    """Which correlation papers print for this set; None where nobody does."""
    convention: str
    """What is compared with what, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Why judgements of the files are not among the N -> how many."""
    within_images: bool = False
    """Whether the captions of one image are compared with each other, too."""
    text_alone: bool = False
    """Whether captions are rated without an image: papers print Pearson, Spearman and Kendall's
    tau_b.
    """
    released: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Heading -> [N] scores that the files have, which are compared with people, too."""


@dataclass(frozen=True)
class CaptionPairs:
    """P pairs of captions of one image each, and which of the two is better."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    preference: Sequence[float]
    """[P] 1 where the first is better, 0 where the second is, 0.5 where people are divided evenly.
    """
    kinds: Sequence[str]
    """[P] category of each pair."""
    image_ids: Sequence[str]
    images: Sequence[Image] | None
    references: Mapping[str, Sequence[Sequence[str]]]
    """Condition, such as ``4 references`` or ``draw 1`` -> [P] lists. Empty where the set has no
    references.
    """
    convention: str
    """What counts as right, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    by_image: bool = False
    """Whether the pairs of one image are one comparison, of the sums of their scores."""
    averaged: bool = False
    """Whether the conditions are draws of one experiment, whose accuracies are averaged; else each
    is reported.
    """
    ties: Literal["wrong", "half"] = "wrong"
    """What a pair with two equal scores counts."""
    shown_kinds: bool = True
    """Whether each kind is a figure; without, only the summary is."""
    summary: Literal["pairs", "kinds"] = "pairs"
    """What the summary averages over: all pairs alike, or the accuracies of the kinds."""


@dataclass(frozen=True)
class CaptionGroups:
    """G groups of K captions, each with an image; right is a group whose scores are in order."""

    name: str
    captions: Sequence[str]
    """[G * K], one group after the other."""
    image_ids: Sequence[str]
    """[G * K]"""
    images: Sequence[Image] | None
    kinds: Sequence[str]
    """[G] category of each group."""
    above: Mapping[str, Sequence[tuple[int, int]]]
    """Figure -> pairs (i, j), in all of which the i-th score of a group must be above the j-th."""
    convention: str
    texts_above: Mapping[str, Sequence[tuple[tuple[int, int], tuple[int, int]]]] = field(
        default_factory=dict
    )
    """Figure -> ((i, j), (k, l)): the cosine of captions i and j must be above that of k and l, for
    metrics with a text encoder.
    """
    excluded: Mapping[str, int] = field(default_factory=dict)
    ties: Literal["wrong", "right", "random"] = "wrong"
    """What equal scores count as; ``random`` is the expectation in a random order."""
    shown_kinds: bool = True
    summary: Literal["pairs", "kinds"] = "pairs"
    """As for ``CaptionPairs``."""


JudgementSet = RatedCaptions | CaptionPairs | CaptionGroups


class Rating(NamedTuple):
    """One judgement of ``RatedCaptions``."""

    image_id: str
    caption: str
    rating: float
    references: Sequence[str] | None = None
    image: Image | None = None


class Pair(NamedTuple):
    """One pair of ``CaptionPairs``."""

    image_id: str
    first: str
    second: str
    kind: str = "all pairs"
    preference: float = 1.0
    image: Image | None = None


def rated_captions(name: str, rows: Sequence[Rating], *more: Any, **options: Any) -> RatedCaptions:
    """``RatedCaptions`` of N >= 1 rows; ``more`` are the fields after ``references``."""
    ids, captions, ratings, references, images = map(list, zip(*rows, strict=True))
    with_references = [texts is not None for texts in references]
    if any(with_references) != all(with_references):
        raise DataError(f"{name}: some rows have no references: expected them in all or in none")
    return RatedCaptions(
        name,
        captions,
        ratings,
        ids,
        None if None in images else images,
        references if all(with_references) else None,
        *more,
        **options,
    )


def caption_pairs(name: str, rows: Sequence[Pair], *more: Any, **options: Any) -> CaptionPairs:
    """``CaptionPairs`` of P >= 1 rows; ``more`` are the fields from ``references`` on."""
    ids, first, second, kinds, preference, images = map(list, zip(*rows, strict=True))
    found = None if None in images else images
    return CaptionPairs(name, first, second, preference, kinds, ids, found, *more, **options)


def convert(
    path: Path, rows: Iterable[Any], function: Callable[[Any], Converted]
) -> list[Converted]:
    """Apply a function to the rows of a file; its errors name file and row."""
    converted = []
    for number, row in enumerate(rows, start=1):
        with naming(f"{path}, row {number}", READING, DataError):
            converted.append(function(row))
    return converted


def caption_of(text: str) -> str:
    """Text with single spaces; ``ValueError`` for a blank one."""
    if not text.strip():
        raise ValueError("a caption is empty")
    return single_spaced(text)


def captions_of(texts: list[str]) -> list[str]:
    """Texts with single spaces, without the blank ones; ``ValueError`` where none is left."""
    captions = [single_spaced(text) for text in texts if text.strip()]
    if isinstance(texts, str) or not captions:
        raise ValueError(f"expected a list of captions, not {shown(texts)}")
    return captions


@dataclass(frozen=True)
class Files:
    """Where the files of a set are: its ``folder``, and the user's folder of ``images`` if any."""

    name: str
    folder: Path
    images: Path | None = None
    partial: bool = False
    """Whether other numbers of judgements than the published ones are accepted."""

    def require(self, source: str, *names: str) -> Path:
        """The first file of ``names`` that is there; ``DataError`` says where to get it."""
        for file in names:
            if (self.folder / file).is_file():
                return self.folder / file
        needed = f"{self.name} needs {' or '.join(names)} in {str(self.folder)!r}"
        raise DataError(f"{needed}, which is not there. Get it: {source}")

    def read_counted(
        self, source: str, published: Mapping[str, int], function: Callable[[Any], Converted]
    ) -> Iterator[tuple[str, list[Converted]]]:
        """Yield name and converted rows of each ``NAME.json``; ``published``: name -> number."""
        for name, count in published.items():
            path = self.require(source, f"{name}.json")
            rows = json_rows(path)
            self.check_count(f"judgements in {path}", len(rows), count)
            yield name, convert(path, rows, function)

    def image_folder(self, *names: str) -> Path | None:
        """The folder of images that the user named, else the first of ``names`` that is there."""
        below = (self.folder / name for name in names)
        return self.images or next((folder for folder in below if folder.is_dir()), None)

    def check_count(self, what: str, count: int, published: int | None = None) -> None:
        """Refuse 0 and, unless ``partial``, another number than the published one."""
        if published is not None and count != published and not self.partial:
            raise DataError(
                f"{self.name} has {count} {what}, but {published} are published: the files are "
                "incomplete or another version, so figures would not be comparable. Set partial "
                "to use them anyway"
            )
        if not count:
            raise DataError(f"{self.name} has no {what}")


def json_rows(path: Path, key: str | None = None) -> list[Any]:
    """The rows of a JSON file: a list, the values of an object, or the list under ``key``."""
    content = parse_json(path.read_bytes(), path)
    with naming(str(path), READING, DataError):
        rows = content if key is None else content[key]
        return list(rows.values() if isinstance(rows, dict) else rows)


def table_rows(
    path: Path,
    delimiter: str = ",",
    columns: Sequence[str] | None = None,
    spreadsheet: bool = False,
) -> list[dict[str, str]]:
    """Read the rows of a table; with tabs, quotation marks are plain characters.

    ``columns`` are those of a file whose first line does not name them. ``spreadsheet`` accepts
    Latin-1 where a file is not UTF-8, and rows with fewer fields (missing ones are empty).
    """
    content = path.read_bytes()
    with naming(str(path), (UnicodeError, csv.Error), DataError):
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            if not spreadsheet:
                raise
            text = content.decode("latin-1")
        rows: Any = csv.DictReader(
            io.StringIO(text, newline=""),
            columns,
            restval="" if spreadsheet else None,
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
        )
        table = []
        for row in rows:
            if not spreadsheet and (None in row or None in row.values()):
                fields = len(rows.fieldnames)
                raise DataError(f"{path}, line {rows.line_num}: expected {fields} fields")
            table.append(row)
    return table


def coco_id(name: str) -> str:
    """Id of the image that ``COCO_val2014_000000000012.jpg`` or ``12.jpg`` names; else the name."""
    digits = re.search(r"0*(\d+)\.\w+$", name)
    return digits[1] if digits else name


def coco_references(path: Path) -> dict[str, list[str]]:
    """Read COCO annotations: id of an image -> its captions, in order."""
    captions: dict[str, list[str]] = {}
    for image, caption in convert(
        path,
        json_rows(path, "annotations"),
        lambda row: (str(row["image_id"]), caption_of(row["caption"])),
    ):
        captions.setdefault(image, []).append(caption)
    return captions


def other_captions(
    file: Path, judged: Iterable[tuple[str, str]], path: Path
) -> list[list[str]] | None:
    """The other captions of N images with a judged caption, in COCO's annotations ``file``.

    Case, punctuation and spaces differ between the copies of COCO. Returns [N] lists, or None where
    ``file`` is not there. An image without another caption is a ``DataError`` that names ``path``,
    the file of the judgements, too.
    """
    if not file.is_file():
        return None

    def words(text: str) -> str:
        return single_spaced(re.sub(r"[^\w ]", " ", text.lower()))

    references, rows = coco_references(file), []
    for image, caption in judged:
        captions = references.get(coco_id(image), [])
        others = [text for text in captions if words(text) != words(caption)]
        if not others:
            raise DataError(
                f"{path} judges captions of {image!r:.80}, of which {file.name} has no other "
                f"caption"
            )
        rows.append(others)
    return rows
