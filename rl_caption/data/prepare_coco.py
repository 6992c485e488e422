"""COCO captions with Karpathy's splits: check the counts of the file that the configurations read.

Images and features are checked by ``doctor`` and by the programs that read them.
"""

from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.data.rows import karpathy

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


def prepare(folder: str | Path, subset: bool = False) -> dict[str, dict[str, int]]:
    """Count images and captions of each split of ``dataset_coco.json`` in a folder.

    Raises ``DataError`` where the file is missing or, unless it is a ``subset``, a count differs.
    """
    file = Path(folder, "dataset_coco.json")
    if not file.is_file():
        raise DataError(f"{file} is missing. What to download:\n{SOURCES}")
    counts: dict[str, dict[str, int]] = {"images": {}, "captions": {}}
    for split, rows in karpathy(file).items():
        counts["images"][split] = len(rows)
        counts["captions"][split] = sum(len(row["references"]) for row in rows)
    expected = {"images": IMAGES, "captions": CAPTIONS}
    if counts != expected and not subset:
        raise DataError(
            f"{file} has {counts}, expected {expected} (a part of COCO on purpose: --subset)"
        )
    return counts


def main(config: Any) -> int:
    """Check a file as a ``PrepareCocoConfig`` says, and print what is in it."""
    counts = prepare(**dict(config))
    for split, number in counts["images"].items():
        print(f"{split}: {number:,} images, {counts['captions'][split]:,} captions")
    return 0
