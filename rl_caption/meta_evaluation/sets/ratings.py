"""Any file of ratings: JSON lines of image, caption, rating and references (``meta_evaluation.human.read_ratings``)."""

from __future__ import annotations

import os
from pathlib import Path

from rl_caption.meta_evaluation.human import read_ratings
from rl_caption.meta_evaluation.sets.base import JudgingSetError, RatedCaptions, image_folder


def ratings(
    folder: Path, images: Path | None = None, partial: bool = False, within_images: bool = True
) -> list[RatedCaptions]:
    """Read a file of ratings.

    Args:
        folder: the file itself, or the folder of one ``.jsonl`` file.
        images: folder that the names of images are relative to; None is that of the file.
        partial: of no effect, there is no published number.
        within_images: also compare the captions of one image (or of one ``group``) with each other.

    Raises:
        JudgingSetError: there is no such file, or it is wrong.
    """
    path = folder
    if folder.is_dir():
        files = sorted(folder.glob("*.jsonl"))
        if len(files) != 1:
            raise JudgingSetError(f"{str(folder)!r} has {len(files)} .jsonl files: expected one, or the file itself")
        path = files[0]
    rated = read_ratings(path)
    place = image_folder(path.parent, images, ()) or path.parent
    found = [place / name for name in rated.images]
    return [
        RatedCaptions(
            path.stem,
            rated.captions,
            rated.ratings,
            rated.groups,
            found if os.path.isfile(found[0]) else None,
            rated.references,
            None,
            "each line is a judgement",
            within_images=within_images,
        )
    ]
