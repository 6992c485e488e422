"""Losses and advantages against scalar loops, closed forms and numbers worked out by hand.

REINFORCE itself is compared with a slow loop in tests/core/invariants/test_training_step.py.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rewards.mixed import MixedReward
from rl_caption.captioners.config import Decoding, SavedModelConfig
from rl_caption.captioners.tokens import FORBIDDEN_LOGIT
from rl_caption.config.schema import (
    RewardTerm,
    RolloutConfig,
    ScstConfig,
    ScstTrainConfig,
)
from rl_caption.programs.train import scst_signature
from rl_caption.runtime.types import Scores
from rl_caption.scst.advantages import build_advantage, needs_greedy, step_advantages
from rl_caption.scst.cross_entropy import cross_entropy_sum
from rl_caption.scst.objectives import (
    Dico,
    PpoClip,
    build_objective,
    kl_penalty,
    kl_to_reference,
    token_logprobs,
    token_logprobs_and_entropy,
)
from rl_caption.scst.rollout import sample_captions
from tests.captioners_for_tests import tiny_captioner
from tests.steps_for_tests import (
    WordCount,
    assert_equal_gradients,
    batches_of,
    gradient,
    scst_task,
)


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("shared", [False, True])
def test_logprobs_and_their_gradient_equal_torchs_own_some_rows_at_a_time(
    rows, shared, monkeypatch
):
    """Tokens have a row of logits each, or share rows (row 1 is nobody's)."""
    monkeypatch.setattr("rl_caption.scst.objectives.CHUNK", rows * 7)
    logits = (5 * torch.randn(6, 7, dtype=torch.float64)).requires_grad_()
    ids = torch.tensor([3, 3, 6, 0, 1, 2])
    place = torch.tensor([4, 4, 4, 0, 2, 2]) if shared else None
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, ids, 1.7, place), logits
    )
    found, entropy = token_logprobs_and_entropy(logits, ids, 1.7, place)
    own = logits[place] if shared else logits
    distribution = torch.distributions.Categorical(logits=own / 1.7)
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


