"""Self-critical training as a whole: a fresh optimizer, a reward that rises, the signature everywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.training_for_tests import lines, run, scst_config, weights, xe_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "xe"
    assert run(xe_config(folder, **{"train.max_steps": 30, "train.lr": 0.01}), folder).code == 0
    return folder


def test_the_optimizer_and_the_schedule_start_anew(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"train.max_steps": 1, "train.kl_coef": 0.0, "train.xe_weight": 0.0, "train.warmup_steps": 4}
    assert run(scst_config(folder, trained / "export/best", **options), folder, "scst").code == 0
    states = torch.load(folder / "checkpoints/step-00000001/optimizer.bin", weights_only=True)["state"]
    assert {float(state["step"]) for state in states.values()} == {1.0}
    (rate,) = (line["train/lr"] for line in lines(folder) if "train/lr" in line)
    assert rate == 0.003 / 4
    before, after = weights(trained / "export/best"), weights(folder / "checkpoints/step-00000001")
    changes = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    # The first step of a fresh Adam moves every weight that has a gradient by the learning rate, and none by more.
    assert changes.max() <= rate * 1.01
    assert (changes > rate * 0.99).float().mean() > 0.3


def test_the_reward_rises(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {
        "train.max_steps": 60,
        "train.kl_coef": 0.0,
        "train.xe_weight": 0.0,
        "train.advantage": "leave_one_out",
        "train.lr": 0.01,
        "rollout.num_samples": 5,
        "eval.every": 60,
    }
    assert run(scst_config(folder, trained / "export/best", **options), folder, "scst").code == 0
    rewards = [line["reward/total"] for line in lines(folder) if "reward/total" in line]
    assert sum(rewards[-10:]) > 1.3 * sum(rewards[:10])


def test_the_signature_stands_in_log_checkpoint_and_environment(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = run(scst_config(folder, trained / "export/best", **{"train.max_steps": 1}), folder, "scst")
    weights = hashlib.sha256((trained / "export/best/model.safetensors").read_bytes()).hexdigest()
    start, end = "STANDARD_wInit+Cider-D[n4,s6.0]+df[", f"]+greedy[nspi2]+kl[0.05,{weights[:8]}]"
    saved = json.loads((folder / "checkpoints/step-00000001/trainer_state.json").read_text())["signature"]
    assert saved.startswith(start)
    assert saved.endswith(end)
    assert json.loads((folder / "env.json").read_text())["signature"] == saved
    assert f"reward signature: {saved}" in ended.output
