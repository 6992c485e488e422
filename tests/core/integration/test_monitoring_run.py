"""A reward that pays for one word: the alarm goes off, says why, and ends the run where
it is told to.
"""

import re

import pytest
import torch

from rewards.files import load_json
from tests.training_for_tests import (
    Kill,
    assert_same_run,
    lines,
    read_json,
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
SPOILED = {
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
def start(tmp_path_factory):
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
def spoiled(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoiled") / "run"
    ended = spoil(folder, start)
    assert ended.code == 0, ended.output
    return folder, ended


def spoil(folder, start, kill=None, **changes):
    (folder.parent / "word_reward.py").write_text(WORD_REWARD)
    config = scst_config(
        folder, start, **SPOILED, **{"data.kwargs.num_val": 40}, **changes
    )
    return run(config, folder, "scst", kill=kill, python_path=str(folder.parent))


def validations(folder):
    return [line for line in lines(folder) if "hacking/alarm" in line]


def hacking_notes(folder):
    return read_json(folder)["notes"]["hacking"]


def test_the_alarm_goes_off_names_the_evidence_and_keeps_the_scores(spoiled):
    folder, ended = spoiled
    log = validations(folder)
    assert log[-1]["val/reward"] > log[0]["val/reward"]
    assert log[-1]["val/judge/cider"] < log[0]["val/judge/cider"]
    assert (log[0]["hacking/alarm"], log[-1]["hacking/alarm"]) == (0.0, 1.0)
    first = hacking_notes(folder)["first_alarm"]
    assert first["step"] == next(line["step"] for line in log if line["hacking/alarm"])
    (warning, *_) = re.findall(".*signs of reward hacking.*", ended.output)
    assert all(sentence in warning for sentence in first["evidence"])
    assert "the judge cider, which is not in the reward, fell from" in ended.output
    assert "different words in all captions" in ended.output
    assert "stopped" not in ended.output
    for line in log:
        kept_in = folder / f"eval/step-{line['step']:08d}"
        kept = load_json(kept_in / "judges.json")
        captions = load_json(kept_in / "predictions.json")
        assert kept["image_id"] == [record["image_id"] for record in captions]
        (scores,) = kept["judges"].values()
        assert sum(scores) / len(scores) == pytest.approx(line["val/judge/cider"])
        assert line["val/judge/cider"] == pytest.approx(line["val/cider"])


def test_a_stop_ends_the_run_and_keeps_the_best_model_by_the_judge(start, tmp_path):
    folder, judges = tmp_path / "run", {"rouge_l": {}}
    stopping = {"monitor": {"stop": True, "judges": judges}}
    ended = spoil(folder, start, **stopping)
    assert ended.code == 0, ended.output
    log = validations(folder)
    assert [line["hacking/alarm"] for line in log] == [0.0] * (len(log) - 1) + [1.0]
    stop = log[-1]["step"]
    assert stop < SPOILED["train.max_steps"]
    why = "monitor.stop: the reward rose from"
    assert f"stopped at step {stop} of 20: {why}" in ended.output
    result = read_json(folder)
    assert result["best_metric"] == max(line["val/judge/rouge_l"] for line in log)
    best = folder / f"checkpoints/step-{result['best_step']:08d}"
    best = weights(best if result["best_step"] else start)
    exported = weights(folder / "export/best")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in best.items())
    again = spoil(folder, start, **stopping)
    assert again.code == 0, again.output
    assert validations(folder) == log
    resume = {"monitor": {"judges": judges}, "run.resume": True}
    onward = spoil(folder, start, **resume)
    assert onward.code == 0, onward.output
    log = validations(folder)
    assert [line["step"] for line in log] == [0, 5, 10, 15, 20]
    chosen_anew = [line["val/cider"] for line in log if line["step"] > stop]
    assert read_json(folder)["best_metric"] == max(chosen_anew)


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
    watching = {"monitor.kl": True, "monitor.best_by": "val/reward"}
    ended = spoil(folder, start, **watching)
    assert ended.code == 0, ended.output
    rewards = {line["step"]: line["val/reward"] for line in validations(folder)}
    result = read_json(folder)
    best = max(rewards, key=rewards.get)
    assert (result["best_step"], result["best_metric"]) == (best, rewards[best])
    assert result["best_step"] > 0, "CIDEr-D, which falls, would have chosen the start"
    divergence = [line["policy/kl"] for line in lines(folder) if "policy/kl" in line]
    assert divergence[0] == 0.0
    assert divergence[-1] > 0.1
    assert not any("policy/kl" in line for line in lines(spoiled[0]))
    other = weights(spoiled[0] / "checkpoints/step-00000020")
    for name, tensor in weights(folder / "checkpoints/step-00000020").items():
        assert torch.equal(tensor, other[name]), name


def test_what_cannot_be_watched_is_refused_before_training(start, tmp_path):
    monitor = {"judges": {"mine": {"target": "word_reward:Circles"}}}
    ended = spoil(tmp_path / "run", start, monitor=monitor)
    assert ended.code == 1
    assert "and the reward's term 'circles'" in ended.output
    assert not (tmp_path / "run/metrics.jsonl").exists()
