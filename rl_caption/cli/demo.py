"""The demo: the whole job on the generated world, from nothing to tables, a picture and one page."""

import argparse
import base64
import io
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from rewards.files import atomic_write
from rl_caption.captioners.config import Decoding
from rl_caption.cli.main import run_program
from rl_caption.config.build import build_data
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import DataConfig, JudgeConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.base import load_image
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
from rl_caption.training.run_folder import is_complete, read_config

CONFIG = Path("configs/demo.yaml")
MIX = Path("configs/demo_mix.yaml")
SPLITS = {
    "test": "Test: combinations of colour and shape that were seen in training",
    "test_unseen": "Test, unseen: combinations of colour and shape that were never seen together in training",
}
PICTURE_IMAGES = 8
GALLERY_IMAGES = 100
LINE_WIDTH = 38
"""Characters in a line of the picture."""


def main(argv: list[str] | None = None) -> int:
    """Train by cross-entropy, fine-tune by SCST on CIDEr-D and on a mixture, judge all, print
    tables and paths.
    """
    parser = argparse.ArgumentParser(prog="rl-caption demo", description=__doc__)
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help=f"of the SCST run (default: {CONFIG})"
    )
    parser.add_argument(
        "--mix", type=Path, default=MIX, help=f"of the SCST run on a mixture (default: {MIX})"
    )
    chosen = parser.parse_args(argv)
    started = time.monotonic()
    run, mix = (read_config(find_config(config)) for config in (chosen.config, chosen.mix))
    student = Path(mix["reward_models"][0])
    teacher = Path(read_config(find_config(student))["warm_start"][0])
    weights = " + ".join(
        f"{term['weight']:g} {name}" for name, term in mix["reward"]["terms"].items()
    )
    stages: list[tuple[str, str, Path]] = [
        ("cross-entropy on the references, from random weights: the policy that SCST starts from",
         "xe", Path(run["warm_start"])),
        ("SCST on CIDEr-D: captions that score above others sampled for their image become likelier",
         "scst", chosen.config),
        ("a small CLIP, contrastive: images and captions that belong together; the teacher of stage 4",
         "reward_model", teacher),
        ("L-CLIP, distilled from it: a fast reward that looks at the image and needs no references",
         "reward_model", student),
        (f"SCST on {weights}, from the start of stage 2: is CIDEr kept while L-CLIPS rises?",
         "scst", chosen.mix),
    ]  # fmt: skip
    told: list[tuple[str, float]] = []
    runs: list[Path] = []
    for what, program, config in stages:
        print(f"\n[{len(told) + 1}/{len(stages) + 1}] {what} ({config})", flush=True)
        before = time.monotonic()
        runs.append(Path(read_config(find_config(config))["run"]["dir"]))
        if (
            program == "scst"
        ):  # it says so where a complete run that it starts from has another configuration
            run_program("scst", ["--config", str(config), "--report=false"])
        elif not is_complete(runs[-1]):
            run_program(program, ["--config", str(config)])
        if not is_complete(runs[-1]):  # ended by SIGTERM
            return 1
        told.append((what, time.monotonic() - before))
    what = "greedy captions of two test splits by all three captioners: scores, tables, a picture, one page"
    print(f"\n[{len(told) + 1}/{len(stages) + 1}] {what}", flush=True)
    captioners = {"cross-entropy": runs[0], "SCST on CIDEr-D": runs[1], "SCST on mixture": runs[4]}
    before, folder = time.monotonic(), runs[1].parent
    data = DataConfig(format=run["data"]["format"], kwargs=run["data"]["kwargs"])
    written = _judge_all(
        {name: folder_of / "export" / "best" for name, folder_of in captioners.items()},
        run,
        data,
        runs[3],
        folder,
    )
    told.append((what, time.monotonic() - before))
    write_text(
        folder / "report.html",
        render(
            _page(
                folder,
                list(captioners),
                runs,
                told,
                data,
            )
        ),
    )
    print(f"\ntook {(time.monotonic() - started) / 60:.1f} minutes; wrote")
    for path in (*(folder_of / "export" / "best" for folder_of in runs), *written):
        print(f"  {path}")
    print(
        f"\ncaption pictures of your own: rl-caption caption --model {runs[1]}/export/best PHOTO "
        f"..."
    )
    print(
        f"or in the browser:            rl-caption web --models {runs[0]}/export/best "
        f"{runs[1]}/export/best"
    )
    print(f"\nall of it in one page: {folder / 'report.html'}")
    return 0


