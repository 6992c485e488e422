"""JSON lines, one image with its captions per line: the easiest format for one's own photos."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from rewards.base import RewardError, naming
from rewards.language.caption_qa import ImageQuestion, check_questions
from rl_caption.data.base import DataError, Row, Splits
from rl_caption.data.formats import add_features, grouped_by_split
from rl_caption.data.plain_files import check_type, json_lines, shown
from rl_caption.data.splits import SplitNames

IMAGE_FOLDER = {"image": "file_name", "references": "text"}
"""``data.columns`` of ``metadata.jsonl`` in the layout ``ImageFolder`` of the library ``datasets``.
"""


class _Needed(TypedDict):
    image: str
    references: list[str]


class _Line(_Needed, total=False):
    split: str
    image_id: str | int
    prompt: str
    long_reference: str
    positive_captions: list[str]
    positive_images: list[str]
    negatives: list[list[str]]
    questions: list[ImageQuestion]


class JsonLinesData(Splits):
    """A JSON lines file as a ``DataModule``.

    Each line is an object with ``image`` (a path), ``references`` (a list of captions) and
    optionally ``split`` (default ``"train"``), ``image_id`` (default: the image path as given),
    ``prompt``, ``long_reference``, ``positive_captions`` (further true captions),
    ``positive_images`` (paths of generated images, one per reference) ``negatives`` (false
    captions, one list per reference) and ``questions`` (``{question, choices, answer}``, for the
    reward ``caption_qa``). Other keys are ignored, unless they look like a misspelling of one of
    these. Empty lines are skipped. Lines with ``file_name`` and ``text`` (``IMAGE_FOLDER``) are
    read, too.

    Args:
        path: the file, UTF-8.
        image_root: the folder that relative image paths start from, itself relative to the file's
            folder; None is the file's folder.
        features_root: the folder, or the HDF5 file, of region features; rows then carry
            ``features``.
        max_images: keep only the first rows of a split, such as ``{"train": 1000}``.
        features_kwargs: how the features are stored and read, arguments of ``FeatureOptions``.
        columns: key of this format -> key of the file (``renamed_columns``), for files of another
            layout.

    Raises:
        DataError: a line is wrong; the message names the file and the line.
    """

    def __init__(
        self,
        path: str | Path,
        image_root: str | Path | None = None,
        features_root: str | Path | None = None,
        max_images: dict[str, int] | None = None,
        features_kwargs: dict[str, Any] | None = None,
        columns: dict[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        names = SplitNames(self.path)
        root = self.path.parent / (image_root or "")
        rows = []
        for _, where, item in json_lines(self.path):
            split, row = read_row(item, where, root, columns)
            rows.append((names.read(split, where), row))
        names.warn()
        splits = grouped_by_split(rows, self.path, max_images)
        add_features(splits, features_root, features_kwargs)
        super().__init__(splits, self.path)


def renamed_columns(
    item: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> dict[str, Any]:
    """The values of a row of another layout by the names of this package.

    Args:
        item: the row.
        columns: name here -> name there (``json.caption`` is a key of an object), or a text in
            which names in braces stand for their values, such as ``{filepath}/{filename}``. A
            single text becomes a list of one where a list is expected, and an object with the text
            ``raw`` (sentences of Karpathy JSON) that text.
        where: the row in messages.

    Raises:
        DataError: a name here or there is unknown.
    """
    values: dict[str, Any] = {}
    for name, column in columns.items():
        if name not in _Line.__annotations__:
            raise DataError(
                f"data.columns has {name!r}: expected some of {', '.join(_Line.__annotations__)}"
            )
        absent = f"{where} has {', '.join(item)}: data.columns.{name} is {column!r}"
        with naming(absent, (KeyError, ValueError, IndexError, TypeError), DataError):
            value = column.format_map(item) if "{" in column else _value(item, column)
        if name in ("references", "positive_captions", "positive_images"):
            texts = value if isinstance(value, list) else [value]
            value = [
                text["raw"] if isinstance(text, dict) and "raw" in text else text for text in texts
            ]
        values[name] = value
    return values


def _value(item: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a key of the object in one: ``json.caption``."""
    if column in item:
        return item[column]
    first, dot, rest = column.partition(".")
    return _value(item[first], rest) if dot else item[column]


def read_row(
    item: Any, where: str, image_root: Path, columns: Mapping[str, str] | None = None
) -> tuple[str, Row]:
    """The split and the row of a line; ``where`` it is stands in messages. Raises ``DataError`` for
    a wrong line.

    ``columns`` are those of ``renamed_columns``; None takes the keys as they are, or else those of
    ``IMAGE_FOLDER``.
    """
    check_type(item, dict, where, DataError)
    if (
        columns is None
        and "image" not in item
        and "references" not in item
        and item.keys() >= {"file_name", "text"}
    ):
        columns = IMAGE_FOLDER
    if columns is not None:
        item = renamed_columns(item, columns, where)
    absent = [key for key in _Line.__annotations__ if key not in item]
    for key in [key for key in item if key not in _Line.__annotations__]:
        # A row with 'splits' in place of 'split' would silently become training data.
        meant = difflib.get_close_matches(key.lower(), absent, n=1, cutoff=0.8)
        if meant:
            raise DataError(f"{where}: unknown key {key!r}: did you mean {meant[0]!r}?")
    check_type(item, _Line, where, DataError)
    if "questions" in item:
        with naming(where, (RewardError,), DataError):
            check_questions(item["questions"], "questions")
    row: Any = {key: item[key] for key in _Line.__annotations__ if key in item and key != "split"}
    if "negatives" in item and len(item["negatives"]) != len(item["references"]):
        raise DataError(
            f"{where}: 'negatives' is {shown(item['negatives'])}: expected a list for each "
            f"reference"
        )
    row["image_id"] = str(item.get("image_id", item["image"]))
    row["image"] = os.path.join(image_root, item["image"])
    if "positive_images" in row:
        row["positive_images"] = [os.path.join(image_root, path) for path in row["positive_images"]]
    return item.get("split", "train"), row
