"""The demo: all of its stages in small."""

import re
from pathlib import Path

import pytest
import yaml

from rewards.files import load_json
from rl_caption.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[3]


TINY = {
    "data": {"kwargs": {"num_train": 24, "num_val": 4, "num_test": 8, "num_unseen": 4}},
    "train": {
        "max_steps": 2,
        "batch_size": 8,
        "warmup_steps": 1,
        "threads": 1,
        "mixed_precision": "no",
    },
    "eval": {"every": 2, "batch_size": 4},
}
"""What is changed in the shipped configurations, so that every stage takes seconds."""


@pytest.mark.slow
def test_all_stages_end_in_one_page_and_a_second_call_trains_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for path in (REPOSITORY / "configs").rglob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        for part in config["stages"].values() if path.stem == "demo" else [config]:
            for section, changes in TINY.items():
                if section in part:
                    part[section] |= changes
        copy = tmp_path / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(yaml.safe_dump(config, sort_keys=False))
    monkeypatch.setattr("rl_caption.config.shipped.FOLDER", tmp_path / "configs")
    assert main(["run", "demo"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^\[(\d+)/13\] ", printed, re.MULTILINE) == [
        str(n) for n in range(1, 14)
    ]
    folders = [
        *tmp_path.glob("runs/demo/test_*"),
        *tmp_path.glob("runs/demo/unseen_[xs]*"),
    ]
    assert len(folders) == 6
    for folder in folders:
        split = "unseen_page" if "unseen" in folder.name else "page"
        page = (tmp_path / "runs/demo" / split / "report.html").read_text()
        cider = load_json(folder / "scores.json")["metrics"]["CIDEr"]
        assert f" {100 * cider:.2f}" in page
        assert page.count("<article") == (4 if "unseen" in folder.name else 8)
    steps = {
        path: path.read_text() for path in tmp_path.glob("runs/demo/*/metrics.jsonl")
    }
    assert len(steps) == 5
    assert main(["run", "demo"]) == 0
    assert {path: path.read_text() for path in steps} == steps