def _folder(folder: Path, split: str, name: str) -> Path:
    return folder / "evaluation" / f"{split}-{name.lower().replace(' ', '-')}"


def _judge_all(
    models: Mapping[str, Path],
    run: Mapping[str, Any],
    data: DataConfig,
    student: Path,
    folder: Path,
) -> list[Path]:
    judges = {"L-CLIPS": JudgeConfig("l_clipscore", {"backbone": str(student / "export" / "best")})}
    decode = Decoding(max_new_tokens=run["rollout"]["max_new_tokens"])
    written: list[Path] = []
    for split, heading in SPLITS.items():
        table: dict[str, Evaluation] = {}
        captions: dict[str, dict[str, str]] = {}
        for name, model in models.items():
            out = _folder(folder, split, name)
            # Without METEOR and SPICE, whose Java programs would take longer than the rest of this
            # stage.
            config = EvaluateModelConfig(
                model=str(model), data=data, split=split, decode=decode, judges=judges, out=str(out)
            )
            config.metrics = ["bleu", "rouge", "cider"]
            judged = score_captions(config)
            assert judged is not None, "the demo is one process"
            table[name], captions[name], _ = judged
            written += write_evaluation(table[name], captions[name], out)
        print(f"\n{heading}\n{format_table(table)}")
        if split == "test":
            rows = [build_data(data).split(split)[index] for index in range(PICTURE_IMAGES)]
            sheet = {
                f"{name}:": [texts[row["image_id"]] for row in rows]
                for name, texts in captions.items()
            }
            written.append(folder / "before_and_after.png")
            with atomic_write(written[-1]) as file:
                caption_sheet([load_image(row["image"]) for row in rows], sheet).save(file, "PNG")
    return written


def _page(
    folder: Path,
    names: Sequence[str],
    runs: Sequence[Path],
    stages: Sequence[tuple[str, float]],
    data: DataConfig,
) -> Page:
    """The page of the demo: its stages, picture and tables, then the curves and settings of its
    runs.
    """
    judged = {
        split: evaluations_page(
            {name: read_evaluation(_folder(folder, split, name)) for name in names},
            source_of(build_data(data).split(split)),
            GALLERY_IMAGES,
        ).sections
        for split in SPLITS
    }
    read = {run.name: read_run(run) for run in runs}
    rows = [
        [f"{number}. {what}", f"{seconds:.0f}"] for number, (what, seconds) in enumerate(stages, 1)
    ]
    picture = base64.b64encode((folder / "before_and_after.png").read_bytes()).decode("ascii")
    alt = "Eight scenes, each with its caption by all three captioners; the same captions are below as text"
    image = Markup(
        '<p><img src="data:image/png;base64,{}" alt="{}" style="max-width: 100%"></p>'
    ).format(picture, alt)
    sections = {
        "Stages": macros().table("What was done, in this order", ["what and why", "seconds"], rows),
        "Picture": image,
        "Results": Markup("").join(
            macros().note(heading) + judged[split]["Results"] for split, heading in SPLITS.items()
        ),
        "Captions": judged["test"]["Captions"],
        "Monitor": monitor_section(read),
        "Curves": curves({name: [run] for name, run in read.items()}),
        "Settings": settings_section(read),
    }
    return Page(
        "Demo", "Self-critical sequence training on the generated world, from nothing", sections
    )


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
