"""A reward that pays for one word: the alarm goes off, says why, and ends the run where it is told
to.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training_for_tests import (
    Ended,
    Kill,
    assert_same_run,
    lines,
    run,
    scst_config,
    weights,
    xe_config,
)

pytestmark = pytest.mark.slow

WORD_REWARD = '''
class Circles:
    """Share of the words that are "circle"."""
    __name__ = "circles"
    columns = frozenset()
    bounds = (0.0, 1.0)
    signature = "circles"

    def __call__(self, prompts, completions, **columns):
        assert not {"scene", "facts"} & set(columns)
        return [text.split().count("circle") / max(len(text.split()), 1) for text in completions]
'''
SPOILED: dict[str, Any] = {
    "reward.terms": {"circles": {"target": "word_reward:Circles"}},
    "train.max_steps": 20,
    "train.lr": 0.01,
    "train.kl_coef": 0.0,
    "train.xe_weight": 0.0,
    "train.advantage": "leave_one_out",
    "rollout.num_samples": 5,
    "eval.every": 5,
    "run.log_every": 10,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A captioner that says different, mostly sensible things."""
    folder = tmp_path_factory.mktemp("start") / "xe"
    options = {
        "train.max_steps": 200,
        "train.lr": 0.01,
        "eval.every": 200,
        "model.kwargs.dropout": 0.0,
    }
    ended = run(xe_config(folder, **options, **{"data.kwargs.num_val": 40}), folder)
    assert ended.code == 0, ended.output
    return folder / "export/best"


@pytest.fixture(scope="module")
def spoiled(start, tmp_path_factory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("spoiled") / "run"
    ended = spoil(folder, start)
    assert ended.code == 0, ended.output
    return folder, ended


def spoil(folder: Path, start: Path, kill: Kill | None = None, **changes: Any) -> Ended:
    (folder.parent / "word_reward.py").write_text(WORD_REWARD)
    config = scst_config(
        folder, start, **SPOILED, **{"data.kwargs.num_val": 40}, **changes
    )
    return run(config, folder, "scst", kill=kill, python_path=str(folder.parent))


def validations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "hacking/alarm" in line]


def hacking_notes(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())["notes"]["hacking"]


def test_the_alarm_goes_off_names_the_evidence_and_keeps_the_scores(spoiled):
    folder, ended = spoiled
    log = validations(folder)
    assert log[-1]["val/reward"] > log[0]["val/reward"]
    assert log[-1]["val/judge/cider"] < log[0]["val/judge/cider"]
    assert (log[0]["hacking/alarm"], log[-1]["hacking/alarm"]) == (0.0, 1.0)
    first = hacking_notes(folder)["first_alarm"]
    assert first["step"] == next(line["step"] for line in log if line["hacking/alarm"])
    warnings = [
        line for line in ended.output.splitlines() if "signs of reward hacking" in line
    ]
    assert all(sentence in warnings[0] for sentence in first["evidence"])
    assert "the judge cider, which is not in the reward, fell from" in ended.output
    assert "different words in all captions" in ended.output
    assert "stopped" not in ended.output
    for line in log:
        kept = json.loads(
            (folder / f"eval/step-{line['step']:08d}/judges.json").read_text()
        )
        captions = json.loads(
            (folder / f"eval/step-{line['step']:08d}/predictions.json").read_text()
        )
        assert kept["image_id"] == [record["image_id"] for record in captions]
        (scores,) = kept["judges"].values()
        assert sum(scores) / len(scores) == pytest.approx(line["val/judge/cider"])
        assert line["val/judge/cider"] == pytest.approx(line["val/cider"])


def test_a_stop_ends_the_run_and_keeps_the_best_model_by_the_judge(start, tmp_path):
    folder = tmp_path / "run"
    ended = spoil(
        folder, start, **{"monitor": {"stop": True, "judges": {"rouge_l": {}}}}
    )
    assert ended.code == 0, ended.output
    log = validations(folder)
    assert [line["hacking/alarm"] for line in log] == [0.0] * (len(log) - 1) + [1.0]
    stop = log[-1]["step"]
    assert stop < SPOILED["train.max_steps"]
    assert (
        f"stopped at step {stop} of 20: monitor.stop: the reward rose from"
        in ended.output
    )
    assert "done: best val/judge/rouge_l" in ended.output
    result = json.loads((folder / "result.json").read_text())
    assert result["best_metric"] == max(line["val/judge/rouge_l"] for line in log)
    best = weights(
        start
        if result["best_step"] == 0
        else folder / f"checkpoints/step-{result['best_step']:08d}"
    )
    exported = weights(folder / "export/best")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in best.items())
    again = spoil(
        folder, start, **{"monitor": {"stop": True, "judges": {"rouge_l": {}}}}
    )
    assert again.code == 0, again.output
    assert validations(folder) == log
    onward = spoil(
        folder, start, **{"monitor": {"judges": {"rouge_l": {}}}, "run.resume": "true"}
    )
    assert onward.code == 0, onward.output
    assert "chooses the best model anew" in onward.output
    assert [line["step"] for line in validations(folder)] == [0, 5, 10, 15, 20]
    result = json.loads((folder / "result.json").read_text())
    assert result["best_metric"] == max(
        line["val/cider"] for line in validations(folder) if line["step"] > stop
    )


@pytest.mark.parametrize("step", [3, 12])
def test_a_resumed_run_compares_with_the_same_start(start, spoiled, tmp_path, step):
    folder = tmp_path / "run"
    killed = spoil(folder, start, Kill("rl_caption.training.run:Run.begin_step", step))
    assert killed.code < 0, killed.output
    ended = spoil(folder, start)
    assert ended.code == 0, ended.output
    assert_same_run(folder, spoiled[0])
    assert hacking_notes(folder)["start"]["step"] == 0


def test_watching_the_divergence_does_not_change_the_training(start, spoiled, tmp_path):
    folder = tmp_path / "run"
    ended = spoil(
        folder, start, **{"monitor.kl": True, "monitor.best_by": "val/reward"}
    )
    assert ended.code == 0, ended.output
    rewards = {line["step"]: line["val/reward"] for line in validations(folder)}
    result = json.loads((folder / "result.json").read_text())
    assert (result["best_step"], result["best_metric"]) == max(
        rewards.items(), key=lambda item: item[1]
    )
    assert result["best_step"] > 0, "CIDEr-D, which falls, would have chosen the start"
    divergence = [line["policy/kl"] for line in lines(folder) if "policy/kl" in line]
    assert divergence[0] == 0.0
    assert divergence[-1] > 0.1
    assert not any("policy/kl" in line for line in lines(spoiled[0]))
    other = weights(spoiled[0] / "checkpoints/step-00000020")
    for name, tensor in weights(folder / "checkpoints/step-00000020").items():
        assert torch.equal(tensor, other[name]), name


def test_what_cannot_be_watched_is_refused_before_training(start, tmp_path):
    mixture = {
        "reward.terms.repetition": {"weight": 1.0}
    }  # whose scales on samples are printed before training
    for monitor, message in (
        (
            {"best_by": "rouge_l"},
            "monitor.best_by is 'rouge_l': expected one of ['cider', 'val/cider'",
        ),
        ({"best_by": "val/reward/rouge_l"}, "'val/reward/repetition'"),
        (
            {"judges": {"mine": {"target": "word_reward:Circles"}}},
            "and the reward's term 'circles'",
        ),
    ):
        ended = spoil(tmp_path / "run", start, monitor=monitor, **mixture)
        assert ended.code == 1
        assert message in ended.output
        assert not (tmp_path / "run/metrics.jsonl").exists()
