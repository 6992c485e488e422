"""Readers of a row, of JSON lines and of Karpathy's JSON."""

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Required

from PIL import Image
from typing_extensions import TypedDict

from rewards.base import RewardError, naming
from rewards.images import Renderable
from rewards.language.caption_qa import ImageQuestion, check_questions
from rl_caption.data.base import DataError, LazyImage, Row, Splits
from rl_caption.data.plain_files import check_type, json_lines, parse_file, shown

STANDARD_SPLITS = ("train", "restval", "val", "test")
OTHER_NAMES = {"validation": "val", "valid": "val", "dev": "val"}
"""Usual names of the standard splits -> the names here."""
MISTAKEN = ("training", "testing")
"""Names that are likely meant as standard splits."""


class _Values(TypedDict, total=False):
    references: Required[list[str]]
    split: str
    image_id: str | int
    prompt: str
    long_reference: str
    positive_captions: list[str]
    negatives: list[list[str]]
    questions: list[ImageQuestion]


FILE_KEYS = ("image", "positive_images", *_Values.__annotations__)
"""Keys of a row in a file."""
ROW_KEYS = (*FILE_KEYS, "features", "scene", "target")
"""Keys of a row of Python."""


def read_row(
    item: Any,
    where: str,
    image_root: str | Path = "",
    columns: Mapping[str, str] | None = None,
    keys: Collection[str] = FILE_KEYS,
    number: str | None = None,
) -> tuple[str, Row]:
    """Read the split and the row of an object: types, misspelt keys, images below ``image_root``.

    No image is opened.

    Args:
        item: the object; without ``image_id`` its id is the path ``image``, without
            ``split`` it is in ``train``.
        where: its place in messages.
        image_root: folder that relative paths start from.
        columns: as for ``renamed_columns``; None takes the keys as they are.
        keys: the keys that are read; others are ignored unless they look like one of these.
        number: the id of a row whose image is not a path; None expects a path.

    Raises:
        DataError: the row is wrong; the message begins with ``where`` and names the key.
    """
    check_type(item, dict, where)
    if columns is not None:
        item = renamed_columns(item, columns, where)
    check_keys(item, keys, where)
    if item.get("image") is None and (number is None or "image_id" not in item):
        raise DataError(f"{where} has no 'image'")
    check_type(item, _Values, where)
    is_path = isinstance(item.get("image"), str | Path)
    row: Any = {key: item[key] for key in keys if key in item}
    split = split_name(row.pop("split", "train"), where)
    row["image_id"] = str(item.get("image_id", item["image"] if is_path else number))
    for key in ("image", "positive_images"):
        if key in row:
            row[key] = _image(row[key], image_root, f"{where}, {key!r}")
    if "questions" in row:
        with naming(where, (RewardError,), DataError):
            check_questions(row["questions"], "questions")
    if len(row.get("negatives", row["references"])) != len(row["references"]):
        raise DataError(f"{where}: 'negatives' has not a list for each reference")
    return split, row


def check_keys(names: Collection[str], keys: Collection[str], where: str) -> None:
    """Raise ``DataError`` where a key is likely a misspelt one of ``keys``.

    A row with 'splits' in place of 'split' would silently become training data.
    """
    for name in names:
        near = None if name in keys else _nearest(name.lower(), tuple(keys))
        if near and near not in names:
            raise DataError(f"{where}: unknown key {name!r}: did you mean {near!r}?")


@lru_cache(maxsize=1024)  # rows of a file have the same keys
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    """The known name that is likely meant."""
    return next(iter(difflib.get_close_matches(name, names, 1, 0.8)), None)


def _image(value: Any, root: str | Path, where: str) -> Any:
    """The ``image`` of a row from a path, bytes, ``{"bytes", "path"}``, a drawn image,
    or a list of these.
    """
    if isinstance(value, list | tuple):
        return type(value)([_image(one, root, where) for one in value])
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return LazyImage(where, value)
    if isinstance(value, str | Path):
        return os.path.join(root, value)
    if isinstance(value, Image.Image | Renderable):
        return value
    raise DataError(f"{where} is {shown(value)}: expected text, the path of an image")


