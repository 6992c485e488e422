"""The core without the lab: its programs run where ``rl_caption.lab`` cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.reward_models_for_tests import chain
from tests.training_for_tests import changed, run_arguments, scst_config, xe_config

WITHOUT_LAB = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("rl_caption.lab"):
            raise ModuleNotFoundError(f"{name} is blocked here", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_core(arguments: list[str], log: Path) -> None:
    """Run a program to its good end, in a fork without the lab."""
    ended = run_arguments(arguments, log, without_lab=True)
    assert ended.code == 0, ended.output


def test_the_programs_of_the_core_train_evaluate_and_compare(tmp_path):
    xe = changed(
        xe_config(tmp_path / "xe", **{"train.max_steps": 2}),
        {"data.kwargs.num_test": 4},
    )
    best = str(tmp_path / "xe/export/best")
    scst = changed(
        scst_config(tmp_path / "scst", Path(best), **{"train.max_steps": 2}),
        {"data.kwargs.num_test": 4},
    )
    grid = {
        "recipe": str(tmp_path / "scst.yaml"),
        "cells": {"cider": {"terms": {"cider": {"weight": 1.0}}}},
        "metrics": ["cider"],
        "tokenizer": "python",
        "out": str(tmp_path / "grid"),
    }
    for name, config in {"xe": xe, "scst": scst, "grid": grid}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    run_core(["xe", "--config", str(tmp_path / "xe.yaml")], tmp_path / "xe.log")
    run_core(["scst", "--config", str(tmp_path / "scst.yaml")], tmp_path / "scst.log")
    run_core(
        ["ablate", "--config", str(tmp_path / "grid.yaml"), "--jobs", "1"],
        tmp_path / "grid.log",
    )
    world = [
        f"--data.kwargs.{key}={value}" for key, value in xe["data"]["kwargs"].items()
    ]
    evaluation = str(tmp_path / "evaluation")
    words = [
        "evaluate",
        "--model",
        best,
        "--data.format",
        "scenes",
        *world,
        "--metrics",
        "cider",
        "--tokenizer",
        "python",
    ]
    run_core([*words, "--out", evaluation], tmp_path / "evaluate.log")
    captions = json.loads((tmp_path / "evaluation/predictions.json").read_text())
    assert len(captions) == 4
    references = {entry["image_id"]: [entry["caption"]] for entry in captions}
    (tmp_path / "references.json").write_text(json.dumps(references))
    words = [
        "score",
        "--reward",
        "rouge_l",
        "--captions",
        f"{evaluation}/predictions.json",
        "--out",
    ]
    run_core(
        [
            *words,
            str(tmp_path / "scores.json"),
            "--references",
            str(tmp_path / "references.json"),
        ],
        tmp_path / "s.log",
    )
    photo = str(REPOSITORY / "docs/images/before_and_after.png")
    run_core(["caption", "--model", best, photo], tmp_path / "caption.log")
    run_core(
        ["report", str(tmp_path / "scst"), "--out", str(tmp_path / "page")],
        tmp_path / "report.log",
    )


def test_the_core_trains_reward_models(tmp_path):
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(chain(tmp_path)["teacher"]))
    run_core(
        ["reward_model", "--config", str(tmp_path / "teacher.yaml")],
        tmp_path / "teacher.log",
    )
    assert (tmp_path / "teacher/export/best/manifest.json").is_file()


@pytest.mark.parametrize("program", ["demo", "doctor", "configs list"])
def test_other_programs_of_the_core_are_there(program):
    words = program.split() if program == "configs list" else [program, "--help"]
    code = f"{WITHOUT_LAB}\nfrom rl_caption.cli.main import main\nsys.exit(main({words!r}))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_a_program_of_the_lab_says_where_it_belongs():
    code = f"{WITHOUT_LAB}\nfrom rl_caption.cli.main import main\nsys.exit(main(['judge', '--set', 'scenes']))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "judge comes with the lab" in ended.stderr
