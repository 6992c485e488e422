"""Advantages against numbers worked out by hand."""

import pytest
import torch

from rl_caption.scst import ADVANTAGES
from rl_caption.scst.advantages import build_advantage, greedy, group_norm, leave_one_out, mean, needs_greedy, none

REWARDS = torch.tensor([[1.0, 2.0, 6.0], [0.5, 0.5, 0.5]])


def test_greedy_subtracts_the_greedy_reward_of_the_same_image():
    expected = torch.tensor([[-1.0, 0.0, 4.0], [0.25, 0.25, 0.25]])
    assert torch.equal(greedy(REWARDS, torch.tensor([2.0, 0.25])), expected)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    expected = torch.tensor([[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0]])
    assert torch.allclose(leave_one_out(REWARDS), expected)


def test_mean_subtracts_the_mean_of_all():
    assert torch.allclose(mean(REWARDS), torch.tensor([[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0]]))


def test_group_norm_divides_by_the_unbiased_deviation():
    # deviations -2, -1, 3; variance 14 / 2 = 7
    expected = torch.tensor([-2.0, -1.0, 3.0]) / (7**0.5 + 1e-4)
    advantages = group_norm(REWARDS)
    assert torch.allclose(advantages[0], expected)
    assert torch.equal(advantages[1], torch.zeros(3))


def test_none_is_the_reward():
    assert torch.equal(none(REWARDS), REWARDS)


@pytest.mark.parametrize("name", ["greedy", "leave_one_out", "mean", "group_norm"])
def test_a_constant_added_to_every_reward_changes_nothing(name):
    baseline = torch.tensor([2.0, 0.25])
    plain = build_advantage(name, {})(REWARDS, baseline)
    shifted = build_advantage(name, {})(REWARDS + 3.0, baseline + 3.0)
    assert torch.allclose(plain, shifted, atol=1e-6)


@pytest.mark.parametrize("name", ["greedy", "leave_one_out", "mean", "group_norm"])
@pytest.mark.parametrize("samples", [2, 3, 5, 6, 7, 16])
def test_equal_rewards_have_no_advantage_at_all(name, samples):
    rewards = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)).expand(-1, samples)
    advantages = build_advantage(name, {})(rewards, rewards[:, 0])
    assert advantages.dtype == torch.float32
    assert not advantages.any()


def test_without_a_baseline_a_constant_does_change_them():
    assert not torch.allclose(none(REWARDS), none(REWARDS + 3.0))


@pytest.mark.parametrize("name", ["leave_one_out", "group_norm"])
def test_one_sample_has_no_group(name):
    with pytest.raises(ValueError, match="num_samples of at least 2"):
        build_advantage(name, {})(torch.ones(2, 1), None)


def test_greedy_without_greedy_rewards_is_an_error():
    assert [name for name in ADVANTAGES if needs_greedy(build_advantage(name, {}))] == ["greedy"]
    with pytest.raises(ValueError, match="greedy captions"):
        greedy(REWARDS, None)
