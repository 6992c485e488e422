"""Best of n: pure functions of scored captions."""

from itertools import combinations

import numpy as np
import pytest

from rl_caption.evaluation.confidence import Floats
from rl_caption.monitoring.best_of_n import (
    best_of_n,
    best_of_n_weights,
    kl_of_best_of_n,
    sample_sizes,
)

IMAGES = [str(number) for number in range(40)]


def draws(seed: int = 0) -> tuple[Floats, Floats]:
    """A reward [40, 16], and a gold score that follows it to a point and falls beyond."""
    rewards = np.random.default_rng(seed).normal(size=(40, 16))
    return rewards, -((rewards - 0.5) ** 2)


def test_weights_are_the_mean_over_all_choices_of_n():
    rewards = np.array([[0.3, 0.1, 0.3, 0.9, 0.2]])
    for n in range(1, 6):
        expected = np.zeros(5)
        subsets = list(combinations(range(5), n))
        for subset in subsets:
            best = [
                at for at in subset if rewards[0, at] == max(rewards[0, list(subset)])
            ]
            expected[best] += 1 / len(best) / len(subsets)
        np.testing.assert_allclose(
            best_of_n_weights(rewards, n)[0], expected, atol=1e-12
        )


def brute_force(rewards: Floats, scores: Floats, n: int) -> float:
    """Mean over images and all subsets of ``n`` samples of the score of the best by ``rewards``;
    ties are shared.
    """
    means = []
    for reward, score in zip(rewards, scores, strict=True):
        for subset in combinations(range(len(reward)), n):
            best = max(reward[list(subset)])
            means.append(np.mean([score[at] for at in subset if reward[at] == best]))
    return float(np.mean(means))


def test_curves_are_those_of_all_subsets():
    generator = np.random.default_rng(7)
    rewards = generator.integers(3, size=(4, 6)).astype(np.float64)  # many ties
    gold = generator.normal(size=(4, 6))
    curve = best_of_n(rewards, {"gold": gold}, IMAGES[:4], 50)["gold"]
    assert curve.n == [1, 2, 4, 6]
    np.testing.assert_allclose(
        curve.mean, [brute_force(rewards, gold, n) for n in curve.n], rtol=1e-12
    )


def test_one_set_of_samples_estimates_the_best_of_n_without_bias():
    """The largest of n uniform numbers is n / (n + 1) on average."""
    rewards = np.random.default_rng(0).uniform(size=(20_000, 5))
    for n in range(1, 6):
        best = (best_of_n_weights(rewards, n) * rewards).sum(1).mean()
        assert best == pytest.approx(n / (n + 1), abs=0.005)


def test_scores_that_are_no_numbers_are_named():
    rewards, gold = draws()
    gold[3, 5] = np.nan
    with pytest.raises(ValueError, match=r"^gold.*'3'"):
        best_of_n(rewards, {"gold": gold}, IMAGES)


def test_sizes_and_divergence():
    assert sample_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert sample_sizes(10) == [1, 2, 4, 8, 10]
    assert kl_of_best_of_n(1) == 0
    assert kl_of_best_of_n(64) == pytest.approx(3.174508, abs=1e-6)


def test_a_gold_score_that_turns():
    rewards, gold = draws()
    scores = {"reward": rewards, "gold": gold, "same": rewards}
    curves = best_of_n(rewards, scores, IMAGES, 200)
    assert curves["same"] == curves["reward"]
    assert curves["reward"].mean == sorted(curves["reward"].mean)
    assert curves["reward"].mean[0] == pytest.approx(rewards.mean())
    assert not curves["reward"].turns
    assert curves["reward"].fall == 0
    found = curves["gold"]
    assert found.turns
    assert found.peak in (2, 4)
    assert found.fall_interval[0] < found.fall < found.fall_interval[1]
    for low, mean, high in zip(found.low, found.mean, found.high, strict=True):
        assert low <= mean <= high


def test_a_constant_reward_chooses_by_chance():
    _, gold = draws()
    curve = best_of_n(np.zeros_like(gold), {"gold": gold}, IMAGES, 50)["gold"]
    np.testing.assert_allclose(curve.mean, [gold.mean()] * len(curve.n))
    assert not curve.turns
