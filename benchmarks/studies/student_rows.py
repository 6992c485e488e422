"""L-CLIP's ablation: a teacher, and students with and without the Similarity Regulator and the factorised embedding.

    python -m benchmarks.studies.student_rows --configs configs/reward_models/scenes \\
        --captioner runs/scenes/xe/export/best --out runs/results/scenes_students

``--configs`` is the common beginning of four configurations' names (``scenes``_teacher, _image, _text, _lclip.yaml).
Finished runs are kept, an interrupted one is resumed. Further arguments, such as ``--train.threads=1``, are overrides
for every training. At the end ``retrieval`` and, on the generated world, ``judge`` compare all models, in
OUT/retrieval and OUT/agreement.
"""

import argparse
from pathlib import Path
from typing import Any

import yaml

from benchmarks.studies.main_job import run_module


def train(config: str, folder: Path, *changes: str) -> str:
    """Train a reward model unless it is there; return the folder of the best one."""
    if not (folder / "result.json").is_file():
        run_module(
            "rl_caption", "reward_model", "--config", config, f"--run.dir={folder}", *changes
        )
    return str(folder / "export" / "best")


def train_rows(configs: str, out: Path, changes: list[str]) -> dict[str, str]:
    """Train the teacher, the towers (stage 1) and the four students (stage 2): label -> folder."""
    teacher = train(f"{configs}_teacher.yaml", out / "teacher", *changes)
    taught = [f"--teacher.name={teacher}", "--warm_start=[]", *changes]
    image = train(f"{configs}_image.yaml", out / "image", *taught)
    text = train(f"{configs}_text.yaml", out / "text", *taught)
    plain = train(
        f"{configs}_text.yaml", out / "text_plain", *taught, "--model.kwargs.embedding_rank=null"
    )
    models = {"teacher": teacher}
    for embedding, tower in {"factorised": text, "plain table": plain}.items():
        for regulator, changed in {"with SR": [], "without SR": ["--loss.regulator=0"]}.items():
            label = f"{regulator}, {embedding}"
            folder = out / label.replace(", ", "_").replace(" ", "_")
            towers = [f"--model.image_init={image}", f"--model.text_init={tower}"]
            models[label] = train(f"{configs}_lclip.yaml", folder, *taught, *towers, *changed)
    return models


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs", required=True, help="start of the names of four configurations"
    )
    parser.add_argument(
        "--captioner", help="folder of a captioner whose samples are scored too (generated world)"
    )
    parser.add_argument("--split", default="test", help="of the data, for evaluation")
    parser.add_argument("--out", required=True, type=Path, help="folder of all runs and tables")
    arguments, changes = parser.parse_known_args()
    models = train_rows(arguments.configs, arguments.out, changes)
    config = yaml.safe_load(
        (arguments.out / "teacher" / "config.yaml").read_text()
    )  # with all overrides
    encoders = {label: {"backbone": folder} for label, folder in models.items()}
    found = {"data": config["data"], "split": arguments.split, "models": encoders}
    run_on("retrieval", arguments.out / "retrieval", found)
    if config["data"]["format"] == "scenes":
        scenes = {
            "data": config["data"],
            "split": arguments.split,
            "captioner": arguments.captioner,
        }
        judges = {
            f"{name} of {label}": {"target": name, "kwargs": own | {"prefix": ""}}
            for label, own in encoders.items()
            for name in ("clipscore", "ref_clipscore")
        }
        judged = {"set": "scenes", "scenes": scenes, "metrics": "bleu4,rouge", "judges": judges}
        run_on("judge", arguments.out / "agreement", judged)


def run_on(program: str, out: Path, config: dict[str, Any]) -> None:
    """Run a program with a configuration, which is written beside the folder of its tables."""
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config | {"out": str(out)}))
    run_module("rl_caption", program, "--config", str(file))


if __name__ == "__main__":
    main()
