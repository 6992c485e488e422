#!/usr/bin/env python
"""L-CLIP's ablation: a teacher, and students with and without the Similarity Regulator and the factorised embedding.

    python -m benchmarks.studies.student_rows --configs configs/reward_models/scenes --captioner runs/scenes/xe/export/best \
        --out runs/results/scenes_students

``--configs`` is how the names of four configurations begin (``scenes``_teacher, _image, _text and _lclip.yaml).
Finished runs are kept, an interrupted one goes on. Further arguments, such as ``--train.threads=1``, are overrides for
every training. Everything is done by the commands that a user would type; at the end benchmarks.studies.reward_models judges
them all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

ROWS: dict[str, tuple[str, list[str]]] = {
    "with SR, factorised": ("factorised", []),
    "without SR, factorised": ("factorised", ["--loss.regulator=0"]),
    "with SR, plain table": ("plain", []),
    "without SR, plain table": ("plain", ["--loss.regulator=0"]),
}
"""Label -> its text tower of stage 1, and what differs from the configuration in stage 2."""


def program(*arguments: str) -> None:
    """Run ``python arguments``; its failure ends this program."""
    print("+ python", " ".join(arguments), flush=True)
    subprocess.run([sys.executable, *arguments], check=True)


def train(config: str, folder: Path, *changes: str) -> str:
    """Train a reward model unless it is there; return the folder of the best one."""
    if not (folder / "result.json").is_file():
        program("-m", "rl_caption", "reward_model", "--config", config, f"--run.dir={folder}", *changes)
    return str(folder / "export" / "best")


def train_rows(configs: str, out: Path, changes: list[str]) -> dict[str, str]:
    """Train the teacher, the towers of stage 1 and the four students of stage 2: label -> folder."""
    alone = ["--warm_start=[]", *changes]
    teacher = train(f"{configs}_teacher.yaml", out / "teacher", *changes)
    taught = [f"--teacher.name={teacher}", *alone]
    image = train(f"{configs}_image.yaml", out / "image", *taught)
    text = {
        "factorised": train(f"{configs}_text.yaml", out / "text", *taught),
        "plain": train(f"{configs}_text.yaml", out / "text_plain", *taught, "--model.kwargs.embedding_rank=null"),
    }
    models = {"teacher": teacher}
    for label, (tower, differing) in ROWS.items():
        towers = [f"--model.image_init={image}", f"--model.text_init={text[tower]}"]
        folder = out / label.replace(", ", "_").replace(" ", "_")
        models[label] = train(f"{configs}_lclip.yaml", folder, *taught, *towers, *differing)
    return models


def main() -> None:
    """Train and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", required=True, help="start of the names of four configurations")
    parser.add_argument("--captioner", help="folder of a captioner whose samples are judged too (generated world)")
    parser.add_argument("--split", default="test", help="of the data, for judging")
    parser.add_argument("--out", required=True, type=Path, help="folder of all runs and tables")
    arguments, changes = parser.parse_known_args()
    models = train_rows(arguments.configs, arguments.out, changes)
    # The configuration as it was run, overrides of the data included.
    data = arguments.out / "data.yaml"
    data.write_text(
        yaml.safe_dump({"data": yaml.safe_load((arguments.out / "teacher" / "config.yaml").read_text())["data"]})
    )
    judged = ["--data", str(data), "--split", arguments.split, "--out", str(arguments.out / "tables")]
    judged += ["--models", *(f"{label}={folder}" for label, folder in models.items())]
    judged += ["--captioner", arguments.captioner] if arguments.captioner else []
    program("-m", "benchmarks.studies.reward_models", *judged)


if __name__ == "__main__":
    main()
