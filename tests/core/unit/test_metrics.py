"""Averages are of elements, not of averages; every logged key is defined in docs/metrics.md."""

import math
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from rl_caption.runtime.engines import Averages
from rl_caption.runtime.types import CaptionBatch, Rollout, Scores
from rl_caption.scst.rollout import log_rollout
from tests.reward_models_for_tests import chain, text_chain
from tests.training_for_tests import changed, checked_run, lines, scst_config, xe_config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
ONLY_FP16 = {"train/skipped", "train/loss_scale"}
"""Which no CPU trains in; ``test_loop.py`` has them logged."""


def test_parts_of_unequal_size_count_by_element():
    averages = Averages()
    averages.add("a", torch.tensor([1.0, 2.0, 3.0]))
    averages.add("a", [10.0])
    averages.add("b", 4)
    averages.add_sum("c", 6.0, 4)
    averages.add_sum("nothing", 0.0, 0)
    assert averages.reduce(Accelerator(cpu=True)) == {"a": 4.0, "b": 4.0, "c": 1.5}
    averages.add("a", [1.0, float("nan")])
    assert math.isnan(averages.reduce(Accelerator(cpu=True))["a"])


def test_what_is_logged_of_a_rollout_is_worked_by_hand():
    """Two images, two samples each; one ends with EOS at the length limit of 4, one is
    cut off there.
    """
    lengths = torch.tensor([[3, 1], [4, 4]])
    rollout = Rollout(
        token_ids=torch.zeros(2, 2, 4, dtype=torch.long),
        mask=torch.arange(4) < lengths.unsqueeze(-1),
        finished=torch.tensor([[True, True], [True, False]]),
        texts=[["a dog a dog", "a dog a dog"], ["a cat with", ""]],
        greedy_texts=["a dog", "a cat"],
        greedy_finished=torch.tensor([True, True]),
    )
    batch = CaptionBatch([{"image_id": name, "references": []} for name in "ab"], {})
    scores = Scores(
        torch.tensor([[0.0, 2.0], [1.00001, 1.00009]]),
        torch.tensor([3.0, 5.0]),
        {"x": [1.0, 2.0, 3.0, 6.0]},
    )
    advantage = torch.tensor([[-2.0, 0.0], [0.0, 0.0]])
    averages = Averages()
    records = log_rollout([batch], [rollout], [scores], [advantage], averages)
    logged = averages.reduce(Accelerator(cpu=True))
    expected = {
        "reward/total": 1.000025,
        "reward/std": (1.0 + 0.00004) / 2,
        "reward/greedy": 4.0,
        "reward/x": 3.0,
        "advantage/mean": -0.5,
        "advantage/abs": 0.5,
        "advantage/zero_fraction": 0.5,
        "completion/length": 3.0,
        "completion/eos_fraction": 0.75,
        "hacking/repeated_ngrams": (1 / 3 + 1 / 3 + 0 + 0) / 4,
        "hacking/duplicates": 0.25,
        "hacking/bad_endings": 0.5,
    }
    assert logged == pytest.approx(expected, rel=1e-4)
    keys = ("image_id", "samples", "greedy", "rewards")
    assert [[record[key] for key in keys] for record in records] == [
        ["a", rollout.texts[0], "a dog", [0.0, 2.0]],
        ["b", rollout.texts[1], "a cat", [1.0, 1.0001]],
    ]


def documented():
    """Keys in the first column of the page's tables."""
    return set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Every key of ``metrics.jsonl`` with all terms of the loss on."""
    folder = tmp_path_factory.mktemp("runs")
    xe, short = folder / "xe", {"train.max_steps": 2}
    checked_run(xe_config(xe, **short), xe)
    scheduled = ("reward.terms.cider.schedule", "rollout.temperature_schedule")
    runs = {
        "scst": {key: [[0, 1.0]] for key in scheduled},
        "ppo": {"train.objective": "ppo_clip", "train.updates_per_rollout": 2},
        "dico": {"train.objective": "dico", "train.kl_coef": 0.0},
    }
    folders = [xe]
    for name, options in runs.items():
        folders.append(folder / name)
        config = scst_config(folders[-1], xe / "export/best", **short | options)
        checked_run(config, folders[-1], "scst")
    for name, config in (chain(folder) | text_chain(folder)).items():
        every_term = {"loss.contrastive": 1.0} if name == "dual" else {}
        folders.append(folder / name)
        checked_run(changed(config, short | every_term), folders[-1], "reward_model")
    return {key for run in folders for line in lines(run) for key in line}


@pytest.mark.slow
def test_the_page_defines_exactly_what_is_logged(logged):
    named = {
        "reward/cider": "reward/<term>",
        "val/reward/cider": "val/reward/<term>",
        "schedule/weight/cider": "schedule/weight/<term>",
        "val/judge/bleu4": "val/judge/<name>",
        "val/judge/rouge_l": "val/judge/<name>",
    }
    assert named.keys() <= logged
    assert {named.get(key, key) for key in logged} | ONLY_FP16 == documented()
