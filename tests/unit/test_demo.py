"""The demo's picture of captions: nothing is cut off or drawn over the next row."""

from __future__ import annotations

from PIL import Image

from rl_caption.cli.demo import GAP, LINE, TILE, caption_sheet


def test_a_row_is_as_high_as_its_longest_text() -> None:
    images = [Image.new("RGB", (8, 8), (200, 0, 0)) for _ in range(4)]
    assert caption_sheet(images, {"a:": ["one"] * 4}).height == 2 * (TILE + 2 * GAP) + GAP
    captions = {name: ["a large striped red square to the left of a small blue ring", *["one"] * 3] for name in "abcd"}
    tall = caption_sheet(images, captions)
    # The first row has four systems of one name and two lines each; the second is as high as an image.
    assert tall.height == 4 * (3 * LINE + LINE // 3) + 2 * GAP + max(TILE, 4 * (2 * LINE + LINE // 3)) + 2 * GAP + GAP
    assert tall.crop((0, tall.height - GAP, tall.width, tall.height)).getcolors() == [(tall.width * GAP, (255,) * 3)]
