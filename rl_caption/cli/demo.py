"""The demo: the whole job on the generated world, from nothing to tables and a picture."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rewards.files import atomic_write
from rl_caption.cli.evaluate import judge
from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig, DecodeConfig, EvaluateConfig, JudgeConfig
from rl_caption.data.base import Row, load_image
from rl_caption.evaluation import Evaluation, format_table, write_evaluation
from rl_caption.report.sheet import caption_sheet
from rl_caption.training.run_folder import read_config

CONFIG = Path("configs/demo.yaml")
MIX = Path("configs/demo_mix.yaml")
PICTURE_IMAGES = 8


def main(argv: list[str] | None = None) -> int:
    """Train by cross-entropy, fine-tune by SCST on CIDEr-D and on a mixture, judge all, print tables and paths."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help=f"of the SCST run (default: {CONFIG})")
    parser.add_argument("--mix", type=Path, default=MIX, help=f"of the SCST run on a mixture (default: {MIX})")
    chosen = parser.parse_args(argv)
    started = time.monotonic()
    script = Path(__file__).parents[2] / "scripts" / "scst.py"
    for config in (chosen.config, chosen.mix):
        if not config.is_file():
            raise FileNotFoundError(f"{config} is not there: run the demo from the project's folder")
    for config in (chosen.config, chosen.mix):
        # The small teacher has batch norm, which one process trains; with several GPUs accelerate would take them all.
        launch = ["launch", "--num_processes", "1"]
        print(f"accelerate {' '.join(launch)} scripts/scst.py --config {config}", flush=True)
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *launch[1:],
            str(script),
            "--config",
            str(config),
        ]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            return code
    run, mix = read_config(chosen.config), read_config(chosen.mix)
    models = {
        "cross-entropy": Path(run["model"]["init"]),
        "SCST on CIDEr-D": Path(run["run"]["dir"]) / "export" / "best",
        "SCST on mixture": Path(mix["run"]["dir"]) / "export" / "best",
    }
    student = mix["reward"]["terms"]["l_clipscore"]["kwargs"]["backbone"]
    folder = Path(run["run"]["dir"]).parent
    written = _judge_all(models, run, student, folder)
    print(f"\ntook {(time.monotonic() - started) / 60:.1f} minutes; wrote")
    for path in (*models.values(), Path(student), *written):
        print(f"  {path}")
    tuned = models["SCST on CIDEr-D"]
    print(f"\ncaption pictures of your own: python -m rl_caption caption --model {tuned} PHOTO ...")
    return 0


def _judge_all(models: dict[str, Path], run: dict, student: str, folder: Path) -> list[Path]:
    judges = {"L-CLIPS": JudgeConfig("l_clipscore", {"backbone": student})}
    data = DataConfig(format=run["data"]["format"], kwargs=run["data"]["kwargs"])
    written: list[Path] = []
    for split in ("test", "test_unseen"):
        table: dict[str, Evaluation] = {}
        captions: dict[str, dict[str, str]] = {}
        for name, model in models.items():
            out = folder / "evaluation" / f"{split}-{name.lower().replace(' ', '-')}"
            decode = DecodeConfig(max_new_tokens=run["rollout"]["max_new_tokens"])
            judged = judge(
                EvaluateConfig(model=str(model), data=data, split=split, decode=decode, judges=judges, out=str(out))
            )
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
    with atomic_write(path) as file:
        caption_sheet([load_image(row["image"]) for row in rows], shown).save(file, "PNG")
    return path
