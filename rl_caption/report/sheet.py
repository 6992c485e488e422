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
    """Draw images in a grid, each with one caption of every system beside it.

    Args:
        images: N images; each is scaled to 128 x 128 pixels.
        captions: system name -> N captions.
        columns: images in a row.
    """
    font = ImageFont.load_default(14)
    cell_width, rows = TILE + GAP + 250, -(-len(images) // columns)
    cell_height = TILE + GAP
    sheet = Image.new("RGB", (columns * (cell_width + GAP) + GAP, rows * (cell_height + GAP) + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        left = GAP + (index % columns) * (cell_width + GAP)
        top = GAP + (index // columns) * (cell_height + GAP)
        sheet.paste(image.convert("RGB").resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        line = top
        for name, texts in captions.items():
            draw.text((left + TILE + GAP, line), name, PALE, font)
            line += LINE
            for part in textwrap.wrap(texts[index], TEXT_WIDTH) or ["(empty)"]:
                draw.text((left + TILE + GAP, line), part, INK, font)
                line += LINE
            line += LINE // 3
    return sheet
