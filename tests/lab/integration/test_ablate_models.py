"""ablate_models: a grid of two tiny dual encoders, trained, measured, gone on with, and what it
refuses.
"""

import csv
from pathlib import Path

import pytest
import yaml

from rl_caption.cli.main import main
from tests.clip_for_tests import noise_image
from tests.judgement_sets_for_tests import BUILDERS

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8},
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 49408,
        "width": 16,
        "heads": 2,
        "layers": 1,
    },
}


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    recipe = {
        "task": "contrastive",
        "model": {"kwargs": MODEL},
        "data": {
            "format": "scenes",
            "kwargs": {"num_train": 16, "num_val": 8, "num_test": 8, "num_unseen": 0},
        },
        "train": {"max_steps": 2, "batch_size": 8, "lr": 1e-3},
        "eval": {"every": 2, "batch_size": 8},
        "run": {"dir": str(tmp_path / "unused")},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    BUILDERS["flickr8k_expert"](tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(3):
        noise_image(number).save(
            tmp_path / "images" / ["1_a.jpg", "2_b.jpg", "3_c.jpg"][number]
        )
    config = {
        "recipe": str(tmp_path / "recipe.yaml"),
        "cells": {"recipe": {}, "fast": {"overrides": {"train.lr": 0.01}}},
        "seeds": [0],
        "sets": {
            "people": {"set": "flickr8k_expert", "data": str(tmp_path), "partial": True}
        },
        "out": str(tmp_path / "grid"),
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return tmp_path


@pytest.mark.slow
def test_a_grid_of_reward_models(
    grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ablate_models", "--config", str(grid / "grid.yaml")]
    assert main(command) == 0
    with (grid / "grid" / "runs.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [line["system"] for line in table] == ["recipe", "fast"]
    for line in table:
        assert list(line)[2:] == [
            "R@1, image to text",
            "R@1, text to image",
            "people: tau_c",
        ]
        assert 0 <= float(line["R@1, image to text"]) <= 1
    assert not (grid / "unused").exists()
    log = grid / "grid" / "cells" / "fast" / "seed0" / "log.txt"
    before = log.read_bytes()
    assert main(command) == 0, "nothing is trained again"
    assert log.read_bytes() == before
    assert "| system | seeds |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--cells.fast.overrides", "{train.lr: 0.02}"])
    assert "train.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("cells", "{bad label: {}}", "bad label"),
        ("cells", "{a: {overrides: {train.lrr: 1}}}", "lrr"),
        ("sets.people.data", "nowhere", "nowhere"),
        ("recipe", "none.yaml", "none.yaml"),
    ],
)
def test_what_is_wrong_is_said_before_any_training(
    grid: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            ["ablate_models", "--config", str(grid / "grid.yaml"), f"--{option}", value]
        )
    assert named in capsys.readouterr().err + str(ended.value)
    assert not (grid / "grid" / "cells").exists()
