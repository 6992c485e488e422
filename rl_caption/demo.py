"""The demo: the whole job on the generated world, from nothing to a table and a picture."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rl_caption.build import build_data
from rl_caption.config import DataConfig, DecodeConfig, EvaluateConfig
from rl_caption.data.base import Row, load_image
from rl_caption.evaluate import judge
from rl_caption.evaluation import Evaluation, format_table, write_evaluation
from rl_caption.report.sheet import caption_sheet
from rl_caption.run_folder import read_config

CONFIG = Path("configs/demo.yaml")
PICTURE_IMAGES = 8


def main(argv: list[str] | None = None) -> int:
    """Train by cross-entropy, fine-tune by SCST, judge both on the test splits, print a table and the paths."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"of the SCST run (default: {CONFIG})")
    config = parser.parse_args(argv).config
    started = time.monotonic()
    if not config.is_file():
        raise FileNotFoundError(f"{config} is not there: run the demo from the project's folder")
    script = Path(__file__).parent.parent / "scripts" / "scst.py"
    command = [sys.executable, "-m", "accelerate.commands.launch", str(script), "--config", str(config)]
    print(f"accelerate launch scripts/scst.py --config {config}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        return code
    run = read_config(config)
    start, tuned = Path(run["model"]["init"]), Path(run["run"]["dir"]) / "export" / "best"
    folder = tuned.parent.parent.parent
    written = _judge_both({"cross-entropy": start, "SCST": tuned}, run, folder)
    print(f"\ntook {(time.monotonic() - started) / 60:.1f} minutes; wrote")
    for path in (start, tuned, *written):
        print(f"  {path}")
    print(f"\ncaption pictures of your own: python -m rl_caption caption --model {tuned} PHOTO ...")
    return 0


def _judge_both(models: dict[str, Path], run: dict, folder: Path) -> list[Path]:
    data = DataConfig(format=run["data"]["format"], kwargs=run["data"]["kwargs"])
    written: list[Path] = []
    for split in ("test", "test_unseen"):
        table: dict[str, Evaluation] = {}
        captions: dict[str, dict[str, str]] = {}
        for name, model in models.items():
            out = folder / "evaluation" / f"{split}-{name.lower()}"
            decode = DecodeConfig(max_new_tokens=run["rollout"]["max_new_tokens"])
            judged = judge(EvaluateConfig(model=str(model), data=data, split=split, decode=decode, out=str(out)))
            assert judged is not None, "the demo is one process"
            table[name], captions[name] = judged
            written += write_evaluation(*judged, out)
        unseen = " (colour-shape pairs never seen together in training)" if split == "test_unseen" else ""
        print(f"\n{split}{unseen}\n{format_table(table)}")
        if split == "test":
            rows = [build_data(data).split(split)[index] for index in range(PICTURE_IMAGES)]
            written.append(_draw(rows, captions, folder))
    return written


def _draw(rows: list[Row], captions: dict[str, dict[str, str]], folder: Path) -> Path:
    shown = {f"{name}:": [texts[row["image_id"]] for row in rows] for name, texts in captions.items()}
    path = folder / "before_and_after.png"
    caption_sheet([load_image(row["image"]) for row in rows], shown).save(path)
    return path
