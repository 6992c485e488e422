"""What a set of judgements is, and readers of its files: JSON, JSON lines, tables, COCO annotations.

Every reader raises ``DataError``, whose message names the file, the row and the value.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rewards.images import Frames, ImageSource
from rewards.language.caption_qa import ImageQuestion
from rl_caption.data import plain_files
from rl_caption.data.base import DataError
from rl_caption.data.jsonl import read_row
from rl_caption.data.plain_files import parse_json, shown, single_spaced

COCO_CAPTIONS = "captions_val2014.json"


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
    images: Sequence[ImageSource | Frames] | None
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
    """Whether captions are rated without an image: papers print Pearson, Spearman and Kendall's tau_b."""
    released: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Heading -> [N] scores that the files have, which are compared with people, too."""
    benchmark: str | None = None
    """The key in ``published.PUBLISHED`` of the figures that papers print for these judgements; None where others are
    judged."""
    questions: Mapping[str, Sequence[ImageQuestion]] | None = None
    """Id of each image -> questions of it, for ``caption_qa``; None where there are none."""


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
    images: Sequence[ImageSource | Frames] | None
    references: Mapping[str, Sequence[Sequence[str]]]
    """Condition, such as ``4 references`` or ``draw 1`` -> [P] lists. Empty where the set has no references."""
    convention: str
    """What counts as right, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    by_image: bool = False
    """Whether the pairs of one image are one comparison, of the sums of their scores."""
    averaged: bool = False
    """Whether the conditions are draws of one experiment, whose accuracies are averaged; else each is reported."""
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
    images: Sequence[ImageSource | Frames] | None
    kinds: Sequence[str]
    """[G] category of each group."""
    above: Mapping[str, Sequence[tuple[int, int]]]
    """Figure -> pairs (i, j), in all of which the i-th score of a group must be above the j-th."""
    convention: str
    texts_above: Mapping[str, Sequence[tuple[tuple[int, int], tuple[int, int]]]] = field(
        default_factory=dict
    )
    """Figure -> ((i, j), (k, l)): the cosine of captions i and j must be above that of k and l, for metrics with a text
    encoder."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    ties: Literal["wrong", "right", "random"] = "wrong"
    """What equal scores count as; ``random`` is the expectation in a random order."""
    shown_kinds: bool = True
    summary: Literal["pairs", "kinds"] = "pairs"
    """As for ``CaptionPairs``."""


JudgementSet = RatedCaptions | CaptionPairs | CaptionGroups


class Rating(NamedTuple):
    """One judgement of ``RatedCaptions``."""

    image: str
    """File name, or another id."""
    caption: str
    rating: float
    references: Sequence[str] | None = None
    group: str | None = None
    """The id of the image, where it is not ``image``."""


class Pair(NamedTuple):
    """One pair of ``CaptionPairs``."""

    image: str
    """File name, or another id."""
    first: str
    second: str
    kind: str = "all pairs"
    preference: float = 1.0


Images = Path | Sequence[ImageSource | Frames] | None
"""The folder of the files that N rows name, or the N images."""


def rated_captions(
    name: str, rows: Sequence[Rating], images: Images, *more: Any, **options: Any
) -> RatedCaptions:
    """``RatedCaptions`` of N >= 1 rows, all with references or none; ``more`` are the fields after ``references``."""
    files, captions, ratings, references, groups = (
        list(column) for column in zip(*rows, strict=True)
    )
    image_ids = [
        file if group is None else group for file, group in zip(files, groups, strict=True)
    ]
    references_or_none = None if references[0] is None else references
    return RatedCaptions(
        name,
        captions,
        ratings,
        image_ids,
        image_files(images, files),
        references_or_none,
        *more,
        **options,
    )


def caption_pairs(
    name: str, rows: Sequence[Pair], images: Images, *more: Any, **options: Any
) -> CaptionPairs:
    """``CaptionPairs`` of P >= 1 rows; ``more`` are the fields from ``references`` on."""
    files, first, second, kinds, preference = (list(column) for column in zip(*rows, strict=True))
    texts = first, second, preference, kinds, files
    return CaptionPairs(name, *texts, image_files(images, files), *more, **options)


def image_files(images: Images, names: Iterable[str]) -> Sequence[ImageSource | Frames] | None:
    """The files of images in their folder; images are returned as they are, and None, if they were not found."""
    return [images / name for name in names] if isinstance(images, Path) else images


class Row(NamedTuple):
    """A row of a file; values that are not as expected are refused by its file, position, key and value."""

    values: Mapping[str, Any]
    where: str

    def refusal(self, key: str, expected: str) -> DataError:
        """The error that says what was expected of the value at ``key``."""
        return DataError(
            f"{self.where}: {key!r} is {shown(self.values.get(key))}: expected {expected}"
        )

    def text(self, key: str) -> str:
        """Text that is not blank, as written."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise self.refusal(key, "text")
        return value

    def caption(self, key: str) -> str:
        """Text with single spaces."""
        return single_spaced(self.text(key))

    def texts(self, key: str) -> list[str]:
        """A list of texts without the blank ones, of which at least one must be left."""
        value = self.values.get(key)
        are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not are_texts or not "".join(value).strip():  # type: ignore[arg-type]
            raise self.refusal(key, "a list of at least one text")
        return [text for text in value if text.strip()]  # type: ignore[union-attr]

    def captions(self, key: str) -> list[str]:
        """As ``texts``, with single spaces."""
        return [single_spaced(text) for text in self.texts(key)]

    def number(self, key: str) -> float:
        """A finite number, or the text of one."""
        value = self.values.get(key)
        number = math.nan
        if not isinstance(value, bool):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number):
            raise self.refusal(key, "a finite number")
        return number

    def identifier(self, key: str) -> str:
        """A whole number or text, as text."""
        value = self.values.get(key)
        if not isinstance(value, int | str):
            raise self.refusal(key, "a whole number or text")
        return str(value)

    def row(self, key: str) -> Row:
        """An object, as a row."""
        if not isinstance(self.values.get(key), dict):
            raise self.refusal(key, "an object")
        return Row(self.values[key], f"{self.where}, {key!r:.80}")

    def rows(self, key: str) -> list[Row]:
        """A list of objects, as rows."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.refusal(key, "a list of objects")
        return [
            _object(item, f"{self.where}, {key:.80}[{number}]") for number, item in enumerate(value)
        ]


def _object(value: Any, where: str | Path, expected: str = "an object") -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {shown(value)}: expected {expected}")
    return Row(value, str(where))


@dataclass(frozen=True)
class Files:
    """Where the files of a set are: its ``folder``, and the folder of its ``images`` if the user named one."""

    name: str
    folder: Path
    images: Path | None = None
    partial: bool = False
    """Whether other numbers of judgements than the published ones are accepted."""

    def require(self, source: str, *names: str) -> Path:
        """The first file of ``names`` that is there; if none is, ``DataError`` says where to get it (``source``)."""
        for file in names:
            if (self.folder / file).is_file():
                return self.folder / file
        needed = f"{self.name} needs {' or '.join(names)} in {str(self.folder)!r}"
        raise DataError(f"{needed}, which is not there. Get it: {source}")

    def read_counted(
        self, source: str, published: Mapping[str, int | None], what: str
    ) -> Iterator[tuple[str, list[Row]]]:
        """Yield name and rows of each JSON file ``NAME.json``; ``published`` is name -> number of rows, if known."""
        for name, count in published.items():
            path = self.require(source, f"{name}.json")
            rows = json_rows(path)
            self.check_count(f"{what} in {path}", len(rows), count)
            yield name, rows

    def image_folder(self, *names: str) -> Path | None:
        """The folder of the images: that which the user named, else the first of ``names`` that is there, else None."""
        below = (self.folder / name for name in names)
        return self.images or next((folder for folder in below if folder.is_dir()), None)

    def check_count(self, what: str, count: int, published: int | None = None) -> None:
        """Raise ``DataError`` where nothing was found or, unless ``partial``, not the published number (if known)."""
        if published is not None and count != published and not self.partial:
            raise DataError(
                f"{self.name} has {count} {what}, but {published} are published: the files are incomplete or another "
                "version, so figures would not be comparable. Set partial to use them anyway"
            )
        if not count:
            raise DataError(f"{self.name} has no {what}")


def with_questions(rated: RatedCaptions, file: str | Path, partial: bool = False) -> RatedCaptions:
    """The set with the questions in JSON lines as ``rl-caption questions`` writes them (``data.format: jsonl``).

    ``image_id``, or ``image`` where it is absent, is the id that the set has for the image; of the same image every
    line has the same questions. With ``partial`` judgements of images without questions are excluded, and further
    images are of no effect.

    Raises:
        DataError: the file is missing, a line is wrong or, unless ``partial``, of an image that the set does not have,
            or an image has no questions. It names file, line and value.
    """
    questions: dict[str, Sequence[ImageQuestion]] = {}
    images = set(rated.image_ids)
    for _, where, item in plain_files.json_lines(Path(file)):
        _, row = read_row(item, where, Path(file).parent)
        if row["image_id"] not in images and not partial:
            example = shown(rated.image_ids[0])
            raise DataError(
                f"{where}: image_id {shown(row['image_id'])} is not in {rated.name}: it has {example}, ..."
            )
        if "questions" not in row:
            raise DataError(
                f"{where} has no 'questions': expected a list of {{question, choices, answer}}"
            )
        if questions.setdefault(row["image_id"], row["questions"]) != row["questions"]:
            raise DataError(
                f"{where}: image_id {shown(row['image_id'])} has other 'questions' in an earlier line"
            )
    absent = sorted(images - questions.keys())
    if absent and (not partial or len(absent) == len(images)):
        missing = f"of {len(absent)} of the {len(images)} images of {rated.name}, such as {shown(absent[0])}"
        raise DataError(
            f"{file} has no questions {missing}. Set partial to leave out their judgements"
        )
    digest = hashlib.sha256(
        repr(sorted((key, questions[key]) for key in images & questions.keys())).encode(
            errors="surrogatepass"
        )
    )
    convention = f"{rated.convention}; questions: {Path(file).name}[{digest.hexdigest()[:12]}]"
    kept = [image_id in questions for image_id in rated.image_ids]

    def keep(column: Any) -> Any:
        return None if column is None else list(compress(column, kept))

    return replace(
        rated,
        captions=keep(rated.captions),
        ratings=keep(rated.ratings),
        image_ids=keep(rated.image_ids),
        images=keep(rated.images),
        references=keep(rated.references),
        released={heading: keep(scores) for heading, scores in rated.released.items()},
        excluded={
            **rated.excluded,
            **({"the image has no questions": kept.count(False)} if absent else {}),
        },
        convention=convention,
        questions=questions,
    )


def benchmark_of(files: Files, benchmark: str) -> str | None:
    """``benchmark``, or None where other numbers of judgements are accepted, whose figures do not compare."""
    return None if files.partial else benchmark


def json_object(path: Path, expected: str = "an object") -> Row:
    """Read the object that a JSON file is."""
    return _object(parse_json(path.read_bytes(), path), path, expected)


def json_rows(path: Path, key: str | None = None) -> list[Row]:
    """Read the objects of a JSON file: a list, an object of id -> object, or the list under ``key``."""
    if key is not None:
        return json_object(path, f"an object with {key!r}, a list of objects").rows(key)
    content = parse_json(path.read_bytes(), path)
    if isinstance(content, list):
        content = {f"[{number}]": item for number, item in enumerate(content)}
    items = _object(content, path, "a list of objects").values.items()
    return [_object(item, f"{path}, {place:.80}") for place, item in items]


def json_lines(path: Path) -> list[Row]:
    """Read a file with a JSON object a line."""
    return [_object(item, where) for _, where, item in plain_files.json_lines(path)]


def table_rows(
    path: Path,
    columns: Sequence[str],
    delimiter: str = ",",
    *,
    head: bool = True,
    spreadsheet: bool = False,
) -> Iterator[Row]:
    """Yield the rows of a table, without empty lines. With tabs as ``delimiter``, quotation marks are plain characters.

    ``columns`` must be among those that the first line names; without a ``head`` line, they are the file's columns.
    ``spreadsheet`` accepts Latin-1 where a file is not UTF-8, and rows with more or fewer fields (missing ones are
    empty).
    """
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not spreadsheet:
            raise DataError(f"{path}: {error}: expected text in UTF-8") from error
        text = content.decode("latin-1")
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    try:
        names = next(reader, []) if head else list(columns)
        if not set(columns) <= set(names):
            raise DataError(
                f"{path} has the columns {names[:40]!r:.400}: expected {', '.join(columns)}"
            )
        for row in reader:
            if len(row) < 2 and not "".join(row).strip():
                continue
            where = f"{path}, line {reader.line_num}"
            if len(row) != len(names) and not spreadsheet:
                raise DataError(
                    f"{where} has {len(row)} fields: {shown(delimiter.join(row))}: expected {len(names)}"
                )
            yield Row(dict(zip_longest(names, row[: len(names)], fillvalue="")), where)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def coco_id(name: str) -> str:
    """Return the id of the image that ``COCO_val2014_000000000012.jpg`` or ``12.jpg`` names; else the name itself."""
    digits = re.search(r"0*(\d+)\.\w+$", name)
    return digits[1] if digits else name


def coco_references(path: Path) -> dict[str, dict[str, str]]:
    """Read COCO annotations: id of an image -> id of a caption (its place, if it has none) -> caption, in order."""
    captions: dict[str, dict[str, str]] = {}
    for number, row in enumerate(json_rows(path, "annotations")):
        captions_of_image = captions.setdefault(row.identifier("image_id"), {})
        captions_of_image[str(row.values.get("id", f"annotation {number}"))] = row.caption(
            "caption"
        )
    return captions


def other_captions(
    file: Path, judged: Iterable[tuple[str, str]], path: Path
) -> list[list[str]] | None:
    """Return, of N images and a judged caption of each, the other captions in COCO's annotations ``file``, [N] lists.

    Case, punctuation and spaces differ between the copies of COCO. None where ``file`` is not there; an image without
    another caption is a ``DataError``, which names ``path``, the file of the judgements, too.
    """
    if not file.is_file():
        return None

    def words(text: str) -> str:
        return single_spaced(re.sub(r"[^\w ]", " ", text.lower()))

    references, rows = coco_references(file), []
    for image, caption in judged:
        others = [
            text
            for text in references.get(coco_id(image), {}).values()
            if words(text) != words(caption)
        ]
        if not others:
            raise DataError(
                f"{path} judges captions of {image!r:.80}, of which {file.name} has no other caption"
            )
        rows.append(others)
    return rows
