"""Scales of reward terms on samples: as defined, warned of where they differ, and nothing else is
touched.
"""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from rewards.mixed import MixedReward
from rewards.registry import build
from rl_caption.captioners.config import Decoding
from rl_caption.scst import reward_scales
from rl_caption.scst.reward_scales import IMAGES, sample_scores, scale_report
from tests.captioners_for_tests import tiny_captioner, tiny_rows

SAMPLING = Decoding(num_samples=3, with_greedy=False, max_new_tokens=8)
SCORES = {"words": [[1.0, 3.0], [4.0, 4.0]], "small": [[0.1, 0.1], [0.1, 0.12]]}


class Term:
    """A reward that is not called."""

    __name__ = signature = "term"
    bounds, columns = (0.0, 100.0), frozenset[str]()

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise AssertionError


@pytest.mark.parametrize(
    ("normalize", "weighted", "small"),
    [("none", "1", True), ("per_term", "0.8165", False), ("per_group", "2", False)],
)
def test_a_report_has_means_spreads_and_what_an_advantage_sees(
    normalize: Any, weighted: str, small: bool
) -> None:
    """Worked by hand: the words of the first image have a deviation of 1, those of the second 0."""
    reward = MixedReward(
        {"words": (Term(), -2.0), "small": (Term(), 1.0)}, normalize=normalize
    )
    asked: list[Any] = []

    def sample(_: MixedReward, rows: Any) -> Any:
        asked.extend(rows)
        return SCORES

    lines = scale_report(reward, list(range(2 * IMAGES)), sample)
    assert asked == list(range(0, 2 * IMAGES, 2))
    assert "mean 3" in lines[1]
    assert "image 0.5" in lines[1]
    assert lines[1].endswith(f"weighted {weighted}")
    assert ("small" in lines[-1] and "warning" in lines[-1]) == small


def test_samples_are_scored_by_image_and_leave_the_policy_and_the_random_state_as_they_were() -> (
    None
):
    captioner, rows = tiny_captioner(), tiny_rows(5)
    captioner.policy.train()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    reward = MixedReward({"rouge_l": (build("rouge_l"), 1.0)})
    sample = partial(sample_scores, captioner, SAMPLING, 3, Accelerator(cpu=True))
    found, other = sample(2, reward, rows), sample(5, reward, rows)
    assert found == other, "not a matter of the batch size"
    assert [len(group) for group in found["rouge_l"]] == [3] * 5
    assert captioner.policy.training
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_mixed_precision_is_that_of_the_policy_and_not_of_the_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_autocast = []

    class Words(Term):
        def __call__(
            self, prompts: Any, completions: Any, **columns: Any
        ) -> list[float]:
            in_autocast.append(torch.is_autocast_enabled("cpu"))
            return [0.0] * len(completions)

    monkeypatch.setattr(
        reward_scales,
        "autocast",
        lambda accelerator: torch.autocast("cpu", torch.bfloat16),
    )
    reward = MixedReward({"words": (Words(), 1.0)})
    sample_scores(
        tiny_captioner(), SAMPLING, 0, Accelerator(cpu=True), 2, reward, tiny_rows(3)
    )
    assert in_autocast == [False, False]
