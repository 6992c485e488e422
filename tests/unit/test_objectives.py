"""Losses and advantages against scalar loops, closed forms and numbers worked out by hand."""

import math

import pytest
import torch

from rl_caption.captioners.base import FORBIDDEN_LOGIT, caption_mask
from rl_caption.scst import ADVANTAGES
from rl_caption.scst.advantages import build_advantage, needs_greedy
from rl_caption.scst.cross_entropy import cross_entropy_sum
from rl_caption.scst.objectives import (
    PpoClip,
    Reinforce,
    kl_penalty,
    kl_to_reference,
    token_logprobs,
    token_logprobs_and_entropy,
)
from rl_caption.types import Scores

EOS = 2


@pytest.fixture
def tokens():
    return torch.tensor([[[5, 4, EOS, 0], [6, EOS, 0, 0]], [[4, 4, 4, 4], [EOS, 0, 0, 0]]])


def test_mask_counts_eos_and_nothing_after_it(tokens):
    expected = [[[1, 1, 1, 0], [1, 1, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]]]
    assert torch.equal(caption_mask(tokens, EOS), torch.tensor(expected, dtype=torch.bool))


def test_policy_gradient_equals_a_loop(tokens):
    torch.manual_seed(0)
    logprobs, advantages, mask = -torch.rand(2, 2, 4), torch.randn(2, 2), caption_mask(tokens, EOS)
    expected = 0.0
    for image in range(2):
        for sample in range(2):
            for position in range(4):
                if mask[image, sample, position]:
                    expected -= float(advantages[image, sample] * logprobs[image, sample, position])
    assert float(call(Reinforce(), logprobs, logprobs, mask, advantages)[0]) == pytest.approx(expected, rel=1e-5)


def test_reductions_count_tokens_or_captions(tokens):
    mask, zeros = caption_mask(tokens, EOS), torch.zeros(tokens.shape)
    for reduction, expected in (("token", 3 + 2 + 4 + 1), ("sequence", 4)):
        assert int(call(Reinforce(reduction), zeros, zeros, mask, torch.zeros(2, 2))[1]) == expected


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_logprobs_and_their_gradient_equal_torchs_own_some_rows_at_a_time(rows, monkeypatch):
    monkeypatch.setattr("rl_caption.scst.objectives.CHUNK", rows * 7)
    logits = (5 * torch.randn(2, 3, 4, 7, dtype=torch.float64)).requires_grad_()
    ids = torch.randint(0, 7, (2, 3, 4))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 1.7), logits)
    found, entropy = token_logprobs_and_entropy(logits, ids, 1.7)
    distribution = torch.distributions.Categorical(logits=logits / 1.7)
    assert torch.allclose(found, distribution.log_prob(ids), rtol=0, atol=1e-12)
    assert torch.allclose(entropy, distribution.entropy(), rtol=0, atol=1e-12)
    assert not entropy.requires_grad


def test_logits_far_from_zero_lose_no_digits():
    torch.manual_seed(4)
    logits = (3 * torch.randn(64, 2000) - 1000).requires_grad_()
    ids, weights = torch.randint(0, 2000, (64,)), torch.randn(64)
    found, entropy = token_logprobs_and_entropy(logits, ids)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=exact)
    logprobs = distribution.log_prob(ids)
    (expected,) = torch.autograd.grad((logprobs * weights).sum(), exact)
    assert (found - logprobs).abs().max() < 2e-6
    assert (entropy - distribution.entropy()).abs().max() < 2e-6
    assert (gradient - expected).abs().max() < 1e-6 * expected.abs().max()


def test_tokens_may_share_a_row_of_logits(monkeypatch):
    monkeypatch.setattr("rl_caption.scst.objectives.CHUNK", 2 * 7)
    logits = (5 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    ids, place = torch.tensor([3, 3, 6, 0, 1, 2]), torch.tensor([4, 4, 4, 0, 2, 2])  # row 1 is nobody's
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 1.7, place), logits)
    found, entropy = token_logprobs_and_entropy(logits, ids, 1.7, place)
    own, own_entropy = token_logprobs_and_entropy(logits[place], ids, 1.7)
    assert torch.equal(found, own)
    assert torch.equal(entropy, own_entropy)


def test_entropy_of_a_uniform_distribution_ignores_forbidden_tokens():
    logits = torch.zeros(1, 1, 1, 8)
    logits[..., :3] = FORBIDDEN_LOGIT
    _, entropy = token_logprobs_and_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))
    assert float(entropy) == pytest.approx(math.log(5), rel=1e-6)


def test_k3_is_zero_at_equality_and_positive_elsewhere():
    logprobs = torch.tensor([[[-1.0, -2.0]]])
    assert torch.equal(kl_to_reference(logprobs, logprobs), torch.zeros(1, 1, 2))
    reference = torch.tensor([[[-1.5, -1.0]]])
    assert float(kl_to_reference(logprobs, reference)[0, 0, 0]) == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    assert (kl_to_reference(logprobs, reference) > 0).all()


