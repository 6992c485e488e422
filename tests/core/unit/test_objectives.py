"""Losses and advantages against scalar loops, closed forms and numbers worked out by hand.

REINFORCE itself is compared with a slow loop in tests/core/invariants/test_training_step.py.
"""

import hashlib
import math

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
from rl_caption.scst.advantages import build_advantage, needs_greedy
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
    norm,
    scst_task,
)


@pytest.mark.parametrize("rows", [2, 100])
def test_logprobs_and_their_gradient_equal_torchs_own_some_rows_at_a_time(
    rows, monkeypatch
):
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
    ids, place = (
        torch.tensor([3, 3, 6, 0, 1, 2]),
        torch.tensor([4, 4, 4, 0, 2, 2]),
    )  # row 1 is nobody's
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, ids, 1.7, place), logits
    )
    found, entropy = token_logprobs_and_entropy(logits, ids, 1.7, place)
    own, own_entropy = token_logprobs_and_entropy(logits[place], ids, 1.7)
    assert torch.equal(found, own)
    assert torch.equal(entropy, own_entropy)


def test_k3_and_the_gradient_of_k2_are_unbiased():
    """Summed over all outcomes by their probability, k3 is KL and the gradient of k2 is the
    gradient of KL.
    """
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    parameter = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = parameter.log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    assert (
        probabilities * kl_to_reference(logprobs, reference)
    ).sum().item() == pytest.approx(kl.item(), rel=1e-9)
    exact = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    estimate = torch.autograd.grad(
        (probabilities * kl_penalty(logprobs, reference)).sum(), logits
    )[0]
    assert torch.allclose(exact, estimate, atol=1e-12)
    assert torch.autograd.grad(
        kl_penalty(logprobs, reference).sum(), parameter, allow_unused=True
    ) == (None,)


def test_what_is_logged_of_a_far_or_near_policy_is_finite_and_exact():
    """exp overflows float32 above 88 nats; near 0 the terms of k3 cancel."""
    policy = torch.tensor([-200.0, -1.0])
    found = kl_to_reference(policy, torch.tensor([-1.0, -1.0 + 2**-13]))
    assert found.tolist() == pytest.approx([math.exp(199) - 200, 2**-27], rel=1e-4)
    mask, advantages = torch.ones(1, 1, 2, dtype=torch.bool), torch.ones(1, 1)
    now, before = -torch.ones(1, 1, 2), torch.tensor([[[-401.0, -1.0]]])
    total, _, metrics = PpoClip()(
        now, before, None, mask, Scores(advantages, None), advantages
    )
    assert total == pytest.approx(-2.2), "the first ratio is clipped, the other is 1"
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
    expected = torch.nn.functional.cross_entropy(
        logits[..., 3:][mask], ids[mask] - 3, label_smoothing=smoothing, reduction="sum"
    )
    assert float(cross_entropy_sum(forbidden, ids, mask, smoothing)) == pytest.approx(
        float(expected), rel=1e-5
    )


REWARDS = torch.tensor([[1.0, 2.0, 6.0], [0.5, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("greedy", [-1.0, 0.0, 4.0], [0.25, 0.25, 0.25]),
        (
            "leave_one_out",
            [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2],
            [0.0] * 3,
        ),
        ("mean", [-2.0, -1.0, 3.0], [0.0] * 3),
        (
            "group_norm",
            [x / (7**0.5 + 1e-4) for x in (-2.0, -1.0, 3.0)],
            [0.0] * 3,
        ),  # variance 14 / 2
        ("none", [1.0, 2.0, 6.0], [0.5] * 3),
    ],
)
def test_advantages_by_hand(name, first, second):
    found = build_advantage(name, {})(REWARDS, torch.tensor([2.0, 0.25]))
    assert torch.allclose(found, torch.tensor([first, second]))
    assert torch.equal(found[1], torch.tensor(second))


@pytest.mark.parametrize("name", ["greedy", "leave_one_out", "mean", "group_norm"])
def test_equal_rewards_have_no_advantage_at_all(name):
    for samples in (2, 3, 5, 6, 7, 16):
        rewards = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)).expand(
            -1, samples
        )
        advantages = build_advantage(name, {})(rewards, rewards[:, 0])
        assert advantages.dtype == torch.float32
        assert not advantages.any(), samples


