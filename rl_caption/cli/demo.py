"""The demo: the whole job on the generated world, from nothing to tables, a picture and one page."""

import base64
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup
from PIL import Image

from rewards.files import atomic_write
from rl_caption.cli import pipeline
from rl_caption.config.build import build_data
from rl_caption.data.base import load_image
from rl_caption.data.files import write_text
from rl_caption.programs.report.pages import evaluations_page, render
from rl_caption.programs.report.read import read_evaluation

CAPTIONERS = {
    "cross-entropy": "xe",
    "SCST on CIDEr-D": "scst",
    "SCST on mixture": "scst_mix",
}
"""What the page calls a captioner -> its stage."""
PICTURE_IMAGES = 8
GALLERY_IMAGES = 100
LINE_WIDTH = 38
"""Characters in a line of the picture."""


def main(words: Sequence[str]) -> int:
    """Run the pipeline ``demo``, and write a picture and a page of all captioners.

    Options are those of ``rl-caption run demo``.
    """
    if "--help" in words:
        return pipeline.main(["demo", *words])
    stages = {stage.name: stage for stage in pipeline.run_pipeline("demo", words) or ()}
    if "unseen_scst_mix" not in stages:
        return 0  # no run of all
    judged = {
        split: {
            name: read_evaluation(stages[f"{split}_{stage}"].folder)
            for name, stage in CAPTIONERS.items()
        }
        for split in ("test", "unseen")
    }
    folder = stages["xe"].folder.parent
    page = evaluations_page(judged["test"], None, GALLERY_IMAGES)
    unseen = evaluations_page(judged["unseen"], None, GALLERY_IMAGES)
    rows = build_data(stages["xe"].config.data).split("test")[:PICTURE_IMAGES]
    captions = {
        f"{name}:": [evaluation.captions[row["image_id"]] for row in rows]
        for name, evaluation in judged["test"].items()
    }
    with atomic_write(folder / "before_and_after.png") as picture:
        caption_sheet([load_image(row["image"]) for row in rows], captions).save(
            picture, "PNG"
        )
    sections = {
        "Picture": _shown(folder / "before_and_after.png"),
        **page.sections,
        "Unseen": unseen.sections["Results"],
    }
    about = "Self-critical sequence training on the generated world; unseen are combinations of colour and shape that no training image has"
    write_text(
        folder / "report.html", render(page._replace(subtitle=about, sections=sections))
    )
    print(f"\nall of it in one page: {folder / 'report.html'}")
    print(
        f"caption pictures of your own: rl-caption caption --model {stages['scst'].folder}/export/best PHOTO ..."
    )
    return 0


def _shown(picture: Path) -> Markup:
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    alt = "Eight scenes with the captions of all three captioners; the same captions are below as text"
    image = Markup(
        '<p><img src="data:image/png;base64,{}" alt="{}" style="max-width: 100%"></p>'
    )
    return image.format(encoded, alt)


def caption_sheet(
    images: Sequence[Image.Image],
    captions: Mapping[str, Sequence[str]],
    columns: int = 2,
) -> Image.Image:
    """Draw images in a grid, and right of each its caption by every system.

    Args:
        images: N images.
        captions: system name -> N captions.
        columns: images in a row.
    """
    from matplotlib.figure import Figure

    cells = []
    for index in range(len(images)):
        lines = [
            f"{name} {texts[index] or '(empty)'}" for name, texts in captions.items()
        ]
        cells.append("\n".join(textwrap.fill(line, LINE_WIDTH) for line in lines))
    rows = math.ceil(len(images) / columns)
    most_lines = max(cell.count("\n") + 1 for cell in cells)
    size = (5.2 * columns, rows * max(1.6, 0.22 * most_lines))
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(
        rows, 2 * columns, squeeze=False, width_ratios=[1, 2] * columns
    )
    for axes in places.flat:
        axes.axis("off")
    for index, (image, cell) in enumerate(zip(images, cells, strict=True)):
        picture, text = places.flat[2 * index], places.flat[2 * index + 1]
        picture.imshow(image, interpolation="nearest")
        text.text(0, 1, cell, verticalalignment="top", parse_math=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return Image.open(content)
