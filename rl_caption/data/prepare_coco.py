"""COCO captions with Karpathy's splits: make the checked folder that the configurations read from
the downloads.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data, check_row_images
from rl_caption.data.rows import karpathy

logger = logging.getLogger(__name__)

KARPATHY = "dataset_coco.json"
SOURCES = """\
  dataset_coco.json
    https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip
  images, unpacked side by side (--images)
    http://images.cocodataset.org/zips/train2014.zip (13 GB) and val2014.zip (6 GB)
  bottom-up features, of `rl-caption prepare_features` (--features)
    trainval.zip (10 to 100 regions) of https://github.com/peteanderson80/bottom-up-attention"""
IMAGES = {"train": 113_287, "val": 5_000, "test": 5_000}
"""Images of Karpathy's splits; ``train`` has 82,783 and ``restval`` the other 30,504."""
CAPTIONS = {"train": 566_747, "val": 25_010, "test": 25_010}
"""Their captions: together 616,767, the 414,113 of train2014 and the 202,654 of val2014."""


def prepare(
    out: str | Path,
    downloads: str | Path,
    images: str | Path | None = None,
    features: str | Path | None = None,
    features_kwargs: Mapping[str, Any] | None = None,
    subset: bool = False,
    fast: bool = False,
) -> dict[str, dict[str, int]]:
    """Check the downloads, and link them in ``out`` as ``dataset_coco.json``, ``images`` and
    ``features``.

    Arguments are those of the command line. Returns the numbers of images and captions of each
    split. Raises ``DataError`` with everything that is missing or differs.
    """
    out, download = Path(out), Path(downloads, KARPATHY)
    file = _link(out, download if download.is_file() else None, KARPATHY)
    if file is None:
        raise DataError(
            f"missing in {downloads}: {KARPATHY}. What to download:\n{SOURCES}"
        )
    rows = karpathy(file)
    counts = {
        "images": {split: len(rows[split]) for split in rows},
        "captions": {
            split: sum(len(row["references"]) for row in rows[split]) for split in rows
        },
    }
    expected = {"images": IMAGES, "captions": CAPTIONS}
    if counts != expected and not subset:
        raise DataError(
            f"{file} has {counts}, expected {expected} (a part of COCO on purpose: --subset)"
        )
    photos, regions = _link(out, images, "images"), _link(out, features, "features")
    if photos is not None:  # not for equal images in two splits: they are as published
        every = [row for split in karpathy(file, photos).values() for row in split]
        cache = out / ".checked_images.json"
        check_row_images(every, "training from pixels", not fast, cache)
    if regions is not None:
        options = dict(features_kwargs or {})
        data = karpathy(file, features_root=regions, features_kwargs=options)
        cache = out / ".checked_features.json"
        check_data(data, [*data], check_images=False, cache=cache)
    for name, place in (("images", photos), ("features", regions)):
        found = "none to check" if place is None else "all are usable"
        logger.info("%s: %s", name, found)
    return counts


def _link(out: Path, source: str | Path | None, name: str) -> Path | None:
    """The path ``out / name``, made a link to ``source`` if that is not None; None where there is
    nothing.

    A folder of features and an HDF5 file get the same name, so that configurations need not tell
    them apart.
    """
    place = out / name
    if source is not None:
        target = Path(source).resolve(strict=True)
        if not os.path.lexists(place):
            out.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)
        elif place.resolve() != target:
            raise DataError(f"{place} exists and is not {target}: remove it")
    return place.absolute() if place.exists() else None


def main(config: Any) -> int:
    """Prepare the folder as a ``PrepareCocoConfig`` says, and print what is in it."""
    options = dict(config)
    options["downloads"] = config.downloads or Path(config.out, "downloads")
    counts = prepare(**options)
    for split, number in counts["images"].items():
        print(f"{split}: {number:,} images, {counts['captions'][split]:,} captions")
    print(f"{config.out} is ready")
    return 0