@pytest.mark.parametrize("name", ["greedy", "leave_one_out", "mean", "group_norm"])
def test_a_baseline_that_is_not_there_is_an_error(name):
    assert needs_greedy(build_advantage(name, {})) == (name == "greedy")
    with pytest.raises(ValueError, match=name):
        build_advantage(name, {})(torch.ones(2, 1), None)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_clipped_surrogate_and_its_gradient_equal_a_loop(reduction, kl_coef):
    torch.manual_seed(0)
    mask = torch.tensor(
        [[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]]], dtype=torch.bool
    )
    old = -torch.rand(2, 2, 3, dtype=torch.float64) * mask
    logprobs = (
        old + 0.5 * torch.randn(2, 2, 3, dtype=torch.float64) * mask
    ).requires_grad_()
    advantages = torch.tensor([[0.7, -0.7], [-1.5, 1.5]])
    objective = PpoClip(reduction, kl_coef, clip_low=0.1, clip_high=0.3)
    total, count, metrics = objective(
        logprobs, old, old - 0.1 * mask, mask, Scores(advantages, None), advantages
    )
    (found,) = torch.autograd.grad((total / count).sum(), logprobs)
    surrogate, penalty, clipped, ratios, kl, expected = (
        0.0,
        0.0,
        0,
        0.0,
        0.0,
        torch.zeros_like(found),
    )
    denominator = 9 if reduction == "token" else 4
    for place in mask.nonzero().tolist():
        image, sample, _ = place
        log_ratio = float(logprobs.detach()[tuple(place)] - old[tuple(place)])
        ratio, advantage, drift = (
            math.exp(log_ratio),
            float(advantages[image, sample]),
            log_ratio + 0.1,
        )
        stopped = (advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.9)
        surrogate -= advantage * (min(max(ratio, 0.9), 1.3) if stopped else ratio)
        penalty += kl_coef * 0.5 * drift**2
        expected[tuple(place)] = (
            0 if stopped else -advantage * ratio / denominator
        ) + kl_coef * drift / 9
        clipped, ratios, kl = (
            clipped + stopped,
            ratios + ratio,
            kl + ratio - 1 - log_ratio,
        )
    assert 0 < clipped < 9, "some tokens are clipped, some are not"
    assert float((total.detach() / count).sum()) == pytest.approx(
        surrogate / denominator + penalty / 9, rel=1e-6
    )
    assert torch.allclose(found, expected, rtol=1e-6)
    logged = {name: float(value / number) for name, (value, number) in metrics.items()}
    assert logged.pop("loss/policy") == pytest.approx(surrogate / denominator, rel=1e-6)
    assert logged == {
        "policy/ratio": pytest.approx(ratios / 9),
        "policy/clip_fraction": pytest.approx(clipped / 9),
        "policy/approx_kl": pytest.approx(kl / 9),
    }


STRUCTURED = ("seq_nll", "risk", "max_margin", "multi_margin", "softmax_margin")
OF_THREE = torch.tensor(
    [[0.2, 0.9, 0.5], [0.4, 0.4, 0.4], [1.5, 0.1, 1.5]]
)  # of the second image all equal


def parts(rewards=OF_THREE):
    """The arguments of an objective for 3 images of 3 samples; log-probabilities have a gradient."""
    torch.manual_seed(0)
    lengths = torch.tensor([[4, 2, 1], [2, 2, 2], [3, 4, 2]])
    mask = torch.arange(4) < lengths.unsqueeze(-1)
    logprobs = (-torch.rand(3, 3, 4, dtype=torch.float64) * mask).requires_grad_()
    reference = -torch.rand(3, 3, 4, dtype=torch.float64) * mask
    return (
        logprobs,
        logprobs.detach(),
        reference,
        mask,
        Scores(rewards.double(), None),
        torch.zeros(3, 3),
    )


def gradient_of(objective, arguments):
    total, count, _ = objective(*arguments)
    return torch.autograd.grad(total / count, arguments[0])[0]


