"""lmms-eval: a task with the metrics of ``coco2017_cap_val``, by its own scorers and by ours."""

# /// script
# dependencies = ["lmms-eval==0.7.3", "filelock<3.25", "torch>=2.11,<2.14", "torchvision"]
# ///

import json
import subprocess
import sys

from datasets import Dataset, Image

from tests.engines.report import FOLDER, cases, compared

METRICS = {
    "Bleu_4": "bleu4",
    "Bleu_3": "bleu3",
    "Bleu_2": "bleu2",
    "Bleu_1": "bleu1",
    "METEOR": "meteor",
    "ROUGE_L": "rougel",
    "CIDEr": "cider",
}
TASK = """
dataset_path: parquet
dataset_kwargs: {{data_files: {{val: {rows}}}}}
task: photos_cap
test_split: val
output_type: generate_until
doc_to_visual: !function photos.coco_doc_to_visual
doc_to_text: !function photos.coco_doc_to_text
doc_to_target: answer
generation_kwargs: {{max_new_tokens: 16}}
process_results: !function photos.coco_process_result
metric_list:
"""
METRIC = "  - {{metric: coco_{name}, aggregation: !function photos.coco_{function}, higher_is_better: true}}"


def results_of(module: str) -> dict[str, float]:
    """Metrics of a constant answer, by a program with lmms-eval's options."""
    output = FOLDER / f"output_{module.partition('.')[0]}"
    options = {
        "model": "dummy",
        "model_args": "response=a dog runs on the grass",
        "include_path": FOLDER / "tasks",
        "tasks": "photos_cap",
        "batch_size": 1,
        "output_path": output,
    }
    words = [
        word for name, value in options.items() for word in (f"--{name}", str(value))
    ]
    subprocess.run([sys.executable, "-m", module, *words], check=True)
    newest = max(output.rglob("*results.json"), key=lambda path: path.stat().st_mtime)
    metrics = json.loads(newest.read_text())["results"]["photos_cap"]
    return {name: metrics[f"coco_{name},none"] for name in METRICS}


def main() -> None:
    """Evaluate with lmms-eval's scorers and with ours, and report the difference."""
    tasks = FOLDER / "tasks"
    tasks.mkdir(exist_ok=True)
    rows = [
        {
            "image": row["image"],
            "answer": row["references"],
            "question_id": f"{number}.jpg",
            "id": number,
        }
        for number, row in enumerate(cases())
    ]
    Dataset.from_list(rows).cast_column("image", Image()).to_parquet(
        FOLDER / "rows.parquet"
    )
    text = TASK.format(rows=FOLDER / "rows.parquet")
    lines = [
        METRIC.format(name=name, function=function)
        for name, function in METRICS.items()
    ]
    (tasks / "photos_cap.yaml").write_text(text + "\n".join(lines))
    (tasks / "photos.py").write_text("from lmms_eval.tasks.coco_cap.utils import *\n")
    theirs = results_of("lmms_eval")
    ours = results_of("rl_caption.integrations.lmms_eval")
    difference = max(abs(theirs[name] - ours[name]) for name in METRICS)
    compared("`lmms-eval`, the COCO captioning metrics", len(METRICS), difference, 0.0)


if __name__ == "__main__":
    main()
