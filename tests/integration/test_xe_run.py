"""Cross-entropy training as a whole: the best model, the end of patience, accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training_for_tests import lines, run, untimed, weights, xe_config


def test_the_exported_model_is_the_one_with_the_best_validation_score(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = xe_config(folder, **{"run.keep_checkpoints": 10, "train.max_steps": 10, "train.lr": 0.01})
    assert run(config, folder).code == 0
    scores = {line["step"]: line["val/cider"] for line in lines(folder) if "val/cider" in line}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert best != max(scores), "the case must have its best score before the end"
    exported = weights(folder / "export/best")
    chosen = weights(folder / f"checkpoints/step-{best:08d}")
    assert all(torch.equal(tensor, chosen[name]) for name, tensor in exported.items())
    last = weights(folder / f"checkpoints/step-{max(scores):08d}")
    assert any(not torch.equal(tensor, last[name]) for name, tensor in exported.items())


def test_training_stops_when_patience_ends_and_stays_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Nothing is learnt at this rate, so every validation after the first is one without gain.
    config = xe_config(folder, **{"train.max_steps": 50, "train.lr": 1e-12, "eval.every": 1, "eval.patience": 2})
    assert run(config, folder).code == 0
    assert [line["step"] for line in lines(folder) if "val/cider" in line] == [1, 2, 3]
    assert (folder / "checkpoints/step-00000003").is_dir()
    assert (folder / "result.json").is_file()
    before = untimed(folder)
    assert run(config, folder).code == 0
    assert untimed(folder) == before


def test_accumulation_takes_the_same_steps(tmp_path: Path) -> None:
    runs = []
    for size in (8, 2):
        folder = tmp_path / f"micro-{size}"
        still = {"model.kwargs.dropout": 0.0, "train.micro_batch_size": size}
        assert run(xe_config(folder, **still), folder).code == 0
        runs.append(folder)
    whole, split = ([line for line in untimed(folder) if "loss/total" in line] for folder in runs)
    for one, other in zip(whole, split, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    one, other = (weights(folder / "checkpoints/step-00000006") for folder in runs)
    # The bias of the keys has no gradient but rounding errors (softmax ignores it), which Adam scales up to full steps.
    compared = [name for name in one if not name.endswith("key.bias")]
    assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in compared)


def test_bf16_is_used_where_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = run(xe_config(folder, **{"train.mixed_precision": "bf16", "train.max_steps": 2}), folder)
    assert ended.code == 0, ended.output
    whole = tmp_path / "whole"
    assert run(xe_config(whole, **{"train.max_steps": 2}), whole).code == 0
    losses = [[line["loss/total"] for line in lines(path) if "loss/total" in line] for path in (folder, whole)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