def test_dico_by_hand():
    """Log-ratios 1, 0 and -1; the worse of the two others, 0.3 ln 3 below the better one, weighs
    3/4.
    """
    rewards = torch.tensor([[2.0, 2.0 - 0.1, 2.0 - 0.1 - 0.3 * math.log(3)]])
    logprobs = torch.tensor([[[-1.0, -1.0], [-2.0, 0.0], [-3.0, 0.0]]])
    reference = torch.tensor([[[-2.0, -1.0], [-2.0, 0.0], [-2.0, 0.0]]])
    mask = torch.tensor([[[True, True], [True, False], [True, False]]])
    objective = build_objective("dico", {"beta": 0.5, "temperature": 0.3})
    total, count, metrics = objective(
        logprobs, logprobs, reference, mask, Scores(rewards, None), rewards
    )
    assert float(metrics["dico/margin"][0]) == pytest.approx(0.5 * (1 + 0.75), rel=1e-5)
    assert float(metrics["dico/accuracy"][0]) == 1
    assert float(total.detach()) == pytest.approx(
        math.log(1 + math.exp(-0.875)), rel=1e-5
    )
    assert int(count) == 1
    with pytest.raises(ValueError, match="starting policy"):
        objective(logprobs, logprobs, None, mask, Scores(rewards, None), rewards)
    metrics = objective(
        reference, reference, reference, mask, Scores(rewards, None), rewards
    )[2]
    assert [float(metrics[f"dico/{key}"][0]) for key in ("margin", "accuracy")] == [
        0,
        0,
    ], "at the start no image is right"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seq_nll", math.log(10 / 3)),  # probabilities 0.3, 0.2, 0.5
        ("risk", 0.2 * 0.1 + 0.5 * 1.0),
        ("max_margin", 1.0 + math.log(5 / 3)),  # the third has the highest score
        (
            "multi_margin",
            0.0 + (1.0 + math.log(5 / 3)),
        ),  # the second is 0.1 + ln(2 / 3) below 0
        ("softmax_margin", math.log(1 + 2 / 3 * math.exp(0.1) + 5 / 3 * math.e)),
    ],
)
def test_structured_losses_by_hand(name, expected):
    """Scores ln 0.3, ln 0.2, ln 0.5, spread over captions of other lengths; the first is the best."""
    probabilities, mask = (
        (0.3, 0.2, 0.5),
        torch.tensor([[[1, 1, 1], [1, 0, 0], [1, 1, 0]]], dtype=torch.bool),
    )
    logprobs = torch.tensor(probabilities).log().view(1, 3, 1) * mask
    logprobs[0, 0] += torch.tensor(
        [0.1, -0.3, 0.2]
    )  # only the mean over a caption counts
    scores = Scores(torch.tensor([[3.0, 2.9, 2.0]]), None)
    total, count, metrics = build_objective(name, {})(
        logprobs, logprobs, None, mask, scores, scores.samples
    )
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
    assert (
        [float(value) for value in metrics["loss/policy"]]
        == [float(total), int(count)]
        == [float(total), 1]
    )


def test_max_margin_is_that_of_the_likeliest_sample_not_of_the_worst():
    logprobs, mask = (
        torch.tensor([[[-2.0], [-1.0], [-3.0]]]),
        torch.ones(1, 3, 1, dtype=torch.bool),
    )
    scores = Scores(torch.tensor([[1.0, 0.75, 0.0]]), None)
    total, count, _ = build_objective("max_margin", {})(
        logprobs, logprobs, None, mask, scores, scores.samples
    )
    assert (float(total), int(count)) == (0.25 + 2.0 - 1.0, 1)


@pytest.mark.parametrize("name", ["dico", *STRUCTURED])
def test_a_constant_added_to_the_rewards_of_an_image_changes_nothing(name):
    objective = build_objective(name, {"temperature": 0.5} if name == "dico" else {})
    shifts = torch.tensor([[3.0], [-1.0], [0.5]])
    plain, shifted = (
        gradient_of(objective, parts(rewards=rewards))
        for rewards in (OF_THREE, OF_THREE + shifts)
    )
    assert torch.allclose(plain, shifted, atol=1e-5)
    assert plain.abs().sum() > 0


@pytest.mark.parametrize("name", ["dico", *STRUCTURED])
def test_images_whose_rewards_do_not_differ_are_left_out(name):
    arguments, objective = parts(), build_objective(name, {})
    assert int(objective(*arguments)[1]) == 2
    assert not gradient_of(objective, arguments)[1].any()
    arguments = parts(rewards=torch.ones(3, 3))
    total, count, _ = objective(*arguments)
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert not torch.autograd.grad(total, arguments[0])[0].any()


