"""Both trainings as a whole: best model, patience, accumulation, a reward that rises;
regions and subword tokens.
"""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.captioners_for_tests import REFERENCES
from tests.training_for_tests import (
    assert_close_runs,
    checked_run,
    lines,
    read_json,
    run,
    scst_config,
    steps,
    untimed,
    values,
    weights,
    xe_config,
)


def test_training_stops_when_patience_ends_and_stays_stopped(tmp_path):
    folder = tmp_path / "run"
    # Nothing is learnt at this rate, so every validation after the first is one without gain.
    options = {"train.lr": 1e-12, "eval.every": 1, "eval.patience": 2}
    config = xe_config(folder, **options)
    checked_run(config, folder)
    assert steps(folder, "val/cider") == [1, 2, 3]
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
    exact, rounded = (values(path, "loss/total") for path in (whole, bf16))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "xe"
    checked_run(xe_config(folder, **{"train.max_steps": 30, "train.lr": 0.01}), folder)
    return folder


def test_the_optimizer_and_the_schedule_start_anew_and_the_signature_is_kept(
    trained, tmp_path
):
    folder, start = tmp_path / "run", trained / "export/best"
    options = {
        "train.max_steps": 1,
        "train.kl_coef": 0.05,
        "train.xe_weight": 0.0,
        "train.warmup_steps": 4,
    }
    ended = checked_run(scst_config(folder, start, **options), folder, "scst")
    checkpoint = folder / "checkpoints/step-00000001"
    (rate,) = values(folder, "train/lr")
    assert rate == 0.003 / 4
    before, after = weights(start), weights(checkpoint)
    differences = [(after[name] - before[name]).abs().flatten() for name in before]
    changes = torch.cat(differences)
    # The first step of a fresh Adam moves every weight that has a gradient by the learning rate,
    # and none by more.
    assert changes.max() <= rate * 1.01
    assert (changes > rate * 0.99).float().mean() > 0.3
    digest = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()
    saved = read_json(checkpoint / "trainer_state.json")["signature"]
    assert saved.startswith("STANDARD_wInit+Cider-D[n4,s6.0]+df[")
    assert saved.endswith(f"]+greedy[nspi2]+kl[0.05,{digest[:8]}]")
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
    logged = [line for line in lines(folder) if "reward/total" in line]
    rewards = [line["reward/total"] for line in logged]
    assert sum(rewards[-10:]) > 1.3 * sum(rewards[:10])
    for line in logged:
        parts = [line[f"time/{part}"] for part in ("rollout", "reward", "update")]
        assert min(parts) > 0
        assert sum(parts) <= line["time/step"] * 1.001, "its parts, but for rounding"


@pytest.fixture
def features(tmp_path):
    """A dataset of eight images known only by their region features, one file each."""
    generator = np.random.default_rng(0)
    (tmp_path / "features").mkdir()
    rows = []
    for index in range(8):
        count = int(generator.integers(2, 6))
        regions = generator.normal(size=(count, 6)).astype(np.float32)
        np.savez(tmp_path / f"features/image{index}.npz", features=regions)
        chinese = ["a sign that reads 猫"] if index == 0 else []
        row = {
            "image": f"{index}.jpg",
            "image_id": f"image{index}",
            "references": [*REFERENCES[index % 4], *chinese],
            "split": "train" if index < 5 else "val",
        }
        rows.append(json.dumps(row))
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    data = {
        "format": "jsonl",
        "path": str(tmp_path / "data.jsonl"),
        "features_root": str(tmp_path / "features"),
    }
    return {"data": data, "train.batch_size": 4, "train.micro_batch_size": 2}


REGIONS = {"model.kwargs.input_kind": "regions", "model.kwargs.feature_dim": 6}


def test_a_captioner_over_region_features_trains_by_both_stages(features, tmp_path):
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    checked_run(xe_config(xe, **features, **REGIONS, **{"train.max_steps": 1}), xe)
    options = {"data": features["data"], "train.batch_size": 4, "train.max_steps": 2}
    checked_run(scst_config(scst, xe / "export/best", **options), scst, "scst")
    assert steps(scst) == [1, 2]
    signature = read_json(scst / "env.json")["signature"]
    count = 1 + sum(len(REFERENCES[index % 4]) for index in range(5))
    assert f"+PTB-python[1 of {count} texts not compared with Java]" in signature


def test_features_that_the_captioner_cannot_read_are_refused(features, tmp_path):
    xe = tmp_path / "xe"
    wider = REGIONS | {"model.kwargs.feature_dim": 7}
    ended = run(xe_config(xe, **features, **wider), xe)
    assert ended.code == 1
    assert "image" in ended.output
    assert "7" in ended.output
    for index in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index}.jpg")
    ended = run(xe_config(xe, **features), xe)
    assert ended.code == 1
    assert "features_root" in ended.output
