"""DiCO and structured losses against loops over samples, and numbers worked out by hand."""

import math

import pytest
import torch

from rewards.mixed import MixedReward
from rl_caption.captioners.base import Decoding
from rl_caption.config.checks import check
from rl_caption.config.schema import RolloutConfig, ScstConfig, ScstTrainConfig
from rl_caption.errors import ConfigError
from rl_caption.programs.train import scst_signature
from rl_caption.scst.objectives import Dico, build_objective
from rl_caption.scst.rollout import sample_captions
from rl_caption.types import Scores
from tests.captioners_for_tests import tiny_captioner
from tests.steps_for_tests import WordCount, assert_equal_gradients, batches_of, gradient, norm, scst_task

STRUCTURED = ("seq_nll", "risk", "max_margin", "multi_margin", "softmax_margin")
REWARDS = torch.tensor([[0.2, 0.9, 0.5], [0.4, 0.4, 0.4], [1.5, 0.1, 1.5]])  # of the second image all equal


def parts(seed=0, rewards=REWARDS):
    """The arguments of an objective for 3 images of 3 samples; log-probabilities have a gradient."""
    torch.manual_seed(seed)
    lengths = torch.tensor([[4, 2, 1], [2, 2, 2], [3, 4, 2]])
    mask = torch.arange(4) < lengths.unsqueeze(-1)
    logprobs = (-torch.rand(3, 3, 4, dtype=torch.float64) * mask).requires_grad_()
    reference = -torch.rand(3, 3, 4, dtype=torch.float64) * mask
    return logprobs, logprobs.detach(), reference, mask, Scores(rewards.double(), None), torch.zeros(3, 3)


def dico_loss(logprobs, reference, mask, rewards, beta, temperature):
    """[K, L] of one image; the plain formula, one sample at a time."""
    log_ratios = [(logprobs[k] - reference[k])[mask[k]].sum() for k in range(len(rewards))]
    best = max(range(len(rewards)), key=lambda k: rewards[k])
    others = [k for k in range(len(rewards)) if k != best]
    powers = [math.exp((rewards[best] - rewards[k]) / temperature) for k in others]
    against = sum(power / sum(powers) * log_ratios[k] for power, k in zip(powers, others, strict=True))
    return -torch.log(torch.sigmoid(beta * (log_ratios[best] - against)))


def structured_loss(name, logprobs, mask, rewards):
    """[K, L] of one image, with costs that are negative rewards, which differ from the gaps by a constant."""
    samples = range(len(rewards))
    s = [logprobs[k][mask[k]].mean() for k in samples]
    cost = [-r for r in rewards]
    best = min(samples, key=lambda k: cost[k])
    total = sum(x.exp() for x in s)
    hinges = [torch.clamp(cost[k] - cost[best] - s[best] + s[k], min=0) for k in samples]
    return {
        "seq_nll": -torch.log(s[best].exp() / total),
        "risk": sum(c * x.exp() / total for c, x in zip(cost, s, strict=True)),
        "max_margin": hinges[max(samples, key=lambda k: float(s[k].detach()))],
        "multi_margin": sum(hinges),
        "softmax_margin": -torch.log(s[best].exp() / sum((x + c).exp() for x, c in zip(s, cost, strict=True))),
    }[name]


def gradient_of(objective, arguments):
    total, count, _ = objective(*arguments)
    return torch.autograd.grad(total / count, arguments[0])[0]


