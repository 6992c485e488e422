"""Data sets in the layouts in which they are published: generators of rows.

COCO annotations, ShareGPT4V, DCI, Urban-1k; and for reward models images alone,
captions alone and captions with a number each. Data sets in JSON lines (DOCCI,
ImageInWords, DeCapBench) are read by ``data.format: jsonl`` with ``data.columns``
(docs/data.md).
"""

import os
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat
from typing_extensions import TypedDict

from rewards.base import naming
from rewards.images import list_images
from rl_caption.data.base import DataError
from rl_caption.data.files import coco_records
from rl_caption.data.plain_files import (
    check_type,
    hash_text,
    json_lines,
    read_json,
    read_utf8,
    shown,
    single_spaced,
)
from rl_caption.data.rows import STANDARD_SPLITS, standard_split

HeldOut = Annotated[float, Field(gt=0, lt=1)]
Rows = Iterator[dict[str, Any]]
"""Rows (``rl_caption.data.base.Row``) with their ``split``."""


class _Target(TypedDict):
    caption: Annotated[str, Field(pattern=r"\S")]
    target: FiniteFloat


def coco(
    path: str | Path,
    image_root: str | Path = "",
    split: str = "val",
    split_by: str | None = None,
) -> Rows:
    """Captions in COCO's annotation format (``images`` and ``annotations``), such as
    NoCaps, in one split.

    ``image_id`` is the image's ``id``; an image without annotations has no references.

    Args:
        path: the JSON file.
        image_root: the folder of the images, relative to the file's folder.
        split: name of the split.
        split_by: a key of the images whose values are the splits instead, such as
            ``domain`` of NoCaps (``in-domain``, ``near-domain``, ``out-domain``).

    Raises:
        DataError: the file is of another format, or an annotation is of an image that
            is not listed.
    """
    file = Path(path)
    root = file.parent / image_root
    for image, captions in coco_records(read_json(file, DataError), file):
        yield {
            "split": split if split_by is None else str(image.get(split_by)),
            "image_id": str(image["id"]),
            "image": os.path.join(root, image["file_name"]),
            "references": captions,
        }


def sharegpt4v(
    path: str | Path,
    image_root: str | Path = "",
    val_images: Annotated[int, Field(ge=1, le=10**7)] = 1000,
) -> Rows:
    """Conversations of ShareGPT4V (Chen et al., ECCV 2024), whose last turn describes
    the image.

    The first ``val_images`` are the split ``val``, as in Long-CLIP's code, all others
    ``train``. ``image_id`` is the image's path in the file; the description, with
    spaces for line breaks, is the only reference, and the ``long_reference``.

    Args:
        path: the JSON file, such as ``share-captioner_coco_lcs_sam_1246k_1107.json``.
        image_root: the folder that ``coco``, ``llava`` and ``sam`` are in, relative to
            the file's folder.
        val_images: number of images in ``val``.

    Raises:
        DataError: the file is of another format.
    """
    file = Path(path)
    root = file.parent / image_root
    items = read_json(file, DataError, list)
    for index, item in enumerate(filter(itemgetter("conversations"), items)):
        description = item["conversations"][-1]["value"].replace("\n", " ")
        yield {
            "split": "val" if index < val_images else "train",
            "image_id": item["image"],
            "image": os.path.join(root, item["image"]),
            "references": [description],
            "long_reference": description,
        }


def densely_captioned(path: str | Path) -> Rows:
    """sDCI: about ten summaries of each image's dense description (Urbanek et al., CVPR 2024).

    The summaries of the whole image are its references, the first its
    ``long_reference``. Images without one are left out, as in the released code.
    ``image_id`` is the name of the annotation.

    Args:
        path: the folder ``densely_captioned_images`` with ``complete``, ``photos`` and
            ``splits.json``. Its split ``valid`` is ``val`` here.

    Raises:
        DataError: a file is of another format.
    """
    folder = Path(path)
    files = read_json(folder / "splits.json", DataError, dict[str, list[str]])
    for split, names in files.items():
        for name in names:
            content = read_json(folder / "complete" / name, DataError)
            summaries = (content.get("summaries") or {}).get("base", [])
            texts = [summaries] if isinstance(summaries, str) else summaries
            references = [text for text in texts if text.strip()]
            if references:
                yield {
                    "split": standard_split(split),
                    "image_id": name,
                    "image": os.path.join(folder, "photos", content["image"]),
                    "references": references,
                    "long_reference": references[0],
                }


