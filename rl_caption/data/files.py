"""Reading and writing caption and reference files in the formats of the field. Image
ids are always strings.
"""

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from rewards.base import naming
from rewards.files import atomic_write
from rewards.images import IMAGE_SUFFIXES, list_images
from rl_caption.data.base import SHOWN, DataError
from rl_caption.data.plain_files import check_type, parse_file, shown
from rl_caption.data.rows import karpathy_rows, read_row

PREDICTIONS = "predictions.json"
"""File of the captions in the folder of an evaluation."""

IdKey = Literal["image_id", "image_name"]


class Captions(dict[str, str]):
    """Image id -> caption, in the order of the file."""

    by: IdKey = "image_id"
    """The key that identifies images in the file; references are looked up by the same key."""
    sha256: str = ""
    """SHA-256 of the file that they were read from, in hexadecimal."""


class _Caption(TypedDict):
    caption: str


_SomeCaptions = Annotated[list[_Caption], Field(min_length=1)]


class References(dict[str, list[str]]):
    """Image id -> reference captions, in the order of the file. The list of an image may be empty."""

    elsewhere: frozenset[str] = frozenset()
    """Ids of images that the file has in other splits than the requested one."""
    images: Mapping[str, Any] = {}
    """Image id -> path of the image, of all splits, where the file has paths (JSON lines)."""


def read_captions(path: str | Path) -> Captions:
    """Read one caption per image from COCO result format, ``[{"image_id": …, "caption": …}, …]``.

    JSON lines, with an object each, and ``{image_id: caption}`` are read, too. The key
    may also be ``image_name``; without either key, the path ``image`` is the id.

    Args:
        path: the file, a pipe such as ``/dev/stdin``, or the folder of an
            evaluation, with ``predictions.json``.

    Raises:
        DataError: another format, or a repeated key or image. The message has the count
            and the first offenders.
    """
    captions = Captions()
    path = captions_file(path)
    data = Path(path).read_bytes()
    captions.sha256 = hashlib.sha256(data).hexdigest()
    rows = parse_file(data, path)
    if isinstance(rows, dict):
        listed = [{"image_id": key, "caption": text} for key, text in rows.items()]
        rows = [rows] if "caption" in rows else listed
    check_type(rows, _SomeCaptions, str(path))
    if "image_id" not in rows[0] and "image_name" in rows[0]:
        captions.by = "image_name"
    ids = []
    for index, row in enumerate(rows):
        key = "image" if row.get(captions.by) is None else captions.by
        ids.append(_id(row.get(key), f"{path}, [{index}].{key}"))
        captions[ids[-1]] = row["caption"]
    _refuse(_repeated_ids(ids), "captioned more than once", path)
    return captions


def captions_file(path: str | Path) -> str | Path:
    """``path``, or ``predictions.json`` in the folder of an evaluation."""
    file = Path(path) / PREDICTIONS
    return file if file.is_file() else path


