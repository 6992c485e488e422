"""The demo: the whole job on the generated world, from nothing to tables, a picture and one page."""

import base64
import io
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup
from PIL import Image

from rewards.files import atomic_write
from rl_caption.captioners.config import Decoding
from rl_caption.cli import pipeline
from rl_caption.cli.configs import describe
from rl_caption.cli.stages import Stage
from rl_caption.config.build import build_data
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import DataConfig, JudgeConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.base import Row, load_image
from rl_caption.data.files import write_text
from rl_caption.evaluation import Evaluation, format_table, write_evaluation
from rl_caption.programs.evaluate import score_captions
from rl_caption.programs.report.charts import curves, macros
from rl_caption.programs.report.gallery import source_of
from rl_caption.programs.report.pages import (
    Page,
    evaluations_page,
    monitor_section,
    render,
    settings_section,
)
from rl_caption.programs.report.read import read_evaluation, read_run

CAPTIONERS = {"cross-entropy": "xe", "SCST on CIDEr-D": "scst", "SCST on mixture": "scst_mix"}
"""What the page calls a captioner -> its stage."""
SPLITS = {
    "test": "Test: combinations of colour and shape that were seen in training",
    "test_unseen": "Test, unseen: combinations of colour and shape that were never seen together in training",
}
PICTURE_IMAGES = 8
GALLERY_IMAGES = 100
LINE_WIDTH = 38
"""Characters in a line of the picture."""
Judged = Mapping[str, Mapping[str, Path]]
"""Split -> name of a captioner -> folder of its evaluation."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the pipeline ``demo``, judge all captioners, and write one page of everything.

    Options are those of ``rl-caption run demo``.
    """
    if "--help" in (words or ()):
        return pipeline.main(["demo", "--help"])
    started = time.monotonic()
    told = pipeline.run_pipeline("demo", words or [])
    stages = {stage.name: stage for stage, _ in told or ()}
    if not set(CAPTIONERS.values()) <= stages.keys():
        return 0 if told is not None else 1  # no run, or no run of all
    print("\ngreedy captions of two test splits by all three captioners: tables, a picture, a page")
    folder = stages["scst"].folder.parent
    data = {split: build_data(stages["scst"].config.data).split(split) for split in SPLITS}
    judged = {split: judge(stages, split, folder / "evaluation") for split in SPLITS}
    write_picture(judged["test"], data["test"][:PICTURE_IMAGES], folder / "before_and_after.png")
    runs = {name: read_run(stage.folder) for name, stage in stages.items()}
    rows = [
        [describe(find_config(stage.recipe)), f"{seconds:.0f}"] for stage, seconds in told or ()
    ]
    sections = {
        "Stages": macros().table("What was done, in this order", ["what", "seconds"], rows),
        **judged_sections(judged, data, folder / "before_and_after.png"),
        "Monitor": monitor_section(runs),
        "Curves": curves({name: [run] for name, run in runs.items()}),
        "Settings": settings_section(runs),
    }
    about = "Self-critical sequence training on the generated world, from nothing"
    write_text(folder / "report.html", render(Page("Demo", about, sections)))
    model = f"{stages['scst'].folder}/export/best"
    print(f"\ntook {(time.monotonic() - started) / 60:.1f} minutes")
    print(f"caption pictures of your own: rl-caption caption --model {model} PHOTO ...")
    print(f"all of it in one page: {folder / 'report.html'}")
    return 0


def judge(stages: Mapping[str, Stage], split: str, out: Path) -> dict[str, Path]:
    """Evaluate all captioners on a split and print the table; their folders by name."""
    run = stages["scst"].config
    student = str(stages["lclip"].folder / "export" / "best")
    table: dict[str, Evaluation] = {}
    folders = {}
    for name, stage in CAPTIONERS.items():
        folders[name] = out / f"{split}-{stage}"
        config = EvaluateModelConfig(
            model=str(stages[stage].folder / "export" / "best"),
            data=DataConfig(format=run.data.format, kwargs=run.data.kwargs),
            split=split,
            decode=Decoding(max_new_tokens=run.rollout.max_new_tokens),
            metrics=["bleu", "rouge", "cider"],  # without METEOR and SPICE: Java takes longer
            judges={"L-CLIPS": JudgeConfig(target="l_clipscore", kwargs={"backbone": student})},
            out=str(folders[name]),
        )
        judged = score_captions(config)
        assert judged is not None, "the demo is one process"
        table[name], captions, _ = judged
        write_evaluation(table[name], captions, folders[name])
    print(f"\n{SPLITS[split]}\n{format_table(table)}")
    return folders


def write_picture(folders: Mapping[str, Path], rows: Sequence[Row], file: Path) -> None:
    """Draw images with the caption of each captioner."""
    captions = {}
    for name, folder in folders.items():
        texts = read_evaluation(folder).captions
        captions[f"{name}:"] = [texts[row["image_id"]] for row in rows]
    with atomic_write(file) as picture:
        caption_sheet([load_image(row["image"]) for row in rows], captions).save(picture, "PNG")


def judged_sections(
    judged: Judged, data: Mapping[str, Sequence[Row]], picture: Path
) -> dict[str, Markup]:
    """The picture, and tables and captions of all captioners."""
    results, captions = Markup(""), Markup("")
    for split, folders in judged.items():
        evaluations = {name: read_evaluation(folder) for name, folder in folders.items()}
        page = evaluations_page(evaluations, source_of(data[split]), GALLERY_IMAGES)
        results += macros().note(SPLITS[split]) + page.sections["Results"]
        captions = captions or page.sections["Captions"]
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    alt = "Eight scenes, each with its caption by all three captioners; the same captions are below as text"
    image = Markup('<p><img src="data:image/png;base64,{}" alt="{}" style="max-width: 100%"></p>')
    return {"Picture": image.format(encoded, alt), "Results": results, "Captions": captions}


def caption_sheet(
    images: Sequence[Image.Image], captions: Mapping[str, Sequence[str]], columns: int = 2
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
        lines = [f"{name} {texts[index] or '(empty)'}" for name, texts in captions.items()]
        cells.append("\n".join(textwrap.fill(line, LINE_WIDTH) for line in lines))
    rows = math.ceil(len(images) / columns)
    most_lines = max(cell.count("\n") + 1 for cell in cells)
    size = (5.2 * columns, rows * max(1.6, 0.22 * most_lines))
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(rows, 2 * columns, squeeze=False, width_ratios=[1, 2] * columns)
    for axes in places.flat:
        axes.axis("off")
    for index, (image, cell) in enumerate(zip(images, cells, strict=True)):
        picture, text = places.flat[2 * index], places.flat[2 * index + 1]
        picture.imshow(image, interpolation="nearest")
        text.text(0, 1, cell, verticalalignment="top", parse_math=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return Image.open(content)