@pytest.mark.parametrize(("beta", "temperature"), [(0.2, 1 / 3), (2.0, 0.05)])
def test_dico_and_its_gradient_equal_a_loop(beta, temperature):
    arguments = logprobs, _, reference, mask, scores, _ = parts()
    losses = [
        dico_loss(logprobs[i], reference[i], mask[i], scores.samples[i].tolist(), beta, temperature) for i in (0, 2)
    ]
    total, count, metrics = Dico(beta, temperature)(*arguments)
    assert int(count) == 2, "images whose rewards are all equal are left out"
    assert float(total.detach()) == pytest.approx(float(sum(losses).detach()), rel=1e-9)
    (expected,) = torch.autograd.grad(sum(losses) / 2, logprobs)
    assert torch.allclose(gradient_of(Dico(beta, temperature), arguments), expected, atol=1e-12)
    margins = [-math.log(math.exp(float(loss.detach())) - 1) for loss in losses]  # the argument of the sigmoid
    assert float(metrics["dico/margin"][0]) == pytest.approx(sum(margins))
    assert float(metrics["dico/accuracy"][0]) == sum(margin > 0 for margin in margins)


def test_dico_by_hand():
    """Log-ratios 1, 0 and -1; the worse of the two others, 0.3 ln 3 below the better one, weighs 3/4."""
    rewards = torch.tensor([[2.0, 2.0 - 0.1, 2.0 - 0.1 - 0.3 * math.log(3)]])
    logprobs = torch.tensor([[[-1.0, -1.0], [-2.0, 0.0], [-3.0, 0.0]]])
    reference = torch.tensor([[[-2.0, -1.0], [-2.0, 0.0], [-2.0, 0.0]]])
    mask = torch.tensor([[[True, True], [True, False], [True, False]]])
    objective = build_objective("dico", {"beta": 0.5, "temperature": 0.3})
    total, count, metrics = objective(logprobs, logprobs, reference, mask, Scores(rewards, None), rewards)
    assert float(metrics["dico/margin"][0]) == pytest.approx(0.5 * (1 + 0.75), rel=1e-5)
    assert float(total.detach()) == pytest.approx(math.log(1 + math.exp(-0.875)), rel=1e-5)
    assert int(count) == 1


def test_at_the_starting_policy_dico_is_ln_2_and_pushes_the_best_sample_up():
    logprobs, old, _, mask, scores, advantages = parts()
    arguments = logprobs, old, old, mask, scores, advantages
    total, count, _ = Dico()(*arguments)
    assert float((total / count).detach()) == pytest.approx(math.log(2))
    pushed = gradient_of(Dico(), arguments)
    assert (pushed[0, 1][mask[0, 1]] < 0).all()
    assert (pushed[0, 0][mask[0, 0]] > 0).all()
    assert not pushed[1].any()
    with pytest.raises(ValueError, match="starting policy"):
        Dico()(logprobs, old, None, mask, scores, advantages)


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_structured_losses_and_their_gradients_equal_a_loop(name, seed):
    arguments = logprobs, _, _, mask, scores, _ = parts(seed)
    total, count, metrics = build_objective(name, {})(*arguments)
    assert int(count) == 2
    losses = [structured_loss(name, logprobs[i], mask[i], scores.samples[i].tolist()) for i in (0, 2)]
    constant = float(scores.samples[[0, 2]].amax(1).sum()) if name in ("risk", "softmax_margin") else 0.0
    assert float(total.detach()) == pytest.approx(float(sum(losses).detach()) + constant, rel=1e-9)
    (expected,) = torch.autograd.grad(sum(losses) / 2, logprobs)
    assert torch.allclose(gradient_of(build_objective(name, {}), arguments), expected, atol=1e-12)
    assert name == "max_margin" or expected.abs().sum() > 0
    assert [float(value) for value in metrics["loss/policy"]] == [float(total.detach()), 2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seq_nll", math.log(5)),  # probabilities 0.2, 0.3, 0.5
        ("risk", 0.3 * 0.1 + 0.5 * 1.0),
        ("max_margin", 1.0 + math.log(5 / 2)),  # the third has the highest score
        ("multi_margin", (0.1 + math.log(3 / 2)) + (1.0 + math.log(5 / 2))),
        ("softmax_margin", math.log(1 + 1.5 * math.exp(0.1) + 2.5 * math.e)),
    ],
)
def test_structured_losses_by_hand(name, expected):
    """Scores ln 0.2, ln 0.3, ln 0.5, spread over captions of other lengths; the first is the best."""
    probabilities, mask = (0.2, 0.3, 0.5), torch.tensor([[[1, 1, 1], [1, 0, 0], [1, 1, 0]]], dtype=torch.bool)
    logprobs = torch.tensor(probabilities).log().view(1, 3, 1) * mask
    logprobs[0, 0] += torch.tensor([0.1, -0.3, 0.2])  # only the mean over a caption counts
    scores = Scores(torch.tensor([[3.0, 2.9, 2.0]]), None)
    total, _, _ = build_objective(name, {})(logprobs, logprobs, None, mask, scores, scores.samples)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["dico", *STRUCTURED])
