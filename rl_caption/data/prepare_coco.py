"""COCO captions with Karpathy's splits: check the folder that the configurations read."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data, check_row_images
from rl_caption.data.formats import with_features
from rl_caption.data.rows import karpathy

logger = logging.getLogger(__name__)

KARPATHY = "dataset_coco.json"
SOURCES = """\
  dataset_coco.json
    https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip
  images, unpacked side by side in the folder images
    http://images.cocodataset.org/zips/train2014.zip (13 GB) and val2014.zip (6 GB)
  features, bottom-up, of `rl-caption prepare_features`
    trainval.zip (10 to 100 regions) of https://github.com/peteanderson80/bottom-up-attention"""
IMAGES = {"train": 113_287, "val": 5_000, "test": 5_000}
"""Images of Karpathy's splits; ``train`` has 82,783 and ``restval`` the other 30,504."""
CAPTIONS = {"train": 566_747, "val": 25_010, "test": 25_010}
"""Their captions: together 616,767, the 414,113 of train2014 and the 202,654 of val2014."""


def prepare(
    folder: str | Path,
    features_kwargs: Mapping[str, Any] | None = None,
    subset: bool = False,
    fast: bool = False,
) -> dict[str, dict[str, int]]:
    """Check ``dataset_coco.json`` in a folder and, where they are there, ``images`` and
    ``features`` (a folder or an HDF5 file); each may be a link.

    Arguments are those of the command line. Returns the numbers of images and captions of each
    split. Raises ``DataError`` with everything that is missing or differs.
    """
    file = Path(folder, KARPATHY)
    photos, features = file.with_name("images"), file.with_name("features")
    if not file.is_file():
        raise DataError(f"{file} is missing. What to download:\n{SOURCES}")
    data = karpathy(file, "images")
    counts: dict[str, dict[str, int]] = {"images": {}, "captions": {}}
    for split, rows in data.items():
        counts["images"][split] = len(rows)
        counts["captions"][split] = sum(len(row["references"]) for row in rows)
    expected = {"images": IMAGES, "captions": CAPTIONS}
    if counts != expected and not subset:
        raise DataError(
            f"{file} has {counts}, expected {expected} (a part of COCO on purpose: --subset)"
        )
    if photos.exists():  # not for equal images in two splits: they are as published
        every = [row for rows in data.values() for row in rows]
        cache = file.with_name(".checked_images.json")
        check_row_images(every, "training from pixels", not fast, cache)
        logger.info("images: all are usable")
    if features.exists():
        data = with_features(data, features, features_kwargs or {})
        cache = file.with_name(".checked_features.json")
        check_data(data, [*data], check_images=False, cache=cache)
        logger.info("features: all are usable")
    return counts


def main(config: Any) -> int:
    """Check a folder as a ``PrepareCocoConfig`` says, and print what is in it."""
    counts = prepare(**dict(config))
    for split, number in counts["images"].items():
        print(f"{split}: {number:,} images, {counts['captions'][split]:,} captions")
    print(f"{config.folder} is ready")
    return 0
