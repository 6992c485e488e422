"""Files of captions and of references, in the formats of the field. Ids are strings everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rewards.files import atomic_write
from rl_caption.data.base import DataError

IdKey = Literal["image_id", "image_name"]
_SHOWN = 3


def read_captions(path: str | Path, *, allow_empty: bool = False) -> dict[str, str]:
    """Read one caption per image: COCO result format, ``[{"image_id": …, "caption": …}, …]``.

    ``image_name`` in place of ``image_id`` is accepted; ``id_key`` says which of them a file has.

    Args:
        path: the JSON file.
        allow_empty: accept captions without a word, which a model may well produce.

    Returns:
        Image id -> caption, in the order of the file.

    Raises:
        DataError: not such a file, an image twice, or an empty caption; with counts and the first offenders.
    """
    key = id_key(path)
    captions: dict[str, str] = {}
    twice, empty = [], []
    for index, row in enumerate(_rows(_content(path), path)):
        image_id = _id(row.get(key), f"{path}, [{index}].{key}")
        caption = row.get("caption")
        if not isinstance(caption, str):
            raise DataError(f"{path}, [{index}].caption is {caption!r:.80}: expected a string")
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


def id_key(path: str | Path) -> IdKey:
    """Return whether a file in COCO result format names its images by ``image_id`` or by ``image_name``."""
    for row in _rows(_content(path), path):
        return "image_name" if "image_id" not in row and "image_name" in row else "image_id"
    return "image_id"


def read_references(path: str | Path, split: str | None = None, *, by: IdKey = "image_id") -> dict[str, list[str]]:
    """Read the captions that people wrote for each image.

    The format is told by the content: ``{image_id: [str, …]}``; COCO annotations (``images`` and ``annotations``);
    Karpathy JSON (an image's id is its ``cocoid``, or else its ``imgid``); or a list of
    ``{"image_id": …, "captions": [str, …]}``.

    Args:
        path: the JSON file.
        split: Karpathy JSON only: ``train`` (with ``restval``), ``val`` or ``test``; None takes all.
        by: what the result's keys are. ``image_name`` is ``file_name`` in COCO annotations, ``filename`` in Karpathy
            JSON, ``image_name`` in a list.

    Returns:
        Image id -> references as written, in the order of the file; images without any are left out.

    Raises:
        DataError: no such format, an image twice, an empty reference, or a split that is not there.
    """
    content = _content(path)
    is_karpathy = isinstance(content, dict) and isinstance(content.get("images"), list) and "annotations" not in content
    if split is not None and not is_karpathy:
        raise DataError(f"{path} has no splits: only Karpathy JSON has them; leave split {split!r} out")
    if is_karpathy:
        pairs = _karpathy(content["images"], path, split, by)
    elif isinstance(content, dict) and "annotations" in content:
        pairs = _coco(content, path, by)
    elif isinstance(content, dict):
        if by != "image_id":
            raise DataError(f"{path} has no image names: its keys are image ids")
        pairs = iter(content.items())
    else:
        pairs = ((row.get(by), row.get("captions")) for row in _rows(content, path))
    return _collected(pairs, path)


def _collected(pairs: Iterable[tuple[Any, Any]], path: str | Path) -> dict[str, list[str]]:
    references: dict[str, list[str]] = {}
    twice, empty = [], []
    for index, (raw_id, captions) in enumerate(pairs):
        image_id = _id(raw_id, f"{path}, id of image {index}")
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            raise DataError(f"{path}: captions of image {image_id!r} are {captions!r:.80}: expected a list of strings")
        if image_id in references:
            twice.append(image_id)
        if any(not caption.strip() for caption in captions):
            empty.append(image_id)
        if captions:
            references[image_id] = list(captions)
    if not references:
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


def _karpathy(records: Any, path: str | Path, split: str | None, by: IdKey) -> Iterator[tuple[Any, Any]]:
    rows = list(_rows(records, f"{path}, images"))
    if split is not None:
        wanted = {"train", "restval"} if split == "train" else {split}
        splits = dict.fromkeys(str(row.get("split")) for row in rows)
        rows = [row for row in rows if row.get("split") in wanted]
        if not rows:
            raise DataError(f"no split {split!r} in {path}: it has {', '.join(splits)}")
    for row in rows:
        sentences = row.get("sentences")
        if not isinstance(sentences, list):
            raise DataError(
                f"{path}: 'sentences' of image {row.get('filename')!r} is {sentences!r:.80}: expected a list"
            )
        image_id = row.get("cocoid", row.get("imgid")) if by == "image_id" else row.get("filename")
        yield image_id, [_sentence(sentence) for sentence in sentences]


def _sentence(sentence: Any) -> Any:
    if isinstance(sentence, dict) and "raw" in sentence:
        return sentence["raw"]
    if isinstance(sentence, dict) and isinstance(sentence.get("tokens"), list):
        return " ".join(map(str, sentence["tokens"]))
    return sentence


def references_for(
    image_ids: Iterable[str], references: Mapping[str, Sequence[str]], source: str | Path
) -> list[list[str]]:
    """Return the references of each image.

    Args:
        image_ids: N ids.
        references: image id -> references.
        source: the file that messages name.

    Raises:
        DataError: an image has none; with the count and the first offenders.
    """
    ids = list(image_ids)
    missing = [image_id for image_id in ids if image_id not in references]
    known = next(iter(references), "none")
    _refuse(missing, "captioned but without references", source, f"its ids are such as {known!r}", len(ids))
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
            for key in {path.name, path.stem, *_number_at_end(path.stem)}:
                found.setdefault(key, set()).add(path)
    ids = list(image_ids)
    missing = [image_id for image_id in ids if image_id not in found]
    _refuse(missing, "without a file here", root, "expected a file named like the id", len(ids))
    several = [image_id for image_id in ids if len(found[image_id]) > 1]
    _refuse(several, "with more than one file", root, "expected one file per id", len(ids))
    return [str(next(iter(found[image_id]))) for image_id in ids]


def _number_at_end(stem: str) -> list[str]:
    digits = stem[len(stem.rstrip("0123456789")) :]
    return [str(int(digits))] if digits else []


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON, whole or not at all (see ``write_text``).

    Raises:
        OSError: the file cannot be written; the error names it.
        ValueError: a number is not finite.
    """
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all (see ``rewards.files.atomic_write``).

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    with atomic_write(path) as file:
        file.write(text.encode())


def _content(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise DataError(f"{path} is not JSON: {error}") from error


def _rows(content: Any, where: str | Path) -> Iterator[dict[str, Any]]:
    if not isinstance(content, list):
        raise DataError(f"{where} is {content!r:.80}: expected a list of objects")
    for index, row in enumerate(content):
        if not isinstance(row, dict):
            raise DataError(f"{where}, [{index}] is {row!r:.80}: expected an object")
        yield row


def _id(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{where} is {value!r:.80}: expected a whole number or a string")
    return str(value)


def _refuse(image_ids: Sequence[str], problem: str, path: str | Path, expected: str, total: int | None = None) -> None:
    if image_ids:
        first = ", ".join(repr(image_id) for image_id in list(dict.fromkeys(image_ids))[:_SHOWN])
        count = f"{len(image_ids)} of {total}" if total is not None else f"{len(image_ids)}"
        raise DataError(f"{path}: {count} images are {problem} (first: {first}); {expected}")