def renamed_columns(
    item: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Rename the columns of a row of another layout to this package's names.

    Args:
        item: the row.
        columns: name here -> name there (``json.caption`` is a key of an object), or a
            text in which names in braces stand for their values, such as
            ``{filepath}/{filename}``. A single text becomes a list of one where a list
            is expected, and an object with a text ``raw`` (sentences of Karpathy JSON)
            becomes this text.
        where: the row in messages.

    Raises:
        DataError: a name here or there is unknown.
    """
    values: dict[str, Any] = {}
    for name, column in columns.items():
        absent = f"{where} has {', '.join(item)}: data.columns.{name} is {column!r}"
        with naming(absent, (KeyError, ValueError, IndexError, TypeError), DataError):
            value = column.format_map(item) if "{" in column else _value(item, column)
        if name in ("references", "positive_captions", "positive_images"):
            value = value if isinstance(value, list) else [value]
            value = [
                one.get("raw", one) if isinstance(one, dict) else one for one in value
            ]
        values[name] = value
    return values


def _value(item: Any, column: str) -> Any:
    """The value of a column, or of a key of the object in one: ``json.caption``."""
    if column in item or "." not in column:
        return item[column]
    first, _, rest = column.partition(".")
    return _value(item[first], rest)


def standard_split(name: str) -> str:
    """The standard split that is meant by a name (``Train``, ``validation``), or else the name."""
    plain = name.strip().casefold()
    split = OTHER_NAMES.get(plain, plain)
    return split if split in STANDARD_SPLITS else name


def split_name(name: str, where: str) -> str:
    """The split of a row; ``restval`` (the rest of COCO's validation images) is ``train``.

    ``validation`` (``valid``, ``dev``) is ``val``. Any other name that is no
    misspelling, such as ``test_unseen``, is a split of its own.

    Raises:
        DataError: the name is misspelt; the message begins with ``where`` and says what
            is expected.
    """
    split = standard_split(name)
    if split in STANDARD_SPLITS:
        return "train" if split == "restval" else split
    plain = name.strip().casefold()
    near = _nearest(plain, (*STANDARD_SPLITS, *OTHER_NAMES))
    # What goes on after a known name, such as testA or val2, is no misspelling.
    is_misspelt = near and not plain.startswith(near)
    if not plain or plain in MISTAKEN or is_misspelt:
        expected = f"expected one of {STANDARD_SPLITS}, or another name"
        raise DataError(f"{where}: the split is {shown(name)}: {expected}")
    return split


def by_split(rows: Iterable[tuple[str, Any]], source: str | Path) -> Splits:
    """Group ``(split, row)`` pairs: first the standard splits, then others in their
    order. Raises ``DataError`` where there is none.

    ``source`` is the file in messages.
    """
    groups: dict[str, list[Any]] = {split: [] for split in STANDARD_SPLITS}
    for split, row in rows:
        groups.setdefault(split, []).append(row)
    kept = {split: rows for split, rows in groups.items() if rows}
    if not kept:
        raise DataError(f"{source} has no rows")
    return Splits(kept, source)


def jsonl(
    path: str | Path,
    image_root: str | Path = "",
    columns: dict[str, str] | None = None,
) -> Splits:
    """Read JSON lines, one image with its captions a line: the easiest format for one's own photos.

    Each line is an object with ``image`` (a path), ``references`` (a list of captions)
    and optionally ``split`` (default ``"train"``), ``image_id`` (default: the image
    path as given) and others of ``FILE_KEYS``. Other keys are ignored, unless they look
    like a misspelling of one of these.

    Args:
        path: the file, UTF-8.
        image_root: the folder that relative image paths start from, itself relative to
            the file's folder.
        columns: key of this format -> key of the file (``renamed_columns``), for files
            of another layout.

    Raises:
        DataError: a line is wrong; the message names the file and the line.
    """
    file = Path(path)
    root = file.parent / image_root
    rows = (read_row(item, where, root, columns) for _, where, item in json_lines(file))
    return by_split(rows, file)


class _Sentence(TypedDict, total=False):
    raw: str | None
    tokens: list[str]


class _Image(TypedDict, total=False):
    split: Required[str]
    filename: Required[str]
    filepath: str
    cocoid: int | str | None
    imgid: int | str | None
    sentences: list[_Sentence]


class _Karpathy(TypedDict):
    images: list[_Image]


def karpathy_rows(
    content: Any,
    path: str | Path,
    root: str | Path = "",
    image_extension: str | None = None,
    flatten: bool = False,
) -> Iterator[tuple[str, Row]]:
    """Yield the splits and rows of parsed Karpathy JSON; see ``karpathy``. Raises
    ``DataError`` for a wrong record or file.
    """
    check_type(content, _Karpathy, str(path))
    for index, item in enumerate(content["images"]):
        where = f"{path}, images[{index}]"
        image_id = item.get("imgid") if item.get("cocoid") is None else item["cocoid"]
        if image_id is None:
            raise DataError(f"{where} has no 'cocoid' or 'imgid'")
        references = []
        for sentence in item.get("sentences", []):
            words = sentence.get("tokens", [])
            references.append(sentence.get("raw") or " ".join(words))
        name = item["filename"]
        if image_extension:
            name = os.path.splitext(name)[0] + image_extension
        folder = "" if flatten else item.get("filepath", "")
        row = Row(
            image_id=str(image_id),
            image=os.path.join(root, folder, name),
            references=references,
        )
        yield split_name(item["split"], where), row


def karpathy(
    path: str | Path,
    image_root: str | Path = "",
    image_extension: str | None = None,
    flatten: bool = False,
) -> Splits:
    """Read Karpathy JSON, the format of COCO, Flickr8k, Flickr30k and UCM-Captions.

    A record's ``image_id`` is its ``cocoid``, or else its ``imgid``, as a string. Its
    references are the ``raw`` sentences, or the joined ``tokens`` of a sentence without
    ``raw``. Its image is ``image_root / filepath / filename``, unless an option says
    otherwise; nothing is guessed.

    Args:
        path: the JSON file, or a folder that holds exactly one ``dataset*.json``.
        image_root: the folder of the images, relative to the JSON file's folder.
        image_extension: replaces the extension of every ``filename``, such as ``.jpg``
            where the JSON says ``.tif``.
        flatten: leave out ``filepath``: all images lie in ``image_root``.

    Raises:
        DataError: the file is not Karpathy JSON. Images are checked by ``check_data``, not here.
    """
    file = Path(path)
    if file.is_dir():
        with naming(f"{path} must hold one dataset*.json", (ValueError,), DataError):
            (file,) = file.glob("dataset*.json")
    root = file.parent / image_root
    content = parse_file(file.read_bytes(), file)
    rows = karpathy_rows(content, file, root, image_extension, flatten)
    return by_split(rows, file)