def urban1k(path: str | Path) -> Rows:
    """A folder of images and a folder of texts with the same names, as Urban-1k (Zhang
    et al., "Long-CLIP", ECCV 2024).

    The first line of ``caption/NAME.txt`` is the reference of ``image/NAME.jpg``; all
    are in the split ``test``.
    """
    folder = Path(path)
    images = list_images(folder / "image")
    for image in sorted(images, key=lambda file: (len(file.stem), file.stem)):
        lines = read_utf8(folder / "caption" / f"{image.stem}.txt").splitlines()
        yield {
            "split": "test",
            "image_id": image.stem,
            "image": str(image),
            "references": lines[:1],
        }


def _held_out(split: str, key: str, val_fraction: float) -> str:
    """``val`` where a training row's key hashes below the fraction, the same in every run."""
    is_held_out = split == "train" and hash_text(key) / 2**64 < val_fraction
    return "val" if is_held_out else split


def images(path: str | Path, val_fraction: HeldOut = 0.01) -> Rows:
    """A folder tree of images without captions, such as ImageNet.

    Folders ``train``, ``val`` and ``test`` at its top are the splits; everything else
    is ``train``. Without ``val``, about ``val_fraction`` of the training images are
    held out by a hash of their path: the same in every run, whatever else is in the
    folder. ``image_id`` is the path in the folder. Files and folders whose names begin
    with a dot are left out; links to folders are followed.
    """
    root = Path(path)
    folders = map(standard_split, (path.name for path in root.glob("*/")))
    fraction = 0 if "val" in folders else val_fraction
    for file in list_images(root):
        place = file.relative_to(root)
        folder, name = standard_split(place.parts[0]), place.as_posix()
        split = folder if folder in STANDARD_SPLITS else "train"
        yield {
            "split": _held_out(split, name, fraction),
            "image_id": name,
            "image": str(file),
            "references": [],
        }


def captions(
    path: str | Path,
    column: Annotated[int, Field(ge=0)] | None = None,
    val_fraction: HeldOut = 0.01,
) -> Rows:
    """Captions without images, one per line, such as CC3M.

    Empty lines are skipped. ``image_id`` is the file's name and the line,
    ``train.tsv:17``. Raises ``DataError``, which names file and line, where a line is
    wrong.

    Args:
        path: a text file, UTF-8, or a folder with files of the splits: ``train``,
            ``val`` and ``test`` with any extension.
        column: the column of the caption, separated by tabs and counted from 0 (CC3M:
            0); None is the whole line.
        val_fraction: without a file ``val``, about this fraction of the captions is
            held out by their hash: the same ones in every run, equal captions together.
    """
    root = Path(path)
    files = {root: "train"}
    if root.is_dir():
        paths = sorted(filter(Path.is_file, root.iterdir()))
        files = {file: standard_split(file.stem) for file in paths}
    fraction = 0 if "val" in files.values() else val_fraction
    for file, split in files.items():
        if split not in STANDARD_SPLITS:
            continue
        if file.suffix.lower() == ".csv":
            raise DataError(
                f"{file}: expected one caption a line, or columns separated by tabs"
            )
        lines = read_utf8(file).split("\n")
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            columns = line.rstrip("\r").split("\t")
            place = f"{file}, line {number} has {len(columns)} columns, {shown(line)}"
            asked = f"{place}: data.kwargs.column is {column}, counted from 0"
            with naming(asked, (ValueError, IndexError), DataError):
                (caption,) = columns if column is None else [columns[column]]
            caption = caption.strip()
            yield {
                "split": _held_out(split, caption, fraction),
                "image_id": f"{file.name}:{number}",
                "references": [caption],
            }


def caption_targets(path: str | Path, val_fraction: HeldOut = 0.05) -> Rows:
    """JSON lines ``{"caption": ..., "target": ...}`` without images (docs/papers.md).

    Empty lines are skipped, and further keys ignored. ``image_id`` is the file's name
    and the line. ``val`` is held out as for ``captions``. Raises ``DataError``, which
    names file and line, where a line is wrong.
    """
    file = Path(path)
    for number, where, item in json_lines(file):
        check_type(item, _Target, where)
        caption = single_spaced(item["caption"])
        yield {
            "split": _held_out("train", caption, val_fraction),
            "image_id": f"{file.name}:{number}",
            "references": [caption],
            "target": float(item["target"]),
        }
