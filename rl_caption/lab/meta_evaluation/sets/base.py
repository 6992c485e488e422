"""What a set of judgements is, and readers of its files: JSON, tables, COCO annotations.

What Python says about a wrong row is raised as a ``DataError`` that names the file and the row.
"""

import io
import math
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
Order = Sequence[tuple[int, int]]
"""Pairs (i, j) of captions of a row: the i-th must score above the j-th."""
PAIR: Mapping[str, Order] = {"": [(0, 1)]}


class Judged(NamedTuple):
    """Captions of one image and what people say of them: a row of a set of judgements.

    A rated set has one caption a row, with its ``rating``. Other sets have K captions a row, whose
    scores must be in order.
    """

    image_id: str
    captions: Sequence[str]
    """[K] as written."""
    rating: float | None = None
    """Of the only caption; higher is better."""
    better: float = 1.0
    """Of a pair: 1 where the first caption is better, 0 the second, 0.5 where people are divided."""
    kind: str = ""
    """Category of the captions."""
    references: Sequence[Sequence[str]] = ()
    """A list for each of the set's ``conditions``; empty where the set has no references."""
    image: Image | None = None
    """Not opened; None where the set was found without its images."""


@dataclass(frozen=True)
class JudgementSet:
    """N rows with as many captions each, and how scores are compared with them."""

    name: str
    rows: Sequence[Judged]
    convention: str
    """What is compared with what, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Why judgements of the files are not among the N -> how many."""
    conditions: Sequence[str] = ("",)
    """Names of the lists of references of a row, such as ``4 references`` or ``draw 1``."""
    published: Literal["tau_b", "tau_c"] | None = None
    """Which correlation papers print for a rated set; None where nobody does."""
    within_images: bool = False
    """Whether the rated captions of one image are compared with each other, too."""
    text_alone: bool = False
    """Whether captions are rated without an image: papers print Pearson, Spearman and tau_b."""
    released: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Heading -> [N] scores that the files have, which are compared with people, too."""
    above: Mapping[str, Order] = field(default_factory=lambda: PAIR)
    """Figure -> pairs of captions, all of which must be in order in a row that is right."""
    texts_above: Mapping[str, Sequence[tuple[tuple[int, int], tuple[int, int]]]] = field(
        default_factory=dict
    )
    """Figure -> ((i, j), (k, l)): the cosine of captions i and j must be above that of k and l, for
    metrics with a text encoder.
    """
    ties: Literal["wrong", "half", "right", "random"] = "wrong"
    """What equal scores count as; ``random`` is the expectation in a random order."""
    by_image: bool = False
    """Whether the rows of one image are one comparison, of the sums of their scores."""
    averaged: bool = False
    """Whether conditions are draws of one experiment, whose accuracies are averaged."""
    shown_kinds: bool = True
    """Whether each kind is a figure; without, only the summary is."""
    summary: Literal["all", "kinds"] = "all"
    """What the summary averages over: all rows alike, or the accuracies of the kinds."""

    def __post_init__(self) -> None:
        if len({bool(row.references) for row in self.rows}) > 1:
            raise DataError(f"{self.name}: some rows have no references: expected all or none")

    @property
    def is_rated(self) -> bool:
        return self.rows[0].rating is not None

    @property
    def has_references(self) -> bool:
        return bool(self.rows[0].references)

    @property
    def image_ids(self) -> list[str]:
        return [row.image_id for row in self.rows]

    @property
    def images(self) -> list[Image] | None:
        """[N], or None where one is not there."""
        images = [row.image for row in self.rows if row.image is not None]
        return images if len(images) == len(self.rows) else None

    @property
    def captions(self) -> list[str]:
        """[N * K], one row after the other."""
        return [caption for row in self.rows for caption in row.captions]

    @property
    def references(self) -> list[Sequence[str]]:
        """[N] lists of the first condition."""
        return [row.references[0] for row in self.rows if row.references]

    @property
    def ratings(self) -> list[float]:
        return [row.rating for row in self.rows if row.rating is not None]


def convert(
    path: Path, rows: Iterable[Any], function: Callable[[Any], Converted]
) -> list[Converted]:
    """Apply a function to the rows of a file; its errors name file and row."""
    converted = []
    for number, row in enumerate(rows, start=1):
        with naming(f"{path}, row {number}", READING, DataError):
            converted.append(function(row))
    return converted


def rated(
    image: str, caption: str, rating: Any, references: Sequence[str] | None, photo: Any = None
) -> Judged:
    """A row of a rated set; ``ValueError`` for a blank caption or a rating that is no number."""
    lists = () if references is None else (references,)
    row = Judged(image, [caption_of(caption)], float(rating), references=lists, image=photo)
    if not math.isfinite(float(rating)):
        raise ValueError(f"the rating is {rating}")
    return row


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
        self, source: str, published: Mapping[str, int], function: Callable[[Any], Judged]
    ) -> Iterator[tuple[str, list[Judged]]]:
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

    def with_images(self, rows: Iterable[Judged], *names: str) -> list[Judged]:
        """The rows with the file ``image_id`` of the folder of images as their image."""
        folder = self.image_folder(*names)
        return [row._replace(image=folder and folder / row.image_id) for row in rows]

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


def table_rows(path: Path, sep: str = ",", columns: Sequence[str] | None = None) -> list[Any]:
    """The rows of a table as dictionaries of texts, "" where a row has too few fields.

    ``columns`` are those of a file whose first line does not name them. With tabs quotation marks
    are plain characters. A file that is not UTF-8 is Latin-1.
    """
    import pandas

    options: dict[str, Any] = {"sep": sep, "quoting": 3 if sep == "\t" else 0}
    if columns is not None:
        options |= {"names": columns, "header": None}
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        options["encoding"] = "latin-1"
    with naming(str(path), (ValueError,), DataError):
        table = pandas.read_csv(
            io.BytesIO(content), dtype=str, index_col=False, keep_default_na=False, **options
        )
    return table.fillna("").to_dict("records")


def coco_id(name: str) -> str:
    """Id of the image that ``COCO_val2014_000000000012.jpg`` or ``12.jpg`` names; else the name."""
    digits = re.search(r"0*(\d+)\.\w+$", name)
    return digits[1] if digits else name


def coco_references(path: Path) -> dict[str, list[str]]:
    """Read COCO annotations: id of an image -> its captions, in order."""
    captions: dict[str, list[str]] = {}

    def add(row: dict[str, Any]) -> None:
        captions.setdefault(str(row["image_id"]), []).append(caption_of(row["caption"]))

    convert(path, json_rows(path, "annotations"), add)
    return captions


def other_captions(file: Path, rows: Sequence[Judged], path: Path) -> list[list[str]] | None:
    """The other captions of the images of N rows in COCO's annotations; None without the file.

    Case, punctuation and spaces differ between the copies of COCO. An image without another caption
    than the row's first is a ``DataError`` that names ``path``, the file of the judgements, too.
    """
    if not file.is_file():
        return None

    def words(text: str) -> str:
        return single_spaced(re.sub(r"[^\w ]", " ", text.lower()))

    references, others = coco_references(file), []
    for row in rows:
        captions = references.get(coco_id(row.image_id), [])
        others.append([text for text in captions if words(text) != words(row.captions[0])])
        if not others[-1]:
            raise DataError(
                f"{path} judges captions of {row.image_id!r:.80}, of which {file.name} has no "
                "other caption"
            )
    return others
