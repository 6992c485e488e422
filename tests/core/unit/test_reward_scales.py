"""Scales of reward terms: measured as defined, warned of where they differ, and nothing else is
touched.
"""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from rewards.base import RewardError
from rewards.mixed import MixedReward
from rewards.registry import build
from rl_caption.captioners.config import Decoding
from rl_caption.scst import reward_scales
from rl_caption.scst.reward_scales import (
    IMAGES,
    reference_scores,
    sample_scores,
    scale_of,
    scale_report,
    scale_warning,
    weighted_variation,
)
from tests.captioners_for_tests import tiny_captioner, tiny_rows

SAMPLING = Decoding(num_samples=3, with_greedy=False, max_new_tokens=8)


class Words:
    """Words of a caption times ``unit``; remembers what it was asked."""

    __name__ = signature = "words"
    bounds = (0.0, 100.0)

    def __init__(
        self, unit: float = 1.0, refuses: str = "nothing", columns: frozenset[str] = frozenset()
    ) -> None:
        self.unit, self.refuses, self.columns = unit, refuses, columns
        self.asked: list[tuple[str, list[str]]] = []

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if self.refuses in completions:
            raise RewardError(f"{self.refuses!r} is too long")
        self.asked += list(zip(completions, columns["references"], strict=True))
        return [self.unit * len(text.split()) for text in completions]


def rows_of(*references: list[str]) -> list[Any]:
    return [
        {"image_id": str(i), "image": None, "references": captions}
        for i, captions in enumerate(references)
    ]


def test_scale_by_hand():
    scale = scale_of([[1.0, 3.0], [5.0, 5.0], [6.0], []])
    assert scale is not None
    assert scale[:2] == (4.0, pytest.approx(np.std([1, 3, 5, 5, 6])))
    assert scale.within == 0.5, "(1 + 0) / 2; one caption alone has no spread"
    assert scale_of([[], []]) is None


def test_images_are_spread_over_the_split():
    words = Words()
    many = rows_of(*[[f"caption of {number}"] for number in range(4 * IMAGES)])
    scale_report(MixedReward({"words": (words, 1.0)}), many, None)
    assert [text for text, _ in words.asked] == [
        f"caption of {4 * number}" for number in range(IMAGES)
    ]


def test_a_reference_is_compared_with_the_others_and_a_single_one_is_left_out():
    rows = rows_of(["a", "b b", "c c c"], ["d"])
    compares, looks = Words(columns=frozenset({"references"})), Words()
    reward = MixedReward({"compares": (compares, 1.0), "looks": (looks, 0.0)})
    three = [1.0, 2.0, 3.0]
    assert reference_scores(reward, rows) == {"compares": [three, []], "looks": [three, [1.0]]}
    assert compares.asked == [
        ("a", ["b b", "c c c"]),
        ("b b", ["a", "c c c"]),
        ("c c c", ["a", "b b"]),
    ]
    assert [text for text, _ in looks.asked] == ["a", "b b", "c c c", "d"]
    assert "1 image(s) with fewer than two references" in scale_report(reward, rows, None)[-1]


def test_samples_are_scored_and_nothing_is_disturbed():
    captioner, terms = (
        tiny_captioner(dropout=0.5),
        {"words": (Words(), 2.0), "rouge_l": (build("rouge_l"), 1.0)},
    )
    captioner.policy.train()
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    arguments = (captioner, SAMPLING, 7, Accelerator(cpu=True))
    found = sample_scores(*arguments, 2, MixedReward(terms), tiny_rows(5))
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before
    assert captioner.policy.training
    assert {name: np.shape(groups) for name, groups in found.items()} == {
        "words": (5, 3),
        "rouge_l": (5, 3),
    }
    assert sample_scores(*arguments, 5, MixedReward(terms), tiny_rows(5)) == found
    scale, groups = scale_of(found["words"]), np.array(found["words"])
    within = groups.std(axis=1).mean()
    assert scale == pytest.approx((groups.mean(), groups.std(), within))
    for normalize, expected in (
        ("none", 2 * within),
        ("per_term", 2 * within / groups.std()),
        ("per_group", 2),
    ):
        weighted = weighted_variation(
            MixedReward(terms, normalize=normalize), {"words": scale, "rouge_l": None}
        )
        assert weighted == pytest.approx({"words": expected})


def test_mixed_precision_is_that_of_the_policy_and_not_of_the_rewards(monkeypatch):
    in_autocast = []

    class Term(Words):
        def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
            in_autocast.append(torch.is_autocast_enabled("cpu"))
            return super().__call__(prompts, completions, **columns)

    monkeypatch.setattr(
        reward_scales, "autocast", lambda accelerator: torch.autocast("cpu", torch.bfloat16)
    )
    reward = MixedReward({"words": (Term(), 1.0)})
    sample_scores(tiny_captioner(), SAMPLING, 0, Accelerator(cpu=True), 2, reward, tiny_rows(3))
    assert in_autocast == [False, False]


def test_a_penalty_varies_by_the_size_of_its_weight():
    reward = MixedReward({"words": (Words(), -2.0)})
    assert weighted_variation(reward, {"words": scale_of([[1.0, 3.0]])}) == {"words": 2.0}


def warning(weighted: dict[str, float], normalize: Any = "none", watched: str = "") -> str | None:
    terms = {name: (Words(), 0.0 if name == watched else 0.5) for name in weighted} or {
        "words": (Words(), 1.0)
    }
    return scale_warning(MixedReward(terms, normalize=normalize), weighted)


def test_the_warning_names_the_term_that_is_hardly_seen_and_what_would_make_it_seen():
    text = str(warning({"cider": 0.5, "clips": 0.04, "rouge_l": 0.06}))
    assert "0.5 in cider, but only by 0.04 in clips (a weight of 6.2 would make it equal)" in text
    assert "rouge_l" not in text
    assert "per_term" in text
    assert "per_term" not in str(warning({"cider": 0.5, "clips": 0.04}, "per_term"))
    assert "0 in still." in str(warning({"cider": 0.5, "still": 0.0}))


@pytest.mark.parametrize(
    "terms", [{"cider": 0.5, "clips": 0.051}, {"cider": 0.5}, {"still": 0.0, "too": 0.0}, {}]
)
def test_no_warning(terms):
    assert warning(terms) is None
    assert warning(terms | {"watched": 0.0}, watched="watched") is None


def test_a_report_without_a_captioner_and_one_with_a_reference_that_cannot_be_scored():
    rows = tiny_rows(4)
    lines = scale_report(
        MixedReward({"words": (Words(), 1.0), "tiny": (Words(0.001), 1.0)}), rows, None
    )
    assert lines[0].startswith("scales of the terms on 4 training images")
    assert [line.split()[0] for line in lines[2:]] == ["term", "words", "tiny"]
    assert lines[-1].split()[:5] + lines[-1].split()[-4:] == [
        "tiny",
        "0",
        "to",
        "100",
        "1",
        *"----",
    ]
    reward = MixedReward(
        {"words": (Words(refuses="a dog runs in the park"), 1.0), "tiny": (Words(0.001), 1.0)}
    )
    one_sample = Decoding(num_samples=1, with_greedy=True, max_new_tokens=8)
    samples = partial(sample_scores, tiny_captioner(), one_sample, 0, Accelerator(cpu=True), 2)
    *_, references, warned = scale_report(reward, rows, samples)
    assert "reward term 'words': 'a dog runs in the park' is too long" in references
    assert "in tiny (a weight of 1e+03 would make it equal)" in warned
