"""Curation of captions: measures of captions, large files read row by row, and selection by scores."""

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rewards.files import atomic_write
from rewards.images import UNREADABLE
from rewards.text.degeneration import BAD_ENDINGS
from rewards.text.detail_units import default_tagger, word_class
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError
from rl_caption.data.hub import EncodedImage
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.plain_files import parse_json, shown

Item = dict[str, Any]
"""A row of ``data.format: jsonl``, with any further columns of its file."""
SUFFIXES = (".jsonl", ".parquet", ".json")
_MORE_STOP_WORDS = """
i you he she it we they him her them us me there here by not no so such when how what all any both each more most other
only own too up down out off over under then once about after before above below can
"""
STOP_WORDS = BAD_ENDINGS.union(_MORE_STOP_WORDS.split())
"""English function words."""
_AUXILIARIES = frozenset(
    ["is", "are", "was", "were", "be", "been", "being", "am", "has", "have", "had", "do", "does"]
)


def _capitalised_fraction(caption: str) -> float:
    words = [word for word in caption.split() if word[0].isalpha()]
    return sum(word[0].isupper() for word in words) / len(words) if words else 0.0


def _stop_words(caption: str) -> float:
    return sum(word in STOP_WORDS for word in tokenize(caption))


@lru_cache(maxsize=1)
def _classes(caption: str) -> list[tuple[str, str]]:
    """The words of a caption, each with its ``word_class``."""
    words = tokenize(caption)
    return [
        (word, word_class(tag))
        for word, tag in zip(words, default_tagger()([words])[0], strict=True)
    ]


def _words_of(classes: str, caption: str) -> float:
    """Number of words of the given classes, without auxiliary verbs."""
    return sum(
        word_type in classes and word not in _AUXILIARIES for word, word_type in _classes(caption)
    )


MEASURES: dict[str, Callable[[str], float]] = {
    "characters": len,
    "words": lambda caption: len(tokenize(caption)),
    "capitalised": _capitalised_fraction,
    "stop_words": _stop_words,
    "stop_word_fraction": lambda caption: _stop_words(caption) / max(1, len(tokenize(caption))),
    "actions": partial(_words_of, "V"),
    "complexity": partial(_words_of, "JVI"),
}
"""Measure of a caption by its name (docs/curation.md)."""
TEXT_OVERLAP = "text_overlap"
"""The measure that also reads a text."""


def text_overlap(caption: str, text: str) -> float:
    """Fraction of a caption's words that also occur in a text, such as one read in the image; in [0, 1]."""
    words, text_words = tokenize(caption), set(tokenize(text))
    return sum(word in text_words for word in words) / len(words) if words else 0.0


@dataclass
class Source:
    """A dataset to curate, read one row at a time. Raises ``DataError`` where no file can be read.

    ``path`` is a file, or a folder of files, with a suffix among ``SUFFIXES``; files of a folder whose names begin with
    a dot are left out. Image paths start from ``image_root``, itself relative to the folder of each file. The columns
    are those of JSON lines and Parquet; ``text_column`` holds a text read in the image, if any. In Parquet, images may
    be bytes, or objects with ``bytes`` and ``path`` as the library ``datasets`` writes them.
    """

    path: Path
    image_root: str | None = None
    image_column: str = "image"
    caption_column: str = "references"
    text_column: str | None = None
    files: tuple[Path, ...] = field(init=False)

    def __post_init__(self) -> None:
        candidates = [self.path]
        if self.path.is_dir():
            candidates = sorted(
                file for file in self.path.iterdir() if not file.name.startswith(".")
            )
        self.files = tuple(
            file for file in candidates if file.suffix in SUFFIXES and file.is_file()
        )
        if not self.files:
            raise DataError(
                f"data {str(self.path)!r}: no such file, or no {', '.join(SUFFIXES)} in the folder"
            )
        if self.text_column is not None and any(file.suffix == ".json" for file in self.files):
            raise DataError(
                f"text_column is {self.text_column!r}: expected JSON lines or Parquet in {self.path}"
            )

    def count(self) -> int:
        """Number of rows."""
        return sum(_count(file) for file in self.files)

    def rows(
        self, is_needed: Callable[[int], bool] = lambda index: True
    ) -> Iterator[tuple[int, Item]]:
        """Yield index and row for the indices that are ``wanted``; others are not parsed.

        Rows have ``image_id``, ``image`` (a path or an ``EncodedImage``), ``references``, perhaps ``split``, and any
        other columns. Raises ``DataError``, which names file and row, where a row is wrong.
        """
        first = 0
        for file in self.files:
            for index, (number, raw) in enumerate(_raw_rows(file, self.image_root), start=first):
                if is_needed(index):
                    yield index, raw if file.suffix == ".json" else self._row(raw, number, file)
                first = index + 1

    def _row(self, raw: Any, number: int, file: Path) -> Item:
        where = f"{file}, {'row' if file.suffix == '.parquet' else 'line'} {number}"
        item = parse_json(raw, where) if isinstance(raw, bytes) else raw
        if not isinstance(item, dict):
            raise DataError(f"{where}: {shown(item)} is not an object")
        image, captions = item.get(self.image_column), item.get(self.caption_column)
        captions = [captions] if isinstance(captions, str) else captions
        has = f"; the row has {', '.join(map(str, item))}"
        if isinstance(image, dict) and {*image} == {"bytes", "path"}:
            image = image["bytes"] or image["path"]
        if not isinstance(image, str | bytes) or not image:
            raise DataError(
                f"{where}: {self.image_column!r} is {shown(image)}: expected the path of an image{has}"
            )
        if not isinstance(captions, list) or not all(
            isinstance(caption, str) for caption in captions
        ):
            expected = f"expected a caption, or a list{has}"
            raise DataError(f"{where}: {self.caption_column!r} is {shown(captions)}: {expected}")
        # A column of Parquet is null where a row has none.
        standard_columns = (self.image_column, self.caption_column)
        item = {
            key: value
            for key, value in item.items()
            if value is not None and key not in standard_columns
        }
        root = file.parent / (self.image_root or "")
        name = image if isinstance(image, str) else f"{file.stem}/{number}"
        row: Item = item | {"image_id": str(item.get("image_id", name)), "references": captions}
        row["image"] = (
            os.path.join(root, image) if isinstance(image, str) else EncodedImage(image, where)
        )
        files = item.get("positive_images")
        if isinstance(files, list) and all(isinstance(file, str) for file in files):
            row["positive_images"] = [os.path.abspath(os.path.join(root, file)) for file in files]
        text = None if self.text_column is None else item.get(self.text_column)
        if not isinstance(text, str | None):
            raise DataError(
                f"{where}: {self.text_column!r} is {shown(text)}: expected a text, or null"
            )
        return row


