"""Crisscrossed Captions (CxC), image-text similarity: captions of COCO rated 0 to 5 for their own and for other images.

Source: Parekh et al., "Crisscrossed Captions: Extended Intramodal and Intermodal Semantic Similarity Judgments for
MS-COCO", EACL 2021. ``sits_val.csv`` and ``sits_test.csv`` (``caption``, such as ``COCO_val2014:sentid:648388``,
``image``, ``agg_score``, ``sampling_method``), means of several people's ratings of the 5,000 images of each of
Karpathy's splits. The texts are in ``captions_val2014.json``, whose annotation ids the sentids are.

Printed is the mean of Spearman's correlation over 1,000 samples of half of the captions, each with one of its images
(section 5). The ratings of pairs of images (``sis``) and of pairs of captions (``sts``) are none of captions of images.

References are the image's captions less the judged one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rl_caption.meta_evaluation.sets.base import (
    JudgingSetError,
    RatedCaptions,
    csv_rows,
    image_folder,
    number_of,
    require,
    text_of,
)
from rl_caption.meta_evaluation.sets.coco import CocoCaption, coco_captions, coco_id

SOURCE = (
    "the folder data of https://github.com/google-research-datasets/Crisscrossed-Captions; captions_val2014.json and "
    "val2014 from https://cocodataset.org/"
)


def cxc(
    folder: Path, images: Path | None = None, partial: bool = False, split: Literal["val", "test"] = "test"
) -> list[RatedCaptions]:
    """Read the image-text ratings of CxC.

    Args:
        folder: of the files.
        images: folder of the photos (COCO's ``val2014``); None looks below ``folder``.
        partial: of no effect, the paper does not print the number of ratings of a split.
        split: of Karpathy.

    Raises:
        JudgingSetError: a file is missing or wrong.
    """
    name = "cxc"
    if split not in ("val", "test"):
        raise JudgingSetError(f"{name} has no split {split!r}: expected val or test")
    place = folder / "data" if (folder / "data").is_dir() else folder
    path = require(place, name, [f"sits_{split}.csv"], SOURCE)
    file = require(folder, name, ["captions_val2014.json"], SOURCE)
    known = {caption.caption_id: caption for caption in coco_captions(file)}
    own: dict[str, list[CocoCaption]] = {}
    for caption in known.values():
        own.setdefault(caption.image_id, []).append(caption)
    captions, ratings, ids, references = [], [], [], []
    for where, row in csv_rows(path, ["caption", "image", "agg_score"]):
        sentence = row["caption"].rpartition(":")[2]
        if sentence not in known:
            raise JudgingSetError(f"{where}: {file.name} has no caption {row['caption']!r:.80}")
        ids.append(text_of(row, "image", where))
        captions.append(known[sentence].caption)
        ratings.append(number_of(row["agg_score"], f"{where}: 'agg_score'"))
        others = [text.caption for text in own.get(coco_id(ids[-1]), []) if text.caption_id != sentence]
        if not others:
            raise JudgingSetError(f"{where}: {file.name} has no other caption of {ids[-1]!r:.80}")
        references.append(others)
    if not captions:
        raise JudgingSetError(f"{path} has no ratings. Get it: {SOURCE}")
    photos = image_folder(folder, images, ["val2014", "images"])
    found = None if photos is None else [photos / image for image in ids]
    convention = (
        "each pair of caption and image is a judgement; references are the image's captions less the judged one"
    )
    return [RatedCaptions(f"{name} {split}", captions, ratings, ids, found, references, "spearman", convention)]