def read_references(
    path: str | Path,
    split: str | None = None,
    *,
    by: IdKey = "image_id",
    has_splits: bool = True,
) -> References:
    """Read the reference captions of each image.

    The format is recognised by its content: ``{image_id: [str, …]}``; a list of
    ``{image_id, captions: [str, …]}``; COCO annotations (``images`` and
    ``annotations``); Karpathy JSON (an image's id is its ``cocoid``, or else its
    ``imgid``); or JSON lines, as for ``data.format: jsonl``.

    Args:
        path: the file, or a pipe such as ``/dev/stdin``.
        split: split of Karpathy JSON and JSON lines: ``train`` (with ``restval``),
            ``val`` or ``test``; None takes all.
        by: what identifies images in the result. ``image_name`` is the key of that name
            in a list, ``file_name`` in COCO annotations, ``filename`` in Karpathy JSON,
            the last part of ``image`` in JSON lines, and the key itself in ``{name:
            [str, …]}``.
        has_splits: whether a ``split`` of a file without splits is an error; with
            False, such a file is read whole.

    Raises:
        DataError: another format, a repeated key or image, an empty reference, or an unknown split.
    """
    every = list(_annotated_images(parse_file(Path(path).read_bytes(), path), path, by))
    annotated = every
    named = dict.fromkeys(image.split for image in every if image.split)
    if split is not None and (named or has_splits):
        splits = ("train", "") if named and split == "train" else (split,)
        annotated = [image for image in every if image.split in splits]
    if not annotated:
        raise DataError(f"{path} has no split {split!r}: it has {[*named]}")
    references, ids = References(), []
    for index, image in enumerate(annotated):
        ids.append(_id(image.image_id, f"{path}, id of image {index}"))
        where = f"{path}: captions of image {shown(ids[-1])}"
        check_type(image.captions, list[str], where)
        references[ids[-1]] = list(image.captions)
    if not any(references.values()):
        raise DataError(f"{path} has no references of any image")
    _refuse(_repeated_ids(ids), "listed more than once", path)
    empty = [
        name for name, texts in references.items() if not all(map(str.strip, texts))
    ]
    _refuse(empty, "with an empty reference", path)
    files = {str(image.image_id): image.file for image in every}
    references.elsewhere = frozenset(files) - references.keys()
    references.images = {name: file for name, file in files.items() if file}
    return references


class _Annotated(NamedTuple):
    """Captions of an image in a file of references."""

    image_id: Any
    captions: Any
    split: str = ""
    """Empty where the file does not say it."""
    file: str = ""


def _annotated_images(
    content: Any, path: str | Path, by: IdKey
) -> Iterator[_Annotated]:
    """Yield the images of a parsed file, whose layout is recognised by its keys."""
    check_type(content, dict | list[dict], str(path))
    by_id = by == "image_id"
    if isinstance(content, dict) and isinstance(content.get("image"), str):
        content = [content]
    if isinstance(content, list):
        for index, line in enumerate(content, start=1):
            if "captions" in line:
                yield _Annotated(line.get(by), line["captions"])
                continue
            split, row = read_row(line, f"{path}, row {index}", Path(path).parent)
            split, file = split if "split" in line else "", str(row["image"])
            key = row["image_id"] if by_id else Path(file).name
            yield _Annotated(key, row["references"], split, file)
    elif "annotations" in content:
        for image, captions in coco_records(content, path):
            yield _Annotated(image.get("id" if by_id else "file_name"), captions)
    elif isinstance(content.get("images"), list):
        for split, row in karpathy_rows(content, path):
            key = row["image_id"] if by_id else Path(str(row["image"])).name
            yield _Annotated(key, row["references"], split)
    else:
        for name, captions in content.items():
            yield _Annotated(name, captions)


def coco_records(
    content: Any, path: str | Path
) -> list[tuple[dict[str, Any], list[str]]]:
    """Each image of parsed COCO annotations with its captions.

    Raises ``DataError`` for another format, a doubled image, and an annotation of an
    image that is not listed.
    """
    problem = f"{path} has no COCO annotations, or of an image that is not listed"
    with naming(problem, (KeyError, TypeError), DataError):
        ids = [
            _id(image["id"], f"{path}, id of an image") for image in content["images"]
        ]
        _refuse(_repeated_ids(ids), "listed more than once under 'images'", path)
        captions: dict[str, list[str]] = {image_id: [] for image_id in ids}
        for annotation in content["annotations"]:
            captions[str(annotation["image_id"])].append(annotation["caption"])
    return list(zip(content["images"], captions.values(), strict=True))


def references_for(
    image_ids: Iterable[str],
    references: Mapping[str, Sequence[str]],
    source: str | Path,
) -> list[list[str]]:
    """The references of N images. Raises ``DataError``, with the count and the first
    ids, where images have none.
    """
    ids = list(image_ids)
    missing = [image_id for image_id in ids if not references.get(image_id)]
    _refuse(missing, "captioned but without references", source)
    return [list(references[image_id]) for image_id in ids]


