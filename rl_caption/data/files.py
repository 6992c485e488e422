"""Files of captions and of references, in the formats of the field. Ids are strings everywhere."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

from rewards.files import atomic_write
from rl_caption.data.base import SHOWN, DataError
from rl_caption.data.plain_files import is_unicode, parse_json, shown

logger = logging.getLogger(__name__)

IdKey = Literal["image_id", "image_name"]


class Captions(dict[str, str]):
    """Image id -> caption, in the order of the file."""

    by: IdKey = "image_id"
    """The key by which the file names its images; references are found by the same one."""


class References(dict[str, list[str]]):
    """Image id -> captions that people wrote for it, in the order of the file; of some images there may be none."""

    elsewhere: frozenset[str] = frozenset()
    """Ids of the images in other splits of the file than the one that was asked for."""


def read_captions(path: str | Path, *, allow_empty: bool = False) -> Captions:
    """Read one caption per image: COCO result format, ``[{"image_id": …, "caption": …}, …]``.

    ``image_name`` in place of ``image_id`` is accepted.

    Args:
        path: the JSON file, plain or gzip, or a pipe such as ``/dev/stdin``.
        allow_empty: accept captions without a word, which a model may well produce.

    Raises:
        DataError: not such a file, a key of an object or an image twice, or an empty caption; with counts and the
            first offenders.
    """
    captions = Captions()
    twice, empty = [], []
    for index, row in enumerate(_rows(_content(path), path)):
        if index == 0 and "image_id" not in row and "image_name" in row:
            captions.by = "image_name"
        image_id = _id(row.get(captions.by), f"{path}, [{index}].{captions.by}")
        caption = row.get("caption")
        if not _is_text(caption):
            raise DataError(f"{path}, [{index}].caption is {shown(caption)}: expected a string of whole characters")
        if not caption.strip():
            empty.append(image_id)
        if image_id in captions:
            twice.append(image_id)
        captions[image_id] = caption
    if not captions:
        raise DataError(f"{path} has no captions: expected a list of objects with 'image_id' and 'caption'")
    _refuse(twice, "captioned more than once", path, "expected one caption per image")
    if not allow_empty:
        _refuse(empty, "without a word in their caption", path, "expected text in every caption")
    return captions


def read_references(
    path: str | Path, split: str | None = None, *, by: IdKey = "image_id", has_splits: bool = True
) -> References:
    """Read the captions that people wrote for each image.

    The format is told by the content: ``{image_id: [str, …]}``; COCO annotations (``images`` and ``annotations``);
    Karpathy JSON (an image's id is its ``cocoid``, or else its ``imgid``); or a list of
    ``{"image_id": …, "captions": [str, …]}``.

    Args:
        path: the JSON file, plain or gzip, or a pipe such as ``/dev/stdin``.
        split: Karpathy JSON only: ``train`` (with ``restval``), ``val`` or ``test``; None takes all.
        by: what the result's keys are. ``image_name`` is ``file_name`` in COCO annotations, ``filename`` in Karpathy
            JSON, ``image_name`` in a list, and the key itself in ``{name: [str, …]}``.
        has_splits: refuse a ``split`` of a file that has none; False takes all of such a file.

    Raises:
        DataError: no such format, a key of an object or an image twice, an empty reference, or a split that is not
            there.
    """
    content = _content(path)
    if isinstance(content, dict) and isinstance(content.get("images"), list) and "annotations" not in content:
        rows = list(_rows(content["images"], f"{path}, images"))
        everything = split is None or not (has_splits or any(row.get("split") for row in rows))
        chosen = rows if everything else _of_split(rows, split, path)
        references = _collected(_karpathy(chosen, path, by), path)
        references.elsewhere = frozenset(str(_karpathy_id(row, by)) for row in rows) - references.keys()
        return references
    if split is not None and has_splits:
        raise DataError(f"{path} has no splits: only Karpathy JSON has them; leave split {split!r} out")
    if not isinstance(content, dict):
        return _collected(((row.get(by), row.get("captions")) for row in _rows(content, path)), path)
    return _collected(_coco(content, path, by) if "annotations" in content else content.items(), path)


def _collected(pairs: Iterable[tuple[Any, Any]], path: str | Path) -> References:
    """References by image id, checked."""
    references = References()
    twice, empty = [], []
    for index, (raw_id, captions) in enumerate(pairs):
        image_id = _id(raw_id, f"{path}, id of image {index}")
        if not isinstance(captions, list) or not all(map(_is_text, captions)):
            raise DataError(
                f"{path}: captions of image {shown(image_id)} are {shown(captions)}: expected a list of strings of "
                "whole characters"
            )
        if image_id in references:
            twice.append(image_id)
        if any(not caption.strip() for caption in captions):
            empty.append(image_id)
        references[image_id] = list(captions)
    if not any(references.values()):
        raise DataError(f"{path} has no references: expected at least one image with captions")
    _refuse(twice, "listed more than once", path, "expected every image once")
    _refuse(empty, "with an empty reference", path, "expected text in every reference")
    return references


def _coco(content: Mapping[str, Any], path: str | Path, by: IdKey) -> Iterator[tuple[Any, Any]]:
    names: dict[str, Any] = {}
    twice = []
    for index, image in enumerate(_rows(content.get("images"), f"{path}, images")):
        image_id = _id(image.get("id"), f"{path}, images[{index}].id")
        if image_id in names:
            twice.append(image_id)
        names[image_id] = image_id if by == "image_id" else image.get("file_name")
    _refuse(twice, "listed more than once under 'images'", path, "expected every image once")
    captions: dict[str, list[Any]] = {image_id: [] for image_id in names}
    unknown = []
    for index, annotation in enumerate(_rows(content["annotations"], f"{path}, annotations")):
        image_id = _id(annotation.get("image_id"), f"{path}, annotations[{index}].image_id")
        if image_id in captions:
            captions[image_id].append(annotation.get("caption"))
        else:
            unknown.append(image_id)
    _refuse(unknown, "annotated but not among 'images'", path, "expected every annotated image there")
    return ((names[image_id], texts) for image_id, texts in captions.items())


def _karpathy(rows: Iterable[dict[str, Any]], path: str | Path, by: IdKey) -> Iterator[tuple[Any, Any]]:
    for row in rows:
        sentences = row.get("sentences")
        if not isinstance(sentences, list):
            raise DataError(
                f"{path}: 'sentences' of image {shown(row.get('filename'))} is {shown(sentences)}: expected a list"
            )
        yield _karpathy_id(row, by), [_sentence(sentence) for sentence in sentences]


def _karpathy_id(row: dict[str, Any], by: IdKey) -> Any:
    return row.get("cocoid", row.get("imgid")) if by == "image_id" else row.get("filename")


def _of_split(rows: Sequence[dict[str, Any]], split: str | None, path: str | Path) -> list[dict[str, Any]]:
    wanted = ("train", "restval") if split == "train" else (split,)
    for index, row in enumerate(rows):
        if not isinstance(row.get("split"), str):
            raise DataError(f"{path}, images[{index}].split is {shown(row.get('split'))}: expected a string")
    found = [row for row in rows if row.get("split") in wanted]
    if not found:
        names = dict.fromkeys(row["split"] for row in rows)
        raise DataError(f"no split {split!r} in {path}: it has {', '.join(names)}")
    return found


def _sentence(sentence: Any) -> Any:
    if isinstance(sentence, dict) and "raw" in sentence:
        return sentence["raw"]
    if isinstance(sentence, dict) and isinstance(sentence.get("tokens"), list):
        return " ".join(map(str, sentence["tokens"]))
    return sentence


def references_for(
    image_ids: Iterable[str], references: Mapping[str, Sequence[str]], source: str | Path
) -> list[list[str]]:
    """The references of N images.

    Raises:
        DataError: an image has none in ``references``; with ``source``, the count and the first offenders.
    """
    ids = list(image_ids)
    missing = [image_id for image_id in ids if image_id not in references]
    known = next(iter(references), "none")
    _refuse(missing, "captioned but without references", source, f"its ids are such as {shown(known)}", len(ids))
    bare = [image_id for image_id in ids if not references[image_id]]
    _refuse(bare, "captioned, and their list of references is empty", source, "expected at least one", len(ids))
    return [list(references[image_id]) for image_id in ids]


def find_images(folder: str | Path, image_ids: Iterable[str]) -> list[str]:
    """Find the file of each image in a folder and the folders below it.

    An id names a file by its name, its stem, or, for a whole number, by the digits that its stem ends in
    (``391895`` is ``COCO_val2014_000000391895.jpg``).

    Raises:
        DataError: the folder does not exist, or an id has no file or several.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"image folder {str(root)!r} does not exist")
    found: dict[str, set[Path]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            digits = path.stem[len(path.stem.rstrip("0123456789")) :]
            for key in {path.name, path.stem, *([str(int(digits))] if digits else [])}:
                found.setdefault(key, set()).add(path)
    ids = list(image_ids)
    missing = [image_id for image_id in ids if image_id not in found]
    _refuse(missing, "without a file here", root, "expected a file named like the id", len(ids))
    several = [image_id for image_id in ids if len(found[image_id]) > 1]
    _refuse(several, "with more than one file", root, "expected one file per id", len(ids))
    return [str(next(iter(found[image_id]))) for image_id in ids]


def check_space(folder: str | Path, needed: float, dtype: str) -> None:
    """Raise ``DataError`` where the disk of ``folder`` has less space than the ``needed`` bytes of features."""
    free = shutil.disk_usage(folder).free
    logger.info("%s: about %.1f GB will be written, %.1f GB are free", folder, max(needed, 0) / 1e9, free / 1e9)
    if needed > free:
        hint = ", or half of it with dtype float16" if dtype == "float32" else ""
        raise DataError(f"{folder} has {free / 1e9:.1f} GB of free space: expected about {needed / 1e9:.1f} GB{hint}")


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON, whole or not at all (see ``write_text``).

    Raises:
        OSError: the file cannot be written; the error names it.
        ValueError: a number is not finite.
    """
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all (``rewards.files.atomic_write``); an ``OSError`` names the file."""
    with atomic_write(path) as file:
        file.write(text.encode())


def _content(path: str | Path) -> Any:
    """The JSON value of a file or of a pipe, which can be read once; of gzip its content, whatever the file's name."""
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode) and not str(path).startswith(("/dev/", "/proc/")):
            raise DataError(f"{path} is a named pipe, which may have no writer: name a file, or pipe into /dev/stdin")
        data = Path(path).read_bytes()
    except DataError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is a damaged gzip file: {error}") from error
    return parse_json(data, path)


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and is_unicode(value)


def _rows(content: Any, where: str | Path) -> Iterator[dict[str, Any]]:
    if not isinstance(content, list):
        raise DataError(f"{where} is {shown(content)}: expected a list of objects")
    for index, row in enumerate(content):
        if not isinstance(row, dict):
            raise DataError(f"{where}, [{index}] is {shown(row)}: expected an object")
        yield row


def _id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not (isinstance(value, int) or _is_text(value)) or value == "":
        raise DataError(f"{where} is {shown(value)}: expected a whole number or a string of whole characters")
    return str(value)


def _refuse(image_ids: Sequence[str], problem: str, path: str | Path, expected: str, total: int | None = None) -> None:
    if image_ids:
        first = ", ".join(shown(image_id) for image_id in list(dict.fromkeys(image_ids))[:SHOWN])
        count = f"{len(image_ids)} of {total}" if total is not None else f"{len(image_ids)}"
        raise DataError(f"{path}: {count} images are {problem} (first: {first}); {expected}")
