"""A grid whose runs are launched as several processes, from a captioner of Transformers with a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import BlipForConditionalGeneration

from tests.captioners_for_tests import REFERENCES
from tests.hf_models_for_tests import PROMPT, save_model
from tests.training_for_tests import lines, run_arguments, scst_config

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

REPOSITORY = Path(__file__).resolve().parents[3]


def captions(file: Path) -> dict[str, str]:
    return {record["image_id"]: record["caption"] for record in json.loads(file.read_text())}


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """A self-critical run from a sharded folder of Transformers."""
    start = save_model("blip", tmp_path / "start")
    whole = BlipForConditionalGeneration.from_pretrained(start)
    (start / "model.safetensors").unlink()
    whole.save_pretrained(start, max_shard_size="50KB")
    assert len(list(start.glob("*.safetensors"))) > 1
    records = []
    for number in range(8):
        Image.new("RGB", (20, 24), (number * 30, 90, 255 - number * 30)).save(
            tmp_path / f"{number}.png"
        )
        split = "train" if number < 4 else "val"
        records.append(
            {"image": f"{number}.png", "references": REFERENCES[number % 4], "split": split}
        )
    (tmp_path / "photos.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    data = {"format": "jsonl", "path": str(tmp_path / "photos.jsonl")}
    options = {"data": data, "model.name": "huggingface", "model.prompt": PROMPT}
    options |= {"train.batch_size": 4, "train.max_steps": 1}
    return scst_config(tmp_path / "unused", start, **options)


def test_cells_train_in_two_processes_beside_each_other(
    base: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "scst.yaml").write_text(yaml.safe_dump(base))
    grid = {
        "base": str(tmp_path / "scst.yaml"),
        "cells": {name: {"terms": {name: {"weight": 1.0}}} for name in ("cider", "rouge_l")},
        "metrics": ["cider"],
        "tokenizer": "python",
        "split": "val",
        "report": False,
        "jobs": 2,
        "out": str(tmp_path / "grid"),
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    launch = str(REPOSITORY / "configs/accelerate/cpu2.yaml")
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    arguments = ["ablate", "--config", str(tmp_path / "grid.yaml"), "--launch", launch]
    ended = run_arguments(arguments, tmp_path / "grid.log", environment=environment)
    cells = {name: tmp_path / f"grid/cells/{name}/seed0" for name in grid["cells"]}
    logs = "".join((cell / "log.txt").read_text() for cell in cells.values() if cell.exists())
    assert ended.code == 0, ended.output + logs
    assert logs.count("2 process(es) on cpu") == 2
    start = captions(tmp_path / "grid/start/val/predictions.json")
    for cell in cells.values():
        assert [line["step"] for line in lines(cell / "run") if "loss/total" in line] == [1]
        assert captions(cell / "run/eval/step-00000000/predictions.json") == start, (
            "one prompt for start and cells"
        )
