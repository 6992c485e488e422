"""A picture of images with their captions side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

TILE, GAP, TEXT_WIDTH, LINE = 128, 16, 34, 17
INK, PALE, PAPER = (20, 20, 24), (110, 112, 120), (255, 255, 255)


def caption_sheet(
    images: Sequence[Image.Image], captions: Mapping[str, Sequence[str]], columns: int = 2
) -> Image.Image:
    """Draw images in a grid, each with one caption of every system beside it. A row is as high as its text asks for.

    Args:
        images: N images; each is scaled to 128 x 128 pixels.
        captions: system name -> N captions.
        columns: images in a row.
    """
    font = ImageFont.load_default(14)
    cells = [
        [(name, textwrap.wrap(texts[index], TEXT_WIDTH) or ["(empty)"]) for name, texts in captions.items()]
        for index in range(len(images))
    ]
    rows = range(0, len(images), columns)
    heights = [max(TILE, *map(_text_height, cells[first : first + columns])) + 2 * GAP for first in rows]
    cell_width = TILE + GAP + 250
    sheet = Image.new("RGB", (columns * (cell_width + GAP) + GAP, sum(heights) + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        left = GAP + (index % columns) * (cell_width + GAP)
        top = GAP + sum(heights[: index // columns])
        sheet.paste(image.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        line = top
        for name, parts in cells[index]:
            draw.text((left + TILE + GAP, line), name, PALE, font)
            line += LINE
            for part in parts:
                draw.text((left + TILE + GAP, line), part, INK, font)
                line += LINE
            line += LINE // 3
    return sheet


def _text_height(cell: Sequence[tuple[str, Sequence[str]]]) -> int:
    return sum(LINE * (1 + len(parts)) + LINE // 3 for _, parts in cell)
