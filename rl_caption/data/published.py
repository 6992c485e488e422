"""Data sets in the layouts in which they are published: COCO annotations, ShareGPT4V, DCI,
Urban-1k.

Those whose files are JSON lines (DOCCI, ImageInWords, DeCapBench) are read by ``data.format:
jsonl`` with ``data.columns`` (docs/data.md).
"""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from rewards.base import naming
from rewards.images import list_images
from rl_caption.data.base import DataError, Row, RowView, Splits
from rl_caption.data.file_checks import progress
from rl_caption.data.files import coco_records
from rl_caption.data.formats import grouped_by_split
from rl_caption.data.plain_files import read_json, read_utf8
from rl_caption.runtime.options import Range

logger = logging.getLogger(__name__)


class _Turn(TypedDict):
    value: str


class _Conversation(TypedDict):
    image: str
    conversations: list[_Turn]


class _DenseImage(TypedDict):
    image: str
    summaries: NotRequired[dict[str, Any] | None]


def coco(
    path: str | Path,
    image_root: str | Path | None = None,
    split: str = "val",
    split_by: str | None = None,
) -> Splits:
    """Captions in COCO's annotation format (``images`` and ``annotations``), such as those of
    NoCaps, in one split.

    ``image_id`` is the image's ``id``; an image without annotations has no references.

    Args:
        path: the JSON file.
        image_root: the folder of the images, relative to the file's folder; None is that folder
            itself.
        split: name of the split.
        split_by: a key of the images whose values are the splits instead, such as ``domain`` of
            NoCaps (``in-domain``, ``near-domain``, ``out-domain``).

    Raises:
        DataError: the file is of another format, or an annotation is of an image that is not
            listed.
    """
    file = Path(path)
    root, rows = file.parent / (image_root or ""), []
    for image, captions in coco_records(read_json(file, DataError), file):
        with naming(str(file), (KeyError, TypeError), DataError):
            place = os.path.join(root, image["file_name"])
        row: Row = {"image_id": str(image["id"]), "image": place, "references": captions}
        if "width" in image and "height" in image:
            row["size"] = (image["width"], image["height"])
        rows.append((split if split_by is None else str(image.get(split_by)), row))
    return Splits(grouped_by_split(rows, file), file)


def sharegpt4v(
    path: str | Path,
    image_root: str | Path | None = None,
    val_images: Annotated[int, Range(min=1, max=10**7)] = 1000,
) -> Splits:
    """Conversations of ShareGPT4V (Chen et al., ECCV 2024), of which the last turn is the
    description of the image.

    The first ``val_images`` are the split ``val``, as in Long-CLIP's code, all others ``train``.
    ``image_id`` is the image's path in the file; the description, with spaces for line breaks, is
    the only reference, and the ``long_reference``.

    Args:
        path: the JSON file, such as ``share-captioner_coco_lcs_sam_1246k_1107.json``.
        image_root: the folder that ``coco``, ``llava`` and ``sam`` are in, relative to the file's
            folder; None is that folder itself.
        val_images: number of images in ``val``.

    Raises:
        DataError: the file is of another format.
    """
    file = Path(path)
    texts = []  # tuples in place of rows: there are 1.2 million
    for item in read_json(file, DataError, list[_Conversation]):
        if turns := item["conversations"]:
            texts.append((item["image"], turns[-1]["value"].replace("\n", " ")))
    make = partial(_described_row, str(file.parent / (image_root or "")))
    rows = {"train": texts[val_images:], "val": texts[:val_images]}
    return Splits({split: RowView(pairs, make) for split, pairs in rows.items()}, file)


def _described_row(root: str, index: int, pair: tuple[str, str]) -> Row:
    name, description = pair
    place = os.path.join(root, name)
    return {
        "image_id": name,
        "image": place,
        "references": [description],
        "long_reference": description,
    }


def densely_captioned(path: str | Path) -> Splits:
    """sDCI: about ten summaries of each image's dense description (Urbanek et al., CVPR 2024).

    The summaries of the whole image are its references, the first its ``long_reference``. Images
    without any are left out, as in the released code; the log counts them. ``image_id`` is the name
    of the annotation.

    Args:
        path: the folder ``densely_captioned_images`` with ``complete``, ``photos`` and
            ``splits.json``. Its split ``valid`` is ``val`` here.

    Raises:
        DataError: a file is of another format.
    """
    folder = Path(path)
    rows = []
    for split, files in read_json(folder / "splits.json", DataError, dict[str, list[str]]).items():
        for name in progress(files, split, "image"):
            rows.append(("val" if split == "valid" else split, _dense_row(folder, name)))
    described = [(split, row) for split, row in rows if row["references"]]
    if len(described) < len(rows):
        lost = len(rows) - len(described)
        logger.info("%s: %d of %d images have no summaries", folder, lost, len(rows))
    return Splits(grouped_by_split(described, folder), folder)


def _dense_row(folder: Path, name: str) -> Row:
    content = read_json(folder / "complete" / name, DataError, _DenseImage)
    summaries = (content.get("summaries") or {}).get("base", [])
    texts = [summaries] if isinstance(summaries, str) else summaries
    references = [text for text in texts if text.strip()]
    row: Row = {
        "image_id": name,
        "image": os.path.join(folder, "photos", content["image"]),
        "references": references,
    }
    return {**row, "long_reference": references[0]} if references else row


def urban1k(path: str | Path) -> Splits:
    """A folder of images and a folder of texts with the same names, as Urban-1k (Zhang et al.,
    "Long-CLIP", ECCV 2024).

    The first line of ``caption/NAME.txt`` is the reference of ``image/NAME.jpg``; all are in the
    split ``test``.
    """
    folder = Path(path)
    rows = []
    for image in sorted(
        list_images(folder / "image"), key=lambda file: (len(file.stem), file.stem)
    ):
        lines = read_utf8(folder / "caption" / f"{image.stem}.txt").splitlines()
        row: Row = {"image_id": image.stem, "image": str(image), "references": lines[:1]}
        rows.append(("test", row))
    return Splits(grouped_by_split(rows, folder), folder)
