"""A grid as a whole: interrupted after its first cell, continued, changed, and with a
cell that fails.
"""

from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.conftest import REPOSITORY
from tests.training_for_tests import (
    DATA,
    changed,
    lines,
    read_json,
    run,
    run_arguments,
    scst_config,
    weights,
    xe_config,
)

pytestmark = pytest.mark.slow

WORLD = changed(DATA, {"kwargs.num_test": 8})
REWARDS = """
import os, signal, time
from pathlib import Path
from rewards.base import RewardError


class Interrupting:
    '''Asks the program above to stop, once; then slow enough for the news to arrive.'''

    __name__, columns, bounds, signature = "interrupting", frozenset(), (0.0, 1.0), "interrupting"

    def __init__(self, marker):
        self.marker, self.seconds = Path(marker), 0.0

    def __call__(self, prompts, completions, **columns):
        if not self.marker.exists():
            self.marker.touch()
            self.seconds = 0.5
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(self.seconds)
        return [len(set(text.split())) / (1 + len(text.split())) for text in completions]


class Failing:
    __name__, columns, bounds, signature = "failing", frozenset(), (0.0, 1.0), "failing"

    def __call__(self, prompts, completions, **columns):
        raise RewardError("no score today")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    (folder / "rewards_for_ablation.py").write_text(REWARDS)
    xe = changed(xe_config(folder / "xe", **{"train.max_steps": 10}), {"data": WORLD})
    assert run(xe, folder / "xe").code == 0
    scst = changed(
        scst_config(
            folder / "unused", folder / "xe/export/best", **{"train.max_steps": 12}
        ),
        {"data": WORLD},
    )
    (folder / "scst.yaml").write_text(yaml.safe_dump(scst))
    return folder


def configuration(folder):
    marker = {"marker": str(folder / "interrupted")}
    interrupting = {
        "weight": 1.0,
        "target": "rewards_for_ablation:Interrupting",
        "kwargs": marker,
    }
    failing = {
        "terms": {"failing": {"weight": 1.0, "target": "rewards_for_ablation:Failing"}}
    }
    config = {
        "recipe": str(folder / "scst.yaml"),
        "cells": {
            "alpha=0": {"terms": {"cider": {}}},
            "alpha=1": {"terms": {"interrupting": interrupting}},
            "broken": failing,
        },
        "metrics": ["cider", "bleu"],
        "tokenizer": "python",
        "judges": {"ROUGE": {"target": "rouge_l"}},
        "out": str(folder / "grid"),
    }
    return config


def ablate(folder):
    (folder / "grid.yaml").write_text(yaml.safe_dump(configuration(folder)))
    return run_arguments(
        ["ablate", "--config", str(folder / "grid.yaml")],
        folder / "grid.log",
        python_path=str(folder),
        environment={"PYTHONPATH": f"{folder}:{REPOSITORY}", "OMP_NUM_THREADS": "1"},
    )


def state(folder):
    """Time of change and content of every file of a cell, locks apart."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def story(folder):
    """The grid's folder, and what was seen of it when it was interrupted and when it
    went on to its end.
    """
    interrupted = ablate(folder)
    kept = state(folder / "grid/cells/alpha=0/seed0/run")
    second = folder / "grid/cells/alpha=1/seed0/run/result.json"
    second_was_done = second.exists()
    finished = ablate(folder)
    return SimpleNamespace(
        folder=folder,
        interrupted=interrupted,
        kept=kept,
        second_was_done=second_was_done,
        finished=finished,
    )


def test_an_interrupted_grid_goes_on(story):
    first, second = (
        story.folder / f"grid/cells/alpha={alpha}/seed0" for alpha in (0, 1)
    )
    assert story.interrupted.code == 128 + 15, story.interrupted.output
    assert "stopping: " in story.interrupted.output
    assert "result.json" in story.kept
    assert not story.second_was_done

    assert "3 runs: 1 complete, 2 to train" in story.finished.output
    assert state(first / "run") == story.kept
    log = (second / "log.txt").read_text()
    assert "checkpoint of step" in log
    assert "going on from" in log
    steps = [line["step"] for line in lines(second / "run") if "loss/total" in line]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12


def test_what_is_judged_is_the_policy_after_the_last_step(story):
    """The best one by CIDEr-D of a reward without CIDEr-D may well be the starting policy."""
    cell = story.folder / "grid/cells/alpha=1/seed0"
    last = weights(cell / "run/export/last")
    trained = weights(cell / "run/checkpoints/step-00000012")
    assert all(torch.equal(last[name], trained[name]) for name in last)
    assert read_json(cell / "test_last/settings.json")["split"] == "test"
    scores = read_json(cell / "test_last/scores.json")["metrics"]
    assert {"CIDEr", "BLEU-4", "judge/ROUGE", "oracle/f1"} <= scores.keys()


def test_a_failing_cell_leaves_its_neighbours_alone(story):
    log = story.folder / "grid/cells/broken/seed0/log.txt"
    assert story.finished.code == 1
    failure = "broken seed 0 failed (exit code 1)"
    assert f"error: {failure}; its output is in {log}" in story.finished.output
    assert "no score today" in log.read_text()
    table = (story.folder / "grid/table.md").read_text()
    for system in ("start", "alpha=0", "alpha=1"):
        assert f"\n| {system} | " in table
    assert "missing: broken seed 0 failed" in table
