"""The demo: the whole job on the generated world, from nothing to tables and a picture."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from rewards.files import atomic_write
from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig, DecodeConfig, EvaluateConfig, JudgeConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.base import load_image
from rl_caption.evaluation import Evaluation, format_table, write_evaluation
from rl_caption.programs.evaluate import score_captions
from rl_caption.training.run_folder import read_config

CONFIG = Path("configs/demo.yaml")
MIX = Path("configs/demo_mix.yaml")
PICTURE_IMAGES = 8
TILE, GAP, LINE = 128, 16, 17
"""Pixels of the picture: an image, the space around it, a line of text."""


def main(argv: list[str] | None = None) -> int:
    """Train by cross-entropy, fine-tune by SCST on CIDEr-D and on a mixture, judge all, print tables and paths."""
    parser = argparse.ArgumentParser(prog="rl-caption demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"of the SCST run (default: {CONFIG})")
    parser.add_argument("--mix", type=Path, default=MIX, help=f"of the SCST run on a mixture (default: {MIX})")
    chosen = parser.parse_args(argv)
    started = time.monotonic()
    run, mix = (read_config(find_config(config)) for config in (chosen.config, chosen.mix))
    for config in (chosen.config, chosen.mix):
        # The small teacher has batch norm, which one process trains; with several GPUs accelerate would take them all.
        words = ["--num_processes", "1", "-m", "rl_caption", "scst", "--config", str(config)]
        print(f"accelerate launch {shlex.join(words)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "accelerate.commands.launch", *words], check=False).returncode
        if code != 0:
            return code
    tuned = Path(run["run"]["dir"]) / "export" / "best"
    models = {
        "cross-entropy": Path(run["model"]["init"]),
        "SCST on CIDEr-D": tuned,
        "SCST on mixture": Path(mix["run"]["dir"]) / "export" / "best",
    }
    student = mix["reward"]["terms"]["l_clipscore"]["kwargs"]["backbone"]
    written = _judge_all(models, run, student, Path(run["run"]["dir"]).parent)
    print(f"\ntook {(time.monotonic() - started) / 60:.1f} minutes; wrote")
    for path in (*models.values(), Path(student), *written):
        print(f"  {path}")
    print(f"\ncaption pictures of your own: rl-caption caption --model {tuned} PHOTO ...")
    return 0


def _judge_all(models: dict[str, Path], run: dict, student: str, folder: Path) -> list[Path]:
    judges = {"L-CLIPS": JudgeConfig("l_clipscore", {"backbone": student})}
    data = DataConfig(format=run["data"]["format"], kwargs=run["data"]["kwargs"])
    decode = DecodeConfig(max_new_tokens=run["rollout"]["max_new_tokens"])
    written: list[Path] = []
    for split in ("test", "test_unseen"):
        table: dict[str, Evaluation] = {}
        captions: dict[str, dict[str, str]] = {}
        for name, model in models.items():
            out = folder / "evaluation" / f"{split}-{name.lower().replace(' ', '-')}"
            judged = score_captions(
                EvaluateConfig(model=str(model), data=data, split=split, decode=decode, judges=judges, out=str(out))
            )
            assert judged is not None, "the demo is one process"
            table[name], captions[name] = judged
            written += write_evaluation(*judged, out)
        unseen = " (colour-shape pairs never seen together in training)" if split == "test_unseen" else ""
        print(f"\n{split}{unseen}\n{format_table(table)}")
        if split == "test":
            rows = [build_data(data).split(split)[index] for index in range(PICTURE_IMAGES)]
            shown = {f"{name}:": [texts[row["image_id"]] for row in rows] for name, texts in captions.items()}
            written.append(folder / "before_and_after.png")
            with atomic_write(written[-1]) as file:
                caption_sheet([load_image(row["image"]) for row in rows], shown).save(file, "PNG")
    return written


def caption_sheet(
    images: Sequence[Image.Image], captions: Mapping[str, Sequence[str]], columns: int = 2
) -> Image.Image:
    """Draw images in a grid, and right of each its caption by every system. A row is as high as its text asks for.

    Args:
        images: N images; each is scaled to 128 x 128 pixels.
        captions: system name -> N captions.
        columns: images in a row.
    """
    font, extra = ImageFont.load_default(14), LINE // 3
    cells = [
        [(name, textwrap.wrap(texts[index], 34) or ["(empty)"]) for name, texts in captions.items()]
        for index in range(len(images))
    ]
    needed = [max(TILE, sum(LINE * (1 + len(lines)) + extra for _, lines in cell)) + 2 * GAP for cell in cells]
    heights = [max(needed[first : first + columns]) for first in range(0, len(images), columns)]
    width = TILE + 2 * GAP + 250
    sheet = Image.new("RGB", (columns * width + GAP, sum(heights) + GAP), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        left, top = GAP + (index % columns) * width, GAP + sum(heights[: index // columns])
        sheet.paste(image.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        for name, lines in cells[index]:
            draw.text((left + TILE + GAP, top), name, (110, 112, 120), font)
            for row, line in enumerate(lines, 1):
                draw.text((left + TILE + GAP, top + row * LINE), line, (20, 20, 24), font)
            top += LINE * (1 + len(lines)) + extra
    return sheet
