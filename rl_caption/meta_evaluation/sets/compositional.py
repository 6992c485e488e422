"""SugarCrepe and ARO: a caption of an image against one that differs in who does what, or in which thing is how.

Only metrics that look at images can be judged: the sets have no references.

SugarCrepe (Hsieh et al., NeurIPS 2023): 7,511 pairs in seven files, images of COCO val2017. A tie is wrong. Printed is
the accuracy of each file; the summary here is their mean.

ARO (Yuksekgonul et al., ICLR 2023): ``visual_genome_relation.json`` and ``visual_genome_attribution.json``. The image
is cut to the box of the two things. A tie is wrong. Printed is the mean over relations, less those of
``ARO_LEFT_OUT``, and the mean over pairs of attributes that occur 25 times or more. Its two Order sets are not read:
their wrong captions are shuffled anew in every run of the released code, so there is no published file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from rewards.images import open_image
from rl_caption.meta_evaluation.sets.aro_relations import ARO_LEFT_OUT
from rl_caption.meta_evaluation.sets.base import (
    CaptionPairs,
    JudgingSetError,
    check_count,
    image_folder,
    list_of,
    number_of,
    read_json,
    require,
    text_of,
)

SUGARCREPE_SOURCE = (
    "the folder data of https://github.com/RAIVNLab/sugar-crepe, and val2017 from https://cocodataset.org/"
)
SUGARCREPE = {
    "add_att": 692,
    "add_obj": 2062,
    "replace_att": 788,
    "replace_obj": 1652,
    "replace_rel": 1406,
    "swap_att": 666,
    "swap_obj": 245,
}
"""File -> published number of pairs."""
ARO_SOURCE = "the files that https://github.com/mertyg/vision-language-models-are-bows downloads, with their images"
ARO = {"relation": 23_937, "attribution": 28_748}
MIN_ATTRIBUTE_PAIRS = 25


def sugarcrepe(folder: Path, images: Path | None = None, partial: bool = False) -> list[CaptionPairs]:
    """Read SugarCrepe.

    Args:
        folder: of the seven files.
        images: folder of the photos (COCO's ``val2017``); None looks below ``folder``.
        partial: accept other numbers of pairs than the published ones.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of pairs.
    """
    name = "sugarcrepe"
    rows = []
    for kind, published in SUGARCREPE.items():
        path = require(folder, name, [f"{kind}.json"], SUGARCREPE_SOURCE)
        content = read_json(path)
        if not isinstance(content, dict):
            raise JudgingSetError(
                f"{path} is not of SugarCrepe: expected an object of number -> filename, caption, ..."
            )
        check_count(name, f"pairs in {path}", len(content), published, partial)
        fields = ("filename", "caption", "negative_caption")
        rows += [(kind, *(text_of(item, field, f"{path}, {key}") for field in fields)) for key, item in content.items()]
    if not rows:
        raise JudgingSetError(f"{name} has no pairs in {str(folder)!r}. Get it: {SUGARCREPE_SOURCE}")
    photos = image_folder(folder, images, ["val2017", "images"])
    kinds, files, captions, negatives = (list(column) for column in zip(*rows, strict=True))
    return [
        CaptionPairs(
            name,
            captions,
            negatives,
            [1.0] * len(rows),
            kinds,
            files,
            None if photos is None else [photos / file for file in files],
            {},
            "the caption scores higher than its hard negative; equal scores are wrong",
            summary="kinds",
        )
    ]


@dataclass(frozen=True)
class Region:
    """A part of an image file, cut out when it is needed."""

    path: Path
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""

    def render(self) -> Image.Image:
        """Read the file and cut the part out.

        Raises:
            RewardError: it cannot be read.
        """
        return open_image(self.path).crop(self.box)


def aro(folder: Path, images: Path | None = None, partial: bool = False) -> list[CaptionPairs]:
    """Read the relations and attributes of ARO; arguments and errors as for ``sugarcrepe`` (images in ``images``)."""
    photos = image_folder(folder, images, ["images", "VG_100K"])
    return [_aro(folder, part, published, photos, partial) for part, published in ARO.items()]


def _aro(folder: Path, part: str, published: int, photos: Path | None, partial: bool) -> CaptionPairs:
    name = f"aro {part}"
    path = require(folder, "aro", [f"visual_genome_{part}.json"], ARO_SOURCE)
    content = list_of(read_json(path), path)
    check_count(name, "pairs", len(content), published, partial)
    rows = [(_kind(item, part, f"{path}, [{number}]"), item, number) for number, item in enumerate(content)]
    often = Counter(kind for kind, _, _ in rows)
    if part == "relation":
        kept = [row for row in rows if row[0] not in ARO_LEFT_OUT]
        reason = "relations that the released evaluation leaves out"
    else:
        kept = [row for row in rows if often[row[0]] >= MIN_ATTRIBUTE_PAIRS]
        reason = f"pairs of attributes that occur less than {MIN_ATTRIBUTE_PAIRS} times"
    if not kept:
        raise JudgingSetError(f"{path}: none of {len(rows)} pairs is left: {reason}")
    wheres = [f"{path}, [{number}]" for _, _, number in kept]
    files = [text_of(item, "image_path", where) for (_, item, _), where in zip(kept, wheres, strict=True)]
    boxes = [_box(item, where) for (_, item, _), where in zip(kept, wheres, strict=True)]
    return CaptionPairs(
        name,
        [text_of(item, "true_caption", where) for (_, item, _), where in zip(kept, wheres, strict=True)],
        [text_of(item, "false_caption", where) for (_, item, _), where in zip(kept, wheres, strict=True)],
        [1.0] * len(kept),
        [kind for kind, _, _ in kept],
        files,
        None if photos is None else [Region(photos / file, box) for file, box in zip(files, boxes, strict=True)],
        {},
        f"the true caption scores higher than the false one; equal scores are wrong; mean over {part}s",
        {reason: len(rows) - len(kept)},
        shown_kinds=False,
        summary="kinds",
    )


def _kind(item: Any, part: str, where: str) -> str:
    if part == "relation":
        return text_of(item, "relation_name", where)
    attributes = item.get("attributes")
    if not isinstance(attributes, list) or len(attributes) != 2:
        raise JudgingSetError(f"{where}: 'attributes' is {attributes!r:.80}: expected two")
    return f"{attributes[0]}_{attributes[1]}"


def _box(item: Any, where: str) -> tuple[float, float, float, float]:
    left, top, width, height = (
        number_of(item.get(f"bbox_{side}"), f"{where}: 'bbox_{side}'") for side in ("x", "y", "w", "h")
    )
    return left, top, left + width, top + height
