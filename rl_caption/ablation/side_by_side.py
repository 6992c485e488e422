"""Captions of the same images by every system of a grid, as a Markdown page with pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rewards.files import atomic_write
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.files import write_text

LONGEST_SIDE = 256


def captions_page(rows: Sequence[Row], systems: Mapping[str, Mapping[str, str]], folder: Path) -> Path:
    """Write ``captions.md``, and the pictures beside it as ``images/N.png``; an image that cannot be read has none.

    Args:
        rows: the images to show.
        systems: name -> image id -> caption; a system without the image is shown as "–".
        folder: where the page is written.
    """
    parts = ["# Captions of the same images", "One seed a cell. The first line of an image is one of its references."]
    for index, row in enumerate(rows):
        parts.append(f"## {_plain(row['image_id'])}")
        if _save_picture(row, folder / "images" / f"{index}.png"):
            parts.append(f"![image {index}](images/{index}.png)")
        lines = ["| system | caption |", "|---|---|"]
        if row["references"]:
            lines.append(f"| reference | {_plain(row['references'][0])} |")
        for name, captions in systems.items():
            caption = captions.get(row["image_id"])
            lines.append(f"| {name} | {'–' if caption is None else _plain(caption) or '(empty)'} |")
        parts.append("\n".join(lines))
    path = folder / "captions.md"
    write_text(path, "\n\n".join(parts) + "\n")
    return path


def _save_picture(row: Row, path: Path) -> bool:
    try:
        image = load_image(row["image"])
    except DataError:  # captioners over region features do without the pictures
        return False
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    with atomic_write(path) as file:
        image.save(file, "PNG")
    return True


def _plain(text: str) -> str:
    """Text as it stands, on one line of a Markdown table."""
    return re.sub(r"([\\|*_`<>\[\]#])", r"\\\1", " ".join(text.split()))
