"""Sets of judgements, and functions that the readers of their files share."""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rewards.images import Frames, ImageSource
from rl_caption.data.base import DataError
from rl_caption.data.plain_files import parse_json, single_spaced

READING = (LookupError, TypeError, ValueError, AttributeError)
"""Errors that Python raises for a malformed row."""
Image = ImageSource | Frames
Order = Mapping[str, Sequence[tuple[int, int]]]
"""Figure -> pairs (i, j): the i-th score must be above the j-th, in all pairs of a row
that is right.
"""


class Judged(NamedTuple):
    """Captions of one image and people's judgement of them: a row of a set.

    A rated set has one caption a row, with its ``rating``. Other sets have K captions a
    row, whose scores must be in order.
    """

    image_id: str
    captions: Sequence[str]
    """[K] captions as written."""
    rating: float | None = None
    """Rating of the only caption; higher is better."""
    better: float = 1.0
    """Better caption of a pair: 1 is the first, 0 the second, 0.5 where people are
    divided.
    """
    kind: str = ""
    """Category of the captions."""
    references: Sequence[Sequence[str]] = ()
    """A list of references for each of the set's ``conditions``; empty without any."""
    image: Image | None = None
    """The image, not opened; None where the set was found without its images."""


class JudgementSet(NamedTuple):
    """N rows with K captions each, and how scores are compared with people."""

    name: str
    rows: Sequence[Judged]
    convention: str
    """How scores are compared with people, in a line."""
    excluded: Mapping[str, int] = {}
    """Reason for leaving out judgements of the files -> their number."""
    conditions: Sequence[str] = ("",)
    """Names of the lists of references of a row, such as ``4 references`` or ``draw 1``."""
    published: Sequence[str] = ()
    """The correlations that papers print for a rated set."""
    within_images: bool = False
    """Whether the rated captions of one image are compared with each other, too."""
    text_alone: bool = False
    """Whether captions are rated without an image."""
    released: Mapping[str, Sequence[float]] = {}
    """Heading -> [N] scores of the files themselves, which are compared with people,
    too.
    """
    above: Order = {"": [(0, 1)]}
    """Order of the scores of a row's K captions."""
    texts_above: Order = {}
    """Order of the cosines of the pairs of captions (0, 1), (0, 2), ..., for metrics
    with a text encoder.
    """
    ties: Literal["wrong", "half"] = "wrong"
    """Credit for equal scores; ``half`` is the expectation in a random order."""
    averaged: bool = False
    """Whether conditions are draws of one experiment, whose accuracies are averaged."""
    shown_kinds: bool = True
    """Whether each kind has a figure; otherwise only the summary has."""
    by_image: bool = False
    """Whether the scores of an image's rows are summed before captions are compared."""
    summary: Literal["all", "kinds"] = "all"
    """Values that the summary averages: all rows alike, or the accuracies of the kinds."""

    @property
    def image_ids(self) -> list[str]:
        return [row.image_id for row in self.rows]

    @property
    def images(self) -> list[Image]:
        """[N] images; empty where the set was found without its images."""
        return [row.image for row in self.rows if row.image is not None]

    @property
    def captions(self) -> list[str]:
        """[N * K] captions, one row after the other."""
        return [caption for row in self.rows for caption in row.captions]

    @property
    def references(self) -> list[Sequence[str]]:
        """[N] lists of references of the first condition; empty without references."""
        return [row.references[0] for row in self.rows if row.references]

    @property
    def ratings(self) -> list[float]:
        """[N] ratings; empty where captions are compared with each other."""
        return [row.rating for row in self.rows if row.rating is not None]


def rated_row(
    image: str,
    caption: str,
    rating: Any,
    references: Sequence[str] = (),
    photo: Any = None,
) -> Judged:
    """A row of a rated set. Raises ``ValueError`` for a rating that is no finite
    number.
    """
    value = float(rating)
    if not math.isfinite(value):
        raise ValueError(f"the rating is {rating}")
    lists = (references,) if references else ()
    return Judged(
        image,
        [single_spaced(caption)],
        value,
        references=lists,
        image=photo,
    )


def captions_of(texts: Sequence[str]) -> list[str]:
    """Texts with single spaces, without blank ones. Raises ``ValueError`` where none is
    left.
    """
    captions = [single_spaced(text) for text in texts if text.strip()]
    if isinstance(texts, str) or not captions:
        raise ValueError(f"expected a list of captions, not {texts!r:.80}")
    return captions


class Files(NamedTuple):
    """Files of a set: its ``folder``, and the user's folder of ``images`` if any."""

    name: str
    folder: Path
    images: Path | None
    partial: bool
    """Whether other numbers of judgements than the published ones are accepted."""
    opened: list[Path]
    """The files that were opened, the latest last, for messages."""

    def require(self, *names: str) -> Path:
        """The first existing file of ``names``. Raises ``DataError`` where none exists."""
        for file in names:
            if (self.folder / file).is_file():
                self.opened.append(self.folder / file)
                return self.opened[-1]
        needed = f"{self.name} needs {' or '.join(names)} in {str(self.folder)!r}"
        raise DataError(f"{needed}: docs/judging.md says where it is from")

    def json(self, *names: str) -> Any:
        """The content of the first existing JSON file of ``names``. Raises
        ``DataError``.
        """
        path = self.require(*names)
        return parse_json(path.read_bytes(), path)

    def table(
        self, name: str, sep: str = ",", columns: Sequence[str] | None = None
    ) -> list[dict[str, str]]:
        """The rows of a table, "" where a row has too few fields.

        ``columns`` name the columns of a file whose first line does not. With tabs,
        quotation marks are plain characters. A file that is not UTF-8 is Latin-1.
        """
        content = self.require(name).read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("latin-1")
        lines = io.StringIO(text, newline="")
        reader = csv.DictReader(
            lines,
            columns,
            restkey="",
            restval="",
            delimiter=sep,
            quoting=csv.QUOTE_NONE if sep == "\t" else csv.QUOTE_MINIMAL,
        )
        return list(reader)

    def image_folder(self, *names: str) -> Path | None:
        """The user's folder of images, or the first existing folder of ``names``."""
        below = [self.folder / name for name in names]
        return self.images or next(filter(Path.is_dir, below), None)

    def with_images(self, rows: Sequence[Judged], *names: str) -> list[Judged]:
        """Add to each row the file ``image_id`` in the folder of images as its image."""
        folder = self.image_folder(*names)
        return [row._replace(image=folder and folder / row.image_id) for row in rows]

    def check_count(self, what: str, count: int, published: int | None = None) -> None:
        """Raise ``DataError`` for a ``count`` of 0 and, unless ``partial``, for another
        number than ``published``.
        """
        if published not in (None, count) and not self.partial:
            raise DataError(
                f"{self.name} has {count} {what}, but {published} are published: figures would "
                "not be comparable. Set partial to use them anyway"
            )
        if not count:
            raise DataError(f"{self.name} has no {what}")


def coco_id(name: str) -> str:
    """Image id in a file name, such as 12 in ``COCO_val2014_000000000012.jpg``; else
    the name.
    """
    digits = re.search(r"0*(\d+)\.\w+$", name)
    return digits[1] if digits else name


def coco_references(files: Files, name: str) -> dict[str, list[str]]:
    """Read COCO annotations: image id -> captions, in order; empty without the file."""
    references: dict[str, list[str]] = {}
    if (files.folder / name).is_file():
        for row in files.json(name)["annotations"]:
            caption = single_spaced(row["caption"])
            references.setdefault(str(row["image_id"]), []).append(caption)
    return references