def test_k3_and_the_gradient_of_k2_are_unbiased():
    """Summed over all outcomes by their probability, k3 is KL and the gradient of k2 is the gradient of KL."""
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    assert (probabilities * kl_to_reference(logprobs, reference)).sum().item() == pytest.approx(kl.item(), rel=1e-9)
    exact = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    estimate = torch.autograd.grad((probabilities * kl_penalty(logprobs, reference)).sum(), logits)[0]
    assert torch.allclose(exact, estimate, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch_on_the_allowed_tokens(smoothing):
    torch.manual_seed(2)
    logits = torch.randn(2, 2, 3, 9)
    ids = torch.randint(3, 9, (2, 2, 3))
    mask = torch.rand(2, 2, 3) > 0.3
    forbidden = logits.clone()
    forbidden[..., :3] = FORBIDDEN_LOGIT
    expected = torch.nn.functional.cross_entropy(
        logits[..., 3:][mask], ids[mask] - 3, label_smoothing=smoothing, reduction="sum"
    )
    assert float(cross_entropy_sum(forbidden, ids, mask, smoothing)) == pytest.approx(float(expected), rel=1e-5)


REWARDS = torch.tensor([[1.0, 2.0, 6.0], [0.5, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("greedy", [-1.0, 0.0, 4.0], [0.25, 0.25, 0.25]),
        ("leave_one_out", [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2], [0.0] * 3),
        ("mean", [-2.0, -1.0, 3.0], [0.0] * 3),
        ("group_norm", [x / (7**0.5 + 1e-4) for x in (-2.0, -1.0, 3.0)], [0.0] * 3),  # variance 14 / 2
        ("none", [1.0, 2.0, 6.0], [0.5] * 3),
    ],
)
def test_advantages_by_hand(name, first, second):
    found = build_advantage(name, {})(REWARDS, torch.tensor([2.0, 0.25]))
    assert torch.allclose(found, torch.tensor([first, second]))
    assert torch.equal(found[1], torch.tensor(second))


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
    none = build_advantage("none", {})
    assert not torch.allclose(none(REWARDS, None), none(REWARDS + 3.0, None))


@pytest.mark.parametrize("name", ["leave_one_out", "group_norm"])
def test_one_sample_has_no_group(name):
    with pytest.raises(ValueError, match="num_samples of at least 2"):
        build_advantage(name, {})(torch.ones(2, 1), None)


def test_greedy_without_greedy_rewards_is_an_error():
    assert [name for name in ADVANTAGES if needs_greedy(build_advantage(name, {}))] == ["greedy"]
    with pytest.raises(ValueError, match="greedy captions"):
        build_advantage("greedy", {})(REWARDS, None)


def ppo_parts(seed=0):
    """Log-probabilities with gradient of a policy, those of the one that sampled, a mask with EOS, advantages."""
    torch.manual_seed(seed)
    mask = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]], dtype=torch.bool)
    old = -torch.rand(2, 2, 3, dtype=torch.float64) * mask
    logprobs = (old + 0.5 * torch.randn(2, 2, 3, dtype=torch.float64) * mask).requires_grad_()
    return logprobs, old, mask, torch.tensor([[0.7, -0.7], [-1.5, 1.5]])


def call(objective, logprobs, old, mask, advantages, reference=None):
    return objective(logprobs, old, reference, mask, Scores(advantages, None), advantages)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_clipped_surrogate_and_its_gradient_equal_a_loop(reduction, kl_coef):
    logprobs, old, mask, advantages = ppo_parts()
    objective = PpoClip(reduction, kl_coef, clip_low=0.1, clip_high=0.3)
    total, count, metrics = call(objective, logprobs, old, mask, advantages, reference=old - 0.1 * mask)
    (found,) = torch.autograd.grad((total / count).sum(), logprobs)
    surrogate, penalty, clipped, ratios, kl, expected = 0.0, 0.0, 0, 0.0, 0.0, torch.zeros_like(found)
    denominator = 9 if reduction == "token" else 4
    for place in mask.nonzero().tolist():
        image, sample, _ = place
        log_ratio = float(logprobs.detach()[tuple(place)] - old[tuple(place)])
        ratio, advantage, drift = math.exp(log_ratio), float(advantages[image, sample]), log_ratio + 0.1
        stopped = (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.9)
        surrogate -= advantage * (min(max(ratio, 0.9), 1.3) if stopped else ratio)
        penalty += kl_coef * 0.5 * drift**2
        expected[tuple(place)] = (0 if stopped else -advantage * ratio / denominator) + kl_coef * drift / 9
        clipped, ratios, kl = clipped + stopped, ratios + ratio, kl + ratio - 1 - log_ratio
    assert 0 < clipped < 9, "some tokens are clipped, some are not"
    assert float((total.detach() / count).sum()) == pytest.approx(surrogate / denominator + penalty / 9, rel=1e-6)
    assert torch.allclose(found, expected, rtol=1e-6)
    logged = {name: float(value / number) for name, (value, number) in metrics.items()}
    assert logged.pop("loss/policy") == pytest.approx(surrogate / denominator, rel=1e-6)
    assert logged == {
        "policy/ratio": pytest.approx(ratios / 9),
        "policy/clip_fraction": pytest.approx(clipped / 9),
        "policy/approx_kl": pytest.approx(kl / 9),
    }


def test_on_policy_the_clipped_surrogate_has_the_gradient_of_reinforce_to_the_bit():
    logprobs, _, mask, advantages = ppo_parts()
    parts = logprobs, logprobs.detach(), mask, advantages
    gradients = []
    for objective in (PpoClip(clip_low=1e-3, clip_high=1e-3), Reinforce()):
        total, count, metrics = call(objective, *parts)
        gradients.append(torch.autograd.grad(total / count, logprobs)[0])
    assert torch.equal(*gradients)
    assert gradients[0].abs().sum() > 0
    metrics = call(PpoClip(), *parts)[2]
    assert [float(metrics[f"policy/{name}"][0]) for name in ("ratio", "clip_fraction", "approx_kl")] == [9, 0, 0]
