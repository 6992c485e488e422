"""Both trainings as a whole: best model, patience, accumulation, a reward that rises; regions and
subword tokens.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.captioners_for_tests import REFERENCES
from tests.training_for_tests import (
    assert_close_runs,
    checked_run,
    lines,
    run,
    scst_config,
    untimed,
    weights,
    xe_config,
)


def test_training_stops_when_patience_ends_and_stays_stopped(tmp_path):
    folder = tmp_path / "run"
    # Nothing is learnt at this rate, so every validation after the first is one without gain.
    config = xe_config(
        folder, **{"train.lr": 1e-12, "eval.every": 1, "eval.patience": 2}
    )
    checked_run(config, folder)
    assert [line["step"] for line in lines(folder) if "val/cider" in line] == [1, 2, 3]
    assert (folder / "checkpoints/step-00000003").is_dir()
    assert (folder / "result.json").is_file()
    before = untimed(folder)
    checked_run(config, folder)
    assert untimed(folder) == before


def test_accumulation_takes_the_same_steps_and_bf16_those_that_it_rounds_to(tmp_path):
    still = {"model.kwargs.dropout": 0.0, "train.max_steps": 2}
    ways = {
        "whole": {"micro_batch_size": 8},
        "split": {"micro_batch_size": 2},
        "bf16": {"mixed_precision": "bf16"},
    }
    whole, split, bf16 = (tmp_path / name for name in ways)
    for name, options in ways.items():
        changes = still | {f"train.{key}": value for key, value in options.items()}
        checked_run(xe_config(tmp_path / name, **changes), tmp_path / name)
    assert_close_runs(whole, split)
    losses = [
        [line["loss/total"] for line in lines(path) if "loss/total" in line]
        for path in (bf16, whole)
    ]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "xe"
    checked_run(xe_config(folder, **{"train.max_steps": 30, "train.lr": 0.01}), folder)
    return folder


def test_the_optimizer_and_the_schedule_start_anew_and_the_signature_is_kept(
    trained, tmp_path
):
    folder = tmp_path / "run"
    options = {
        "train.max_steps": 1,
        "train.kl_coef": 0.05,
        "train.xe_weight": 0.0,
        "train.warmup_steps": 4,
    }
    ended = checked_run(
        scst_config(folder, trained / "export/best", **options), folder, "scst"
    )
    states = torch.load(
        folder / "checkpoints/step-00000001/optimizer.bin", weights_only=True
    )["state"]
    assert {float(state["step"]) for state in states.values()} == {1.0}
    (rate,) = (line["train/lr"] for line in lines(folder) if "train/lr" in line)
    assert rate == 0.003 / 4
    before, after = (
        weights(trained / "export/best"),
        weights(folder / "checkpoints/step-00000001"),
    )
    changes = torch.cat(
        [(after[name] - before[name]).abs().flatten() for name in before]
    )
    # The first step of a fresh Adam moves every weight that has a gradient by the learning rate,
    # and none by more.
    assert changes.max() <= rate * 1.01
    assert (changes > rate * 0.99).float().mean() > 0.3
    digest = hashlib.sha256(
        (trained / "export/best/model.safetensors").read_bytes()
    ).hexdigest()
    saved = json.loads(
        (folder / "checkpoints/step-00000001/trainer_state.json").read_text()
    )["signature"]
    assert saved.startswith("STANDARD_wInit+Cider-D[n4,s6.0]+df[")
    assert saved.endswith(f"]+greedy[nspi2]+kl[0.05,{digest[:8]}]")
    assert json.loads((folder / "env.json").read_text())["signature"] == saved
    assert f"signature: {saved}" in ended.output


def test_the_reward_rises(trained, tmp_path):
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
    checked_run(scst_config(folder, trained / "export/best", **options), folder, "scst")
    steps = [line for line in lines(folder) if "reward/total" in line]
    rewards = [line["reward/total"] for line in steps]
    assert sum(rewards[-10:]) > 1.3 * sum(rewards[:10])
    for line in steps:
        parts = [line[f"time/{part}"] for part in ("rollout", "reward", "update")]
        assert min(parts) > 0
        assert sum(parts) <= line["time/step"] * 1.001, "its parts, but for rounding"


@pytest.fixture
def features(tmp_path) -> dict:
    """A dataset of eight images known only by their region features, one file each."""
    generator = np.random.default_rng(0)
    (tmp_path / "features").mkdir()
    rows = []
    for index in range(8):
        regions = generator.normal(size=(int(generator.integers(2, 6)), 6)).astype(
            np.float32
        )
        np.savez(tmp_path / "features" / f"image{index}.npz", features=regions)
        split = "train" if index < 5 else "val"
        row = {
            "image": f"{index}.jpg",
            "image_id": f"image{index}",
            "references": [
                *REFERENCES[index % 4],
                *(["a sign that reads 猫"] if index == 0 else []),
            ],
            "split": split,
        }
        rows.append(json.dumps(row))
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return {
        "data": {
            "format": "jsonl",
            "path": str(tmp_path / "data.jsonl"),
            "features_root": str(tmp_path / "features"),
        },
        "model.kwargs.input_kind": "regions",
        "model.kwargs.feature_dim": 6,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
    }


def test_a_captioner_over_region_features_trains_by_both_stages(features, tmp_path):
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    checked_run(xe_config(xe, **features, **{"train.max_steps": 1}), xe)
    options = {"data": features["data"], "train.batch_size": 4, "train.max_steps": 2}
    checked_run(scst_config(scst, xe / "export/best", **options), scst, "scst")
    assert [line["step"] for line in lines(scst) if "loss/total" in line] == [1, 2]
    signature = json.loads((scst / "env.json").read_text())["signature"]
    count = 1 + sum(len(REFERENCES[index % 4]) for index in range(5))
    assert f"+PTB-python[1 of {count} texts not compared with Java]" in signature


def test_features_that_the_captioner_cannot_read_are_refused(features, tmp_path):
    xe = tmp_path / "xe"
    ended = run(xe_config(xe, **{**features, "model.kwargs.feature_dim": 7}), xe)
    assert ended.code == 1
    assert "image" in ended.output
    assert "7" in ended.output
    for index in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index}.jpg")
    pixels = {
        key: value
        for key, value in features.items()
        if not key.startswith("model.kwargs.")
    }
    ended = run(xe_config(xe, **pixels), xe)
    assert ended.code == 1
    assert "features_root" in ended.output
