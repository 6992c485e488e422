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
COUNTS = {"train": (113_287, 566_747), "val": (5_000, 25_010), "test": (5_000, 25_010)}
"""Images and captions of Karpathy's splits. ``train`` has the 82,783 images of ``train``
and the 30,504 of ``restval``. All splits have 616,767 captions: 414,113 of train2014
and 202,654 of val2014.
"""


def prepare(folder: str | Path, subset: bool = False) -> dict[str, tuple[int, int]]:
    """Count ``dataset_coco.json`` in a folder: split -> number of images, of captions.

    Raises ``DataError`` where the file is missing or, unless it is a ``subset``, a count differs.
    """
    file = Path(folder, "dataset_coco.json")
    if not file.is_file():
        raise DataError(f"{file} is missing. What to download:\n{SOURCES}")
    counts = {
        split: (len(rows), sum(len(row["references"]) for row in rows))
        for split, rows in karpathy(file).items()
    }
    if counts != COUNTS and not subset:
        raise DataError(
            f"{file} has the images and captions {counts}, expected {COUNTS} (a part of COCO on "
            "purpose: --subset)"
        )
    return counts


def main(config: Any) -> int:
    """Check a file as a ``PrepareCocoConfig`` says, and print what is in it."""
    for split, (images, captions) in prepare(**dict(config)).items():
        print(f"{split}: {images:,} images, {captions:,} captions")
    return 0