def test_k3_and_the_gradient_of_k2_are_unbiased():
    """Sums over all outcomes by their probability: k3 is KL, the gradient of k2 that of KL."""
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    parameter = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = parameter.log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    k3 = (probabilities * kl_to_reference(logprobs, reference)).sum()
    assert k3.item() == pytest.approx(kl.item(), rel=1e-9)
    k2 = (probabilities * kl_penalty(logprobs, reference)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    estimate, none = torch.autograd.grad(k2, [logits, parameter], allow_unused=True)
    assert torch.allclose(exact, estimate, atol=1e-12)
    assert none is None


def test_what_is_logged_of_a_far_or_near_policy_is_finite_and_exact():
    """exp overflows float32 above 88 nats; near 0 the terms of k3 cancel."""
    policy = torch.tensor([-200.0, -1.0])
    found = kl_to_reference(policy, torch.tensor([-1.0, -1.0 + 2**-13]))
    assert found.tolist() == pytest.approx([math.exp(199) - 200, 2**-27], rel=1e-4)
    mask, advantages = torch.ones(1, 1, 2, dtype=torch.bool), torch.ones(1, 1)
    now, before = -torch.ones(1, 1, 2), torch.tensor([[[-401.0, -1.0]]])
    scores = Scores(advantages, None)
    total, _, metrics = PpoClip()(now, before, None, mask, scores, advantages)
    # the first ratio is clipped, the other is 1
    assert total == pytest.approx(-2.2)
    assert float(metrics["policy/ratio"][0]) == pytest.approx(math.exp(400), rel=1e-6)
    assert math.isfinite(metrics["policy/approx_kl"][0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch_on_the_allowed_tokens(smoothing):
    torch.manual_seed(2)
    logits = torch.randn(2, 2, 3, 9)
    ids = torch.randint(3, 9, (2, 2, 3))
    mask = torch.rand(2, 2, 3) > 0.3
    forbidden = logits.clone()
    forbidden[..., :3] = FORBIDDEN_LOGIT
    own = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")
    expected = own(logits[..., 3:][mask], ids[mask] - 3)
    found = cross_entropy_sum(forbidden, ids, mask, smoothing)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


REWARDS = torch.tensor([[1.0, 2.0, 6.0], [0.5, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("greedy", [-1.0, 0.0, 4.0], 0.25),
        ("leave_one_out", [-3.0, -1.5, 4.5], 0.0),
        ("mean", [-2.0, -1.0, 3.0], 0.0),
        # variance 14 / 2
        ("group_norm", [x / (7**0.5 + 1e-4) for x in (-2.0, -1.0, 3.0)], 0.0),
        ("none", [1.0, 2.0, 6.0], 0.5),
    ],
)
def test_advantages_by_hand(name, first, second):
    found = build_advantage(name, {})(REWARDS, torch.tensor([2.0, 0.25]))
    assert torch.allclose(found[0], torch.tensor(first))
    assert torch.equal(found[1], torch.full((3,), second))


@pytest.mark.parametrize("process", [0, 1])
def test_each_of_two_processes_gets_the_advantages_of_its_own_images(process):
    rewards = torch.tensor([[1.0, 3.0], [0.0, 4.0], [5.0, 5.0], [2.0, 0.0]])
    accelerator = SimpleNamespace(
        process_index=process,
        num_processes=2,
        device=torch.device("cpu"),
        gather=lambda own: rewards,
    )
    own = slice(2 * process, 2 * process + 2)
    scores = [Scores(part, None) for part in rewards[own].split(1)]
    advantage = build_advantage("mean", {})
    found = torch.cat(step_advantages(advantage, scores, accelerator))
    assert found.tolist() == [[-1, 1], [-2, 2], [0, 0], [1, -1]][own]


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_clipped_surrogate_and_its_gradient_equal_a_loop(reduction, kl_coef):
    torch.manual_seed(0)
    mask = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]]).bool()
    old = -torch.rand(2, 2, 3, dtype=torch.float64) * mask
    moved = old + 0.5 * torch.randn(2, 2, 3, dtype=torch.float64) * mask
    logprobs = moved.requires_grad_()
    advantages = torch.tensor([[0.7, -0.7], [-1.5, 1.5]])
    scores, reference = Scores(advantages, None), old - 0.1 * mask
    objective = PpoClip(reduction, kl_coef, clip_low=0.1, clip_high=0.3)
    total, count, metrics = objective(
        logprobs, old, reference, mask, scores, advantages
    )
    loss = (total / count).sum()
    (found,) = torch.autograd.grad(loss, logprobs)
    expected = torch.zeros_like(found)
    sums = dict.fromkeys(["surrogate", "penalty", "clipped", "ratio", "kl"], 0.0)
    denominator = 9 if reduction == "token" else 4
    for place in map(tuple, mask.nonzero().tolist()):
        log_ratio = float(logprobs.detach()[place] - old[place])
        ratio, drift = math.exp(log_ratio), log_ratio + 0.1
        advantage = float(advantages[place[:2]])
        stopped = ratio > 1.3 if advantage > 0 else ratio < 0.9
        expected[place] = kl_coef * drift / 9
        if not stopped:
            expected[place] -= advantage * ratio / denominator
        limited = min(max(ratio, 0.9), 1.3) if stopped else ratio
        sums["surrogate"] -= advantage * limited
        sums["penalty"] += kl_coef * 0.5 * drift**2
        sums["clipped"] += stopped
        sums["ratio"] += ratio
        sums["kl"] += ratio - 1 - log_ratio
    assert 0 < sums["clipped"] < 9
    policy = sums["surrogate"] / denominator
    assert loss.item() == pytest.approx(policy + sums["penalty"] / 9, rel=1e-6)
    assert torch.allclose(found, expected, rtol=1e-6)
    logged = {name: float(value / number) for name, (value, number) in metrics.items()}
    assert logged == {
        "loss/policy": pytest.approx(policy, rel=1e-6),
        "policy/ratio": pytest.approx(sums["ratio"] / 9),
        "policy/clip_fraction": pytest.approx(sums["clipped"] / 9),
        "policy/approx_kl": pytest.approx(sums["kl"] / 9),
    }


STRUCTURED = {
    "seq_nll": math.log(0.92 / 0.24),
    "risk": (1.2 * 0.2 + 0.5 * 0.36 + 0.1 * 0.12) / 0.92,
    # the third is the likeliest
    "max_margin": 0.5 + math.log(1.5),
    # the fourth is 0.1 + ln 0.5 below 0
    "multi_margin": 1.2 + math.log(5 / 6) + 0.5 + math.log(1.5),
    "softmax_margin": math.log(
        1 + 5 / 6 * math.exp(1.2) + 1.5 * math.exp(0.5) + 0.5 * math.exp(0.1)
    ),
}


def parts(rewards):
    """The arguments of an objective for 3 images of 3 samples; log-probabilities have a gradient."""
    torch.manual_seed(0)
    mask = torch.ones(3, 3, 4, dtype=torch.bool)
    logprobs = (-torch.rand(3, 3, 4, dtype=torch.float64)).requires_grad_()
    reference = -torch.rand(3, 3, 4, dtype=torch.float64)
    scores = Scores(rewards.double(), None)
    return logprobs, logprobs.detach(), reference, mask, scores, torch.zeros(3, 3)


def test_dico_by_hand():
    """Log-ratios 1, 0, -1; the worst, 0.3 ln 3 below the second, weighs 3/4."""
    rewards = torch.tensor([[2.0, 2.0 - 0.1, 2.0 - 0.1 - 0.3 * math.log(3)]])
    logprobs = torch.tensor([[[-1.0, -1.0], [-2.0, 0.0], [-3.0, 0.0]]])
    reference = torch.tensor([[[-2.0, -1.0], [-2.0, 0.0], [-2.0, 0.0]]])
    mask = torch.tensor([[[True, True], [True, False], [True, False]]])
    scores = Scores(rewards, None)
    objective = build_objective("dico", {"beta": 0.5, "temperature": 0.3})
    loss = partial(objective, mask=mask, scores=scores, advantages=rewards)
    total, count, metrics = loss(logprobs, logprobs, reference)
    assert float(metrics["dico/margin"][0]) == pytest.approx(0.5 * (1 + 0.75), rel=1e-5)
    assert float(metrics["dico/accuracy"][0]) == 1
    expected = math.log(1 + math.exp(-0.875))
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
    assert int(count) == 1
    with pytest.raises(ValueError, match="starting policy"):
        loss(logprobs, logprobs, None)
    # at the start no image is right
    metrics = loss(reference, reference, reference)[2]
    assert float(metrics["dico/margin"][0]) == float(metrics["dico/accuracy"][0]) == 0


@pytest.mark.parametrize(("name", "expected"), STRUCTURED.items())
def test_structured_losses_by_hand(name, expected):
    """Gaps 0, 1.2, 0.5, 0.1; scores ln 0.24, ln 0.2, ln 0.36, ln 0.12, together 0.92
    and not 1, spread over captions of other lengths.
    """
    lengths = torch.tensor([[3, 1, 2, 2]])
    mask = torch.arange(3) < lengths.unsqueeze(-1)
    likelihoods = torch.tensor([0.24, 0.2, 0.36, 0.12])
    logprobs = likelihoods.log().view(1, 4, 1) * mask
    logprobs[0, 0] += torch.tensor([0.1, -0.3, 0.2])  # the mean alone counts
    scores = Scores(torch.tensor([[3.0, 1.8, 2.5, 2.9]]), None)
    objective = build_objective(name, {})
    total, count, metrics = objective(
        logprobs, logprobs, None, mask, scores, scores.samples
    )
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert (total, count) == metrics["loss/policy"]
    assert int(count) == 1


@pytest.mark.parametrize("name", ["dico", *STRUCTURED])
def test_images_whose_rewards_do_not_differ_are_left_out(name):
    objective = build_objective(name, {})
    rewards = torch.tensor([[0.2, 0.9, 0.5], [0.4, 0.4, 0.4], [1.5, 0.1, 1.5]])
    for given, expected in ((rewards, 2), (torch.ones(3, 3), 0)):
        arguments = parts(given)
        total, count, _ = objective(*arguments)
        (gradient,) = torch.autograd.grad(total, arguments[0])
        assert int(count) == expected
        assert not gradient[1].any()
        assert bool(gradient.any()) == bool(total.detach()) == (expected > 0)


def test_candidates_of_beam_search_are_the_rollout_whatever_the_split():
    captioner = tiny_captioner()
    start = tiny_captioner(seed=9).policy.eval().requires_grad_(False)
    beams = Decoding(num_beams=3, num_return_sequences=3, max_new_tokens=8)
    task = scst_task(captioner, objective=Dico(), decoding=beams, ref_policy=start)
    (batch,) = batches_of(captioner, 4, 4)
    whole = gradient(captioner, task, [batch])
    found = captioner.generate(captioner.policy, batch.inputs, beams)
    samples = [record["samples"] for record in task.samples]
    assert samples == [captioner.decode(ids) for ids in found]
    halves = gradient(captioner, task, batches_of(captioner, 4, 2))
    assert_equal_gradients(whole, halves)


def test_an_image_with_fewer_captions_than_beams_is_named():
    captioner = tiny_captioner()
    width = captioner.policy.config.vocab_size + 1
    beams = Decoding(num_beams=width, num_return_sequences=width, max_new_tokens=1)
    (batch,) = batches_of(captioner, 1, 1)
    with pytest.raises(ValueError, match=f"image '{batch.image_ids[0]}'"):
        sample_captions(captioner, captioner.policy, batch, beams, seed=0, step=0)


@pytest.mark.parametrize(
    ("train", "part"),
    [
        ({}, "reinforce"),
        ({"objective": "dico", "advantage": "greedy"}, "greedy"),
    ],
)
def test_what_beam_search_does_not_go_with_is_refused(train, part):
    rollout = RolloutConfig(beam_search=True)
    with pytest.raises(ValueError, match=part):
        ScstConfig(rollout=rollout, train=ScstTrainConfig(**train))


OTHER_TARGET = {"train.advantage": "tests.extensions:own"}
CHANGES = [
    {},
    {"train.advantage": "greedy"},
    {**OTHER_TARGET, "train.advantage_kwargs": {"scale": 2.0}},
    {**OTHER_TARGET, "train.advantage_kwargs": {"scale": 3.0}},
    {"rollout.num_samples": 4},
    {"rollout.beam_search": True},
    {"rollout.temperature_schedule": [(0, 1.0), (9, 0.5)]},
    {"train.objective": "dico"},
    {"train.objective": "dico", "train.objective_kwargs": {"beta": 0.5}},
    {"train.objective": "dico", "model.init": "b"},
    {"train.kl_coef": 0.1},
    {"train.kl_coef": 0.2},
    {"train.kl_coef": 0.1, "model.init": "b"},
    {"reward.terms": {"words": RewardTerm(schedule=[(0, 1.0), (5, 0.0)])}},
    {"reward.terms": {"words": RewardTerm(schedule=[(0, 1.0), (5, 0.5)])}},
]


def test_whatever_changes_the_objective_or_the_samples_changes_the_signature(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    reward, signatures = MixedReward({"words": (WordCount(), 1.0)}), set()
    for change in CHANGES:
        config = ScstConfig(model=SavedModelConfig(init="a"))
        for key, value in change.items():
            section, _, name = key.partition(".")
            setattr(getattr(config, section), name, value)
        train = config.train
        objective = build_objective(
            train.objective, train.objective_kwargs, kl_coef=train.kl_coef
        )
        signatures.add(scst_signature(reward, [], config, objective))
    assert len(signatures) == len(CHANGES), signatures


@pytest.mark.parametrize("name", ["greedy", "leave_one_out", "mean", "group_norm"])
def test_equal_rewards_have_no_advantage_and_a_missing_baseline_is_an_error(name):
    advantage = build_advantage(name, {})
    assert needs_greedy(advantage) == (name == "greedy")
    with pytest.raises(ValueError, match=name):
        advantage(torch.ones(2, 1), None)
    drawn = torch.rand(200, 1, generator=torch.Generator().manual_seed(0))
    for samples in (2, 3, 5, 6, 7, 16):
        rewards = drawn.expand(-1, samples)
        advantages = advantage(rewards, rewards[:, 0])
        assert advantages.dtype == torch.float32
        assert not advantages.any(), samples