def test_a_constant_added_to_the_rewards_of_an_image_changes_nothing(name):
    objective = build_objective(name, {"temperature": 0.5} if name == "dico" else {})
    shifts = torch.tensor([[3.0], [-1.0], [0.5]])
    plain, shifted = (gradient_of(objective, parts(rewards=rewards)) for rewards in (REWARDS, REWARDS + shifts))
    assert torch.allclose(plain, shifted, atol=1e-5)
    assert plain.abs().sum() > 0


@pytest.mark.parametrize("name", ["dico", *STRUCTURED])
def test_where_no_rewards_differ_there_is_no_loss(name):
    arguments = parts(rewards=torch.ones(3, 3))
    total, count, _ = build_objective(name, {})(*arguments)
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert not torch.autograd.grad(total, arguments[0])[0].any()


def test_candidates_of_beam_search_are_the_rollout_whatever_the_split():
    captioner, start = tiny_captioner(), tiny_captioner(seed=9).policy.eval().requires_grad_(False)
    beams = Decoding(num_beams=3, num_return_sequences=3, max_new_tokens=8)
    task = scst_task(captioner, objective=Dico(), decoding=beams, ref_policy=start)
    whole = gradient(captioner, task, batches_of(captioner, 4, 4))
    found = captioner.generate(captioner.policy, batches_of(captioner, 4, 4)[0].inputs, beams)
    assert [record["samples"] for record in task.samples] == [captioner.decode(ids) for ids in found]
    assert norm(whole) > 0
    assert_equal_gradients(whole, gradient(captioner, task, batches_of(captioner, 4, 2)))


def test_an_image_with_fewer_captions_than_beams_is_named():
    captioner = tiny_captioner()
    width = captioner.policy.config.vocab_size + 1
    beams = Decoding(num_beams=width, num_return_sequences=width, max_new_tokens=1)
    batch = batches_of(captioner, 1, 1)[0]
    with pytest.raises(ValueError, match=f"image '{batch.image_ids[0]}': .* found fewer than {width} captions"):
        sample_captions(captioner, captioner.policy, batch, beams, seed=0, step=0)


@pytest.mark.parametrize(
    ("rollout", "train", "part"),
    [
        ({}, {}, "train.objective reinforce takes captions to be samples"),
        ({}, {"objective": "dico", "advantage": "greedy"}, "no greedy captions are decoded"),
        ({"temperature": 0.5}, {"objective": "dico"}, "rollout.temperature is 0.5: it is for samples"),
        ({"num_samples": 1}, {"objective": "dico"}, "rollout.num_samples is 1"),
    ],
)
def test_what_beam_search_does_not_go_with_is_refused(rollout, train, part):
    config = ScstConfig(rollout=RolloutConfig(beam_search=True, **rollout), train=ScstTrainConfig(**train))
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert part in str(refused.value)


def test_the_signature_of_a_run_tells_beams_from_samples():
    reward, signatures = MixedReward({"words": (WordCount(), 1.0)}), []
    for beams in (False, True):
        config = ScstConfig(rollout=RolloutConfig(beam_search=beams), train=ScstTrainConfig(objective="dico"))
        signatures.append(scst_signature(reward, [], config))
    assert "[nspi5]" in signatures[0]
    assert signatures[1] == signatures[0].replace("[nspi5]", "[nspi5,beam]")