def test_candidates_of_beam_search_are_the_rollout_whatever_the_split():
    captioner, start = (
        tiny_captioner(),
        tiny_captioner(seed=9).policy.eval().requires_grad_(False),
    )
    beams = Decoding(num_beams=3, num_return_sequences=3, max_new_tokens=8)
    task = scst_task(captioner, objective=Dico(), decoding=beams, ref_policy=start)
    whole = gradient(captioner, task, batches_of(captioner, 4, 4))
    found = captioner.generate(
        captioner.policy, batches_of(captioner, 4, 4)[0].inputs, beams
    )
    assert [record["samples"] for record in task.samples] == [
        captioner.decode(ids) for ids in found
    ]
    assert norm(whole) > 0
    assert_equal_gradients(
        whole, gradient(captioner, task, batches_of(captioner, 4, 2))
    )


def test_an_image_with_fewer_captions_than_beams_is_named():
    captioner = tiny_captioner()
    width = captioner.policy.config.vocab_size + 1
    beams = Decoding(num_beams=width, num_return_sequences=width, max_new_tokens=1)
    batch = batches_of(captioner, 1, 1)[0]
    with pytest.raises(
        ValueError, match=f"image '{batch.image_ids[0]}': .* {width} captions"
    ):
        sample_captions(captioner, captioner.policy, batch, beams, seed=0, step=0)


@pytest.mark.parametrize(
    ("rollout", "train", "part"),
    [
        ({}, {}, "train.objective reinforce"),
        (
            {},
            {"objective": "dico", "advantage": "greedy"},
            "no greedy captions are decoded",
        ),
    ],
)
def test_what_beam_search_does_not_go_with_is_refused(rollout, train, part):
    with pytest.raises(ValueError, match=part):
        ScstConfig(
            rollout=RolloutConfig(beam_search=True, **rollout),
            train=ScstTrainConfig(**train),
        )


def test_whatever_changes_the_objective_or_the_samples_changes_the_signature(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    changes = [
        {},
        {"train.advantage": "greedy"},
        {
            "train.advantage": "tests.extensions:own",
            "train.advantage_kwargs": {"scale": 2.0},
        },
        {
            "train.advantage": "tests.extensions:own",
            "train.advantage_kwargs": {"scale": 3.0},
        },
        {"rollout.num_samples": 4},
        {"rollout.beam_search": True},
        {"rollout.temperature_schedule": [(0, 1.0), (9, 0.5)]},
        {"rollout.temperature_schedule": [(0, 1.0), (8, 0.5)]},
        {"train.objective": "dico"},
        {"train.objective": "dico", "train.objective_kwargs": {"beta": 0.5}},
        {"train.objective": "dico", "model.init": str(tmp_path / "b")},
        {"train.objective": "risk"},
        {"train.kl_coef": 0.1},
        {"train.kl_coef": 0.2},
        {"train.kl_coef": 0.1, "model.init": str(tmp_path / "b")},
        {"weight": 0.5},
        {"schedule": [(0, 1.0), (5, 0.0)]},
        {"schedule": [(0, 1.0), (5, 0.5)]},
    ]
    signatures = []
    for change in changes:
        config = ScstConfig(model=SavedModelConfig(init=str(tmp_path / "a")))
        config.reward.terms = {"words": RewardTerm(schedule=change.get("schedule"))}
        for key, value in change.items():
            section, _, name = key.partition(".")
            if name:
                setattr(getattr(config, section), name, value)
        objective = build_objective(
            config.train.objective,
            config.train.objective_kwargs,
            kl_coef=config.train.kl_coef,
        )
        reward = MixedReward({"words": (WordCount(), change.get("weight", 1.0))})
        signatures.append(scst_signature(reward, [], config, objective))
    assert len(set(signatures)) == len(changes), signatures


def signature_of(folder, **train):
    beams = train.pop("beam_search", False)
    model, rollout = (
        SavedModelConfig(init=str(folder)),
        RolloutConfig(beam_search=beams),
    )
    config = ScstConfig(model=model, rollout=rollout, train=ScstTrainConfig(**train))
    objective = build_objective(
        config.train.objective, {}, kl_coef=config.train.kl_coef
    )
    return scst_signature(
        MixedReward({"words": (WordCount(), 1.0)}), [], config, objective
    )


def test_the_signature_tells_beams_from_samples_and_names_the_start_that_an_objective_compares_with(
    tmp_path,
):
    """DiCO reads the starting policy with no KL penalty: other weights there are another run."""
    (tmp_path / "model.safetensors").write_bytes(b"start")
    assert signature_of(tmp_path, objective="risk").endswith("+average[nspi5]+risk")
    start = hashlib.sha256(b"start").hexdigest()[:8]
    assert signature_of(tmp_path, objective="dico", beam_search=True).endswith(
        f"[nspi5,beam]+dico+ref[{start}]"
    )