def _count(file: Path) -> int:
    if file.suffix == ".parquet":
        with open_parquet(file) as content:
            return int(content.metadata.num_rows)
    return sum(1 for _ in _raw_rows(file, None))


def _raw_rows(file: Path, image_root: str | None) -> Iterator[tuple[int, Any]]:
    """Yield the line of each row, or its number, and the row: JSON bytes, an object (Parquet) or a finished row."""
    if file.suffix == ".parquet":
        with open_parquet(file) as content:
            rows = (row for batch in content.iter_batches(1024) for row in batch.to_pylist())
            yield from enumerate(rows)
    elif file.suffix == ".jsonl":
        with file.open("rb") as lines:
            yield from (
                (number, line) for number, line in enumerate(lines, start=1) if line.strip()
            )
    else:
        data = KarpathyData(file, image_root)
        yield from enumerate(
            {**row, "split": split} for split in data.splits for row in data.split(split)
        )


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """Open a Parquet file for reading. Raises ``DataError`` where it is none, or pyarrow is not installed."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"{file} cannot be read without pyarrow: pip install 'rl-caption[parquet]'"
        ) from error
    try:
        yield ParquetFile(file)
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}") from error


def best(scores: NDArray[np.float32], count: float) -> NDArray[np.bool_]:
    """Mask [N] of the highest scores: ``count`` of them, or below 1 that fraction, rounded down. Ties: the first."""
    # The decimal fraction as written: in binary, 0.29 * 100 is 28.999...
    number = int(Fraction(str(count)) * len(scores) if count < 1 else count)
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[np.argsort(-scores, kind="stable")[:number]] = True
    return chosen


def first_of_equals(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Mask [N] of the keys that equal none before them."""
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def write_rows(file: Any, rows: Sequence[Item], folder: Path) -> None:
    """Append rows to a binary file as JSON lines that ``data.format: jsonl`` reads, and images of bytes to a folder."""
    for row in rows:
        image = row["image"]
        path = _write_image(image, folder) if isinstance(image, EncodedImage) else image
        line = {**row, "image": os.path.abspath(str(path))}
        file.write((json.dumps(line, ensure_ascii=False, default=str) + "\n").encode())


def _write_image(image: EncodedImage, folder: Path) -> Path:
    """The file of an image, named by its bytes, so that equal images are one file; they are written as they are."""
    suffix = ""
    with suppress(*UNREADABLE):  # where no score reads images, damaged ones are kept, too
        suffix = f".{Image.open(io.BytesIO(image.content)).format}".lower()
    file = folder / f"{image.identity()[:32]}{suffix}"
    if not file.is_file():
        with atomic_write(file) as content:
            content.write(image.content)
    return file