def with_ids_of(
    captions: Captions,
    known_ids: Collection[str],
    images: Mapping[str, Any],
    source: str | Path,
) -> Captions:
    """Replace ids that are paths of images, as ``caption --out`` writes them, by the
    images' ids.

    A path is an id outside ``known_ids`` with an image file's extension. It becomes the
    id of this path in ``images`` (id -> path) or else, as in ``find_images``, the known
    id that is the name, the stem, or the number at the end of the stem. All other ids
    stay. Raises ``DataError``, which names ``source``, where two captions get one id.
    """
    ids = {
        os.path.abspath(path): image_id
        for image_id, path in images.items()
        if isinstance(path, str | Path)
    }

    named = []
    for image_id in captions:
        path = Path(image_id)
        if image_id not in known_ids and path.suffix.lower() in IMAGE_SUFFIXES:
            matches = filter(known_ids.__contains__, _names_of(path))
            image_id = ids.get(os.path.abspath(path)) or next(matches, image_id)
        named.append(image_id)
    _refuse(_repeated_ids(named), "captioned more than once", source)
    renamed = Captions(zip(named, captions.values(), strict=True))
    renamed.by, renamed.sha256 = captions.by, captions.sha256
    return renamed


def _names_of(path: Path) -> list[str]:
    """Possible ids of a file's image: its name, its stem, and the number that ends the
    stem, if any.
    """
    number = re.search(r"0*([0-9]+)$", path.stem)
    return [path.name, path.stem, *(number.groups() if number else ())]


def find_images(folder: str | Path, image_ids: Iterable[str]) -> list[str]:
    """Find the file of each image in a folder, among its ``list_images``.

    An id is a file's path (from the working directory or from the folder) or, where no
    path matches, a file's name, then its stem, then, for a whole number, the digits at
    the end of its stem (``391895`` is ``COCO_val2014_000000391895.jpg``). Raises
    ``DataError``, which names the first ids, where an id matches no file or several.
    """
    root, ids = Path(folder), list(image_ids)
    files_by: dict[tuple[int, str], list[str]] = defaultdict(list)
    for path in list_images(root):
        place = path.relative_to(root).as_posix()
        for way in enumerate((os.path.abspath(path), place, *_names_of(path))):
            files_by[way].append(str(path))
    matches: dict[str, list[str]] = {}
    for image_id in ids:
        ways = enumerate((os.path.abspath(image_id), *[image_id] * 4))
        matches[image_id] = next((files_by[way] for way in ways if way in files_by), [])
    wrong = [image_id for image_id in ids if len(matches[image_id]) != 1]
    _refuse(wrong, "without exactly one file here that is named like the id", root)
    return [matches[image_id][0] for image_id in ids]


def write_json(path: str | Path, content: Any, allow_nan: bool = False) -> None:
    """Write JSON atomically (see ``write_text``). Raises ``ValueError`` for NaN and
    infinity unless ``allow_nan``.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=allow_nan)
    write_text(path, text + "\n")


def write_json_lines(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one line of JSON per row, atomically (see ``write_text``)."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically (``rewards.files.atomic_write``). An ``OSError`` names the file."""
    with atomic_write(path) as file:
        file.write(text.encode())


def _repeated_ids(ids: Sequence[str]) -> list[str]:
    """Ids that occur again, once for each repetition."""
    return list((Counter(ids) - Counter(set(ids))).elements())


def _id(value: Any, where: str) -> str:
    check_type(value, int | str, where)
    return str(value)


def _refuse(image_ids: Sequence[str], problem: str, path: str | Path) -> None:
    if image_ids:
        first = ", ".join(map(shown, dict.fromkeys(image_ids[:SHOWN])))
        count = len(image_ids)
        raise DataError(f"{path}: {count} images are {problem} (first: {first})")
