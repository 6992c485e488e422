"""Tables of validation captions in trackers: an image, what is said of it now and was said at
first, and the scores.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from PIL import Image, ImageOps

from rl_caption.data.base import DataError, Row, thumbnail
from rl_caption.data.files import read_captions
from rl_caption.evaluation.results import markdown

SIDE = 224
"""Side of the pictures, in pixels."""


def log_caption_table(
    accelerator: Accelerator,
    step: int,
    rows: Sequence[Row],
    captions: Mapping[str, str],
    first_captions: Mapping[str, str],
    scores: Mapping[str, Sequence[float]],
) -> None:
    """Log a table ``val/captions`` with a line for each of ``rows`` to W&B, trackio and
    TensorBoard.

    TensorBoard has no images in tables: it gets them as ``val/images``, in the same order. Other
    trackers get nothing.

    Args:
        accelerator: of the run; has its trackers. Called by the main process.
        step: optimizer steps that the captions were made after.
        rows: images and references.
        captions: image id -> caption.
        first_captions: image id -> caption of the first validation.
        scores: heading -> score of each row's caption.
    """
    columns = ["image", "id", "caption", "first caption", "references", *scores]
    pictures = [_picture(row) for row in rows]
    lines = [
        [
            row["image_id"],
            captions[row["image_id"]],
            first_captions.get(row["image_id"], ""),
            " / ".join(row["references"]),
            *(values[index] for values in scores.values()),
        ]
        for index, row in enumerate(rows)
    ]
    for tracker in accelerator.trackers:
        if tracker.name in ("wandb", "trackio"):
            library = import_module(tracker.name)
            images = ["" if picture is None else library.Image(picture) for picture in pictures]
            data = [[image, *line] for image, line in zip(images, lines, strict=True)]
            tracker.log({"val/captions": library.Table(columns=columns, data=data)}, step=step)
        elif tracker.name == "tensorboard":
            cells = [
                [
                    f"{cell:.4g}" if isinstance(cell, float) else _one_line(str(cell))
                    for cell in line
                ]
                for line in lines
            ]
            tracker.writer.add_text("val/captions", markdown(columns[1:], cells), global_step=step)
            if arrays := [
                np.asarray(ImageOps.pad(picture, (SIDE, SIDE))) for picture in pictures if picture
            ]:
                tracker.log_images({"val/images": np.stack(arrays)}, step=step, dataformats="NHWC")


def read_first_captions(folder: Path) -> Mapping[str, str]:
    """Image id -> caption at the first validation of the run in ``folder``; empty where there was
    none.
    """
    file = min((folder / "eval").glob("step-*/predictions.json"), default=None)
    return {} if file is None else read_captions(file)


def _picture(row: Row) -> Image.Image | None:
    """A small image, of a video its frames side by side; None for region features."""
    try:
        return thumbnail(row["image"], SIDE)
    except DataError:
        return None


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
