"""What must hold of one training step, whatever the weights: gradients, not only losses."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from rewards.mixed import MixedReward
from rl_caption.runtime.engines import Averages
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst import OBJECTIVES
from rl_caption.scst.advantages import leave_one_out
from rl_caption.scst.cross_entropy import CrossEntropyTask, xe_loss
from rl_caption.scst.objectives import PpoClip, Reinforce, build_objective
from rl_caption.scst.rollout import sample_captions
from tests.captioners_for_tests import tiny_captioner
from tests.steps_for_tests import (
    LENGTH,
    WordCount,
    assert_equal_gradients,
    batches_of,
    gradient,
    norm,
    scst_task,
)


@pytest.fixture
def captioner():
    return tiny_captioner()


@pytest.fixture
def batches(captioner):
    return batches_of(captioner, 4, 4)


class Letters:
    """Another such reward, on a scale of its own: letters of a caption times ``scale``,
    plus ``shift``.
    """

    __name__ = "letters"
    columns: frozenset[str] = frozenset()
    bounds = (-1e9, 1e9)
    signature = "letters"

    def __init__(self, scale=1.0, shift=0.0):
        self.scale, self.shift = scale, shift

    def __call__(self, prompts, completions, **columns):
        return [
            self.shift + self.scale * sum(map(str.isalpha, text))
            for text in completions
        ]


def normalised_task(
    captioner,
    letters,
    advantage,
    normalize="per_term",
):
    task = scst_task(captioner, advantage=advantage)
    terms = {"words": (WordCount(), 0.7), "letters": (letters, 0.3)}
    task.reward = MixedReward(terms, normalize=normalize)
    return task


def perturbed(captioner):
    """A frozen reference policy that differs from the captioner's."""
    other = tiny_captioner(seed=9)
    with torch.no_grad():
        for mine, start in zip(
            other.policy.parameters(), captioner.policy.parameters(), strict=True
        ):
            mine.mul_(0.1).add_(start)
    return other.policy.eval().requires_grad_(False)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize(
    "terms",
    [{}, {"kl_coef": 0.3}, {"xe_weight": 0.5}, {"kl_coef": 0.3, "xe_weight": 0.5}],
)
def test_two_micro_batches_of_four_are_one_of_eight(captioner, reduction, terms):
    if "kl_coef" in terms:
        terms = terms | {"ref_policy": perturbed(captioner)}
    task = scst_task(captioner, loss_reduction=reduction, **terms)
    whole = gradient(captioner, task, batches_of(captioner, 8, 8))
    loss = task.log.reduce(task.accelerator)["loss/total"]
    captions = [record["samples"] for record in task.samples]
    split = gradient(captioner, task, batches_of(captioner, 8, 4))
    assert [s["samples"] for s in task.samples] == captions
    assert task.log.reduce(task.accelerator)["loss/total"] == pytest.approx(
        loss, rel=1e-5
    )
    assert_equal_gradients(whole, split)


def trained(
    captioner,
    batches,
    steps,
    **options,
):
    """Weights after some steps of plain gradient descent from those of ``captioner``,
    which stays as it is.
    """
    captioner = copy.deepcopy(captioner)
    task = scst_task(captioner, **options)
    optimizer = torch.optim.SGD(captioner.policy.parameters(), lr=0.1)
    for step in range(steps):
        for log in task.training_step(batches, step):
            assert math.isfinite(log.reduce(task.accelerator)["loss/total"])
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in captioner.policy.parameters()]


def largest_difference(one, other):
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", sorted(set(OBJECTIVES) - {"reinforce"}))
def test_several_updates_on_a_rollout_do_not_depend_on_how_it_is_split(captioner, name):
    options: dict[str, Any] = {
        "objective": build_objective(name, {}),
        "updates_per_rollout": 3,
    }
    if name in ("ppo_clip", "dico"):
        options |= {"ref_policy": perturbed(captioner), "xe_weight": 0.1}
    start = [parameter.detach() for parameter in captioner.policy.parameters()]
    whole = trained(captioner, batches_of(captioner, 8, 8), 1, **options)
    split = trained(captioner, batches_of(captioner, 8, 2), 1, **options)
    assert largest_difference(whole, start) > 1e-3
    assert largest_difference(whole, split) < 1e-6


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_one_update_of_the_clipped_surrogate_is_reinforce_to_the_bit(
    captioner, batches, reduction
):
    shared = {"ref_policy": perturbed(captioner), "xe_weight": 0.3}
    plain = trained(
        captioner, batches, 3, objective=Reinforce(reduction, 0.2), **shared
    )
    clipped = trained(
        captioner, batches, 3, objective=PpoClip(reduction, 0.2, 0.1, 0.1), **shared
    )
    assert largest_difference(plain, clipped) == 0


def test_a_second_update_weighs_the_same_samples_by_their_ratio(captioner, batches):
    """By hand: samples and old log-probabilities of the first weights, then two
    gradients of the surrogate.
    """
    found = trained(
        captioner,
        batches,
        1,
        objective=PpoClip(clip_low=0.02, clip_high=0.03),
        updates_per_rollout=2,
    )
    decoding, (batch,) = scst_task(captioner).decoding, batches
    rollout = sample_captions(captioner, captioner.policy, batch, decoding, 0, 0)
    ids, mask = rollout.token_ids, rollout.mask
    weights = leave_one_out(
        torch.tensor([WordCount()(None, texts) for texts in rollout.texts])
    ).unsqueeze(-1)
    optimizer = torch.optim.SGD(captioner.policy.parameters(), lr=0.1)
    old, ratio = None, torch.ones(())
    for _ in range(2):
        logits = captioner.token_logits(captioner.policy, batch.inputs, ids)
        logprobs = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        old = logprobs.detach() if old is None else old
        ratio = (logprobs - old).exp()
        loss = -torch.minimum(ratio * weights, ratio.clamp(0.98, 1.03) * weights)
        optimizer.zero_grad()
        ((loss * mask).sum() / mask.sum()).backward()
        optimizer.step()
    moved = (ratio - 1).abs()[mask]
    assert moved.max() > 0.03, "some tokens are clipped"
    assert moved.min() < 0.02, "and some are not"
    assert largest_difference(found, list(captioner.policy.parameters())) < 1e-6


@pytest.mark.parametrize("advantage", ["greedy", "leave_one_out", "none"])
def test_z_scores_are_over_the_whole_step_however_it_is_split(captioner, advantage):
    task = normalised_task(captioner, Letters(), advantage)
    whole = gradient(captioner, task, batches_of(captioner, 8, 8))
    logged, records = task.log.reduce(task.accelerator), task.samples
    assert logged["reward/total"] == pytest.approx(0.0, abs=1e-6)
    split = gradient(captioner, task, batches_of(captioner, 8, 4))
    assert task.samples == records
    assert all(
        value == round(value, 4) for record in records for value in record["rewards"]
    )
    assert_equal_gradients(whole, split)
    for key in ("reward/words", "reward/letters"):
        assert task.log.reduce(task.accelerator)[key] == pytest.approx(
            logged[key], rel=1e-12
        )
        assert logged[key] > 0.1, "terms are logged raw"
    half = gradient(captioner, task, batches_of(captioner, 4, 4))
    assert [r["samples"] for r in task.samples] == [r["samples"] for r in records[:4]]
    assert [r["rewards"] for r in task.samples] != [
        r["rewards"] for r in records[:4]
    ], "each half has other moments"
    assert norm(half) > 0


@pytest.mark.parametrize("normalize", ["per_term", "per_group"])
def test_z_scores_see_neither_unit_nor_origin_of_a_term(captioner, batches, normalize):
    plain = gradient(
        captioner,
        normalised_task(captioner, Letters(), "leave_one_out", normalize),
        batches,
    )
    other = gradient(
        captioner,
        normalised_task(captioner, Letters(1e4, 77.0), "leave_one_out", normalize),
        batches,
    )
    assert_equal_gradients(plain, other)


@pytest.mark.parametrize("normalize", ["per_term", "per_group"])
def test_a_term_that_tells_nothing_apart_changes_no_gradient(
    captioner, batches, normalize
):
    constant = gradient(
        captioner,
        normalised_task(captioner, Letters(0.0, 0.1), "greedy", normalize),
        batches,
    )
    alone = scst_task(captioner, advantage="greedy")
    alone.reward = MixedReward({"words": (WordCount(), 0.7)}, normalize=normalize)
    assert_equal_gradients(constant, gradient(captioner, alone, batches), atol=0)


@pytest.mark.parametrize("advantage", ["greedy", "leave_one_out"])
def test_groups_do_not_depend_on_how_a_step_is_split(captioner, advantage):
    task = normalised_task(captioner, Letters(), advantage, "per_group")
    whole = gradient(captioner, task, batches_of(captioner, 8, 8))
    records = task.samples
    assert_equal_gradients(
        whole, gradient(captioner, task, batches_of(captioner, 8, 2))
    )
    assert task.samples == records


def test_a_scheduled_step_is_that_of_the_values_at_its_step(captioner, batches):
    """At step 3 of 0 to 4: weights 0.7 x 0.25 and 0.3, temperature 2 x 0.875."""
    scheduled = normalised_task(captioner, Letters(), "leave_one_out", "none")
    scheduled.decoding = scheduled.decoding.replace(temperature=2.0)
    scheduled.weight_schedules = {"words": [(0, 1.0), (4, 0.0)]}
    scheduled.temperature_schedule = [(2, 1.0), (4, 0.75)]
    scheduled.ref_policy = perturbed(captioner)
    scheduled.objective = Reinforce(kl_coef=0.4)
    plain = replace(scheduled, weight_schedules={}, temperature_schedule=())
    plain.reward = MixedReward(
        {"words": (WordCount(), 0.7 * 0.25), "letters": (Letters(), 0.3)}
    )
    plain.decoding = plain.decoding.replace(temperature=1.75)
    found = gradient(captioner, scheduled, batches, step=3)
    assert_equal_gradients(found, gradient(captioner, plain, batches, step=3), atol=0)
    logged = scheduled.log.reduce(scheduled.accelerator)
    expected = {"schedule/weight/words": 0.7 * 0.25, "schedule/temperature": 1.75}
    assert {key: logged[key] for key in expected} == expected


def test_cross_entropy_of_two_micro_batches_is_that_of_one(captioner):
    task = CrossEntropyTask(
        Accelerator(cpu=True), captioner, captioner.policy, label_smoothing=0.1
    )
    whole = gradient(captioner, task, batches_of(captioner, 8, 8))
    assert_equal_gradients(
        whole, gradient(captioner, task, batches_of(captioner, 8, 2))
    )


@pytest.mark.parametrize("word", [0, 1])
def test_a_reference_word_that_is_not_learned_is_read_all_the_same(captioner, word):
    (batch,) = batches_of(captioner, 4, 4)
    targets, learned = batch.targets, batch.target_mask
    assert targets is not None
    assert learned is not None
    learned = learned.clone()
    learned[:, :, word] = (
        False  # a word of each reference, as one outside the vocabulary would be
    )
    batch = CaptionBatch(batch.rows, batch.inputs, targets, learned)
    logprobs = captioner.token_logits(
        captioner.policy, batch.inputs, targets
    ).log_softmax(-1)
    expected = -logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[learned].sum()
    found = xe_loss(
        captioner, captioner.policy, batch, torch.tensor(1.0), 0.0, Averages()
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("advantage", ["greedy", "leave_one_out", "mean", "group_norm"])
def test_a_constant_added_to_all_rewards_changes_no_gradient(
    captioner, advantage, batches
):
    plain = gradient(captioner, scst_task(captioner, advantage=advantage), batches)
    shifted = gradient(
        captioner, scst_task(captioner, shift=5.0, advantage=advantage), batches
    )
    assert_equal_gradients(
        plain, shifted, atol=2e-5 if advantage == "group_norm" else 3e-6
    )


def test_without_a_baseline_the_constant_does_change_the_gradient(captioner, batches):
    plain = gradient(captioner, scst_task(captioner, advantage="none"), batches)
    shifted = gradient(
        captioner, scst_task(captioner, shift=5.0, advantage="none"), batches
    )
    assert norm({name: shifted[name] - plain[name] for name in plain}) > 0.1 * norm(
        plain
    )


def test_samples_equal_to_the_greedy_caption_give_no_gradient(captioner):
    task = scst_task(captioner, advantage="greedy", temperature=1e-3)
    assert norm(gradient(captioner, task, batches_of(captioner, 4, 4))) == 0.0
    for record in task.samples:
        assert set(record["samples"]) == {record["greedy"]}


def naive_loss(
    captioner,
    task,
    batch,
    step,
):
    """REINFORCE with a leave-one-out baseline, KL (k2) and cross-entropy, one caption
    and one token at a time.
    """
    rollout = sample_captions(
        captioner, captioner.policy, batch, task.decoding, task.seed, step
    )
    reward, samples = WordCount(), task.decoding.num_samples
    policy, kl, tokens, captions = torch.zeros(()), torch.zeros(()), 0, 0
    for image in range(len(batch.rows)):
        one = {key: value[image : image + 1] for key, value in batch.inputs.items()}
        rewards = reward(None, rollout.texts[image])
        for sample in range(samples):
            others = [rewards[other] for other in range(samples) if other != sample]
            advantage = rewards[sample] - sum(others) / len(others)
            ids = rollout.token_ids[image, sample].tolist()
            length = (
                ids.index(captioner.eos_token_id) + 1
                if captioner.eos_token_id in ids
                else len(ids)
            )
            captions += 1
            for position in range(length):
                prefix = torch.tensor([[captioner.bos_token_id, *ids[:position]]])
                logprobs = allowed_logprobs(
                    captioner, captioner.policy, one, prefix, task.decoding.temperature
                )
                policy = policy - advantage * logprobs[ids[position]]
                tokens += 1
                if task.ref_policy is not None:
                    with torch.no_grad():
                        reference = allowed_logprobs(
                            captioner,
                            task.ref_policy,
                            one,
                            prefix,
                            task.decoding.temperature,
                        )
                    kl = (
                        kl
                        + 0.5
                        * (logprobs[ids[position]] - reference[ids[position]]) ** 2
                    )
    assert isinstance(task.objective, Reinforce)
    loss = policy / (tokens if task.objective.loss_reduction == "token" else captions)
    loss = loss + task.objective.kl_coef * kl / tokens
    return loss + task.xe_weight * naive_cross_entropy(captioner, batch)


def allowed_logprobs(
    captioner,
    policy,
    inputs,
    prefix,
    temperature=1.0,
):
    logits = policy(**inputs, decoder_input_ids=prefix).logits[0, -1]
    allowed = torch.ones(len(logits), dtype=torch.bool)
    allowed[list(captioner.forbidden)] = False
    return (logits / temperature).masked_fill(~allowed, -torch.inf).log_softmax(-1)


def naive_cross_entropy(captioner, batch):
    total, tokens = torch.zeros(()), 0
    for image, row in enumerate(batch.rows):
        one = {key: value[image : image + 1] for key, value in batch.inputs.items()}
        for ids in captioner.encode(row["references"], LENGTH):
            for position, token in enumerate(ids):
                prefix = torch.tensor([[captioner.bos_token_id, *ids[:position]]])
                total = (
                    total
                    - allowed_logprobs(captioner, captioner.policy, one, prefix)[token]
                )
                tokens += 1
    return total / tokens


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize(("temperature", "alike"), [(1.3, False), (0.2, True)])
def test_loss_and_gradient_equal_the_slow_obvious_way(
    captioner, reduction, temperature, alike
):
    task = scst_task(
        captioner,
        num_samples=4,
        temperature=temperature,
        loss_reduction=reduction,
        ref_policy=perturbed(captioner),
        kl_coef=0.4,
        xe_weight=0.2,
        seed=11,
    )
    batches = batches_of(captioner, 3, 3)
    found = gradient(captioner, task, batches, step=5)
    captioner.policy.zero_grad()
    captioner.policy.eval()
    loss = naive_loss(captioner, task, batches[0], step=5)
    loss.backward()
    expected = {
        n: p.grad for n, p in captioner.policy.named_parameters() if p.grad is not None
    }
    assert (sum(len(set(record["samples"])) for record in task.samples) < 12) == alike
    assert task.log.reduce(task.accelerator)["loss/total"] == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert_equal_gradients(expected, found, atol=3e-6)
    assert norm(found) == pytest.approx(norm(expected), rel=1e-4)
    assert {name.split(".")[0] for name in found} >= {
        "encoder",
        "token_embedding",
        "layers",
        "norm",
    }


def test_what_a_step_logs_of_the_policy_is_worked_by_hand(captioner, batches):
    """KL(policy, start) by k3 and the entropy are means over the sampled tokens, at the
    sampling temperature.
    """
    start = perturbed(captioner)
    for parameter in start.parameters():
        parameter.mul_(1.3)
    task = scst_task(
        captioner,
        num_samples=3,
        temperature=1.5,
        ref_policy=start,
        kl_coef=0.2,
        xe_weight=0.5,
    )
    gradient(captioner, task, batches)
    logged, (batch,) = task.log.reduce(task.accelerator), batches
    captioner.policy.eval()
    rollout = sample_captions(captioner, captioner.policy, batch, task.decoding, 0, 0)
    ids, mask = rollout.token_ids, rollout.mask
    distributions = [
        (captioner.token_logits(policy, batch.inputs, ids) / 1.5).log_softmax(-1)
        for policy in (captioner.policy, start)
    ]
    policy, reference = (
        each.gather(-1, ids.unsqueeze(-1)).squeeze(-1)[mask] for each in distributions
    )
    kl = ((reference - policy).exp() - (reference - policy) - 1).mean()
    assert (
        abs(kl - ((policy - reference).exp() - (policy - reference) - 1).mean())
        > 0.1 * kl
    )
    entropy = (
        torch.distributions.Categorical(logits=distributions[0][mask]).entropy().mean()
    )
    rewards = torch.tensor([WordCount()(None, texts) for texts in rollout.texts])
    weights = leave_one_out(rewards).unsqueeze(-1).expand(mask.shape)[mask]
    loss = {
        "loss/policy": -(weights * policy).mean(),
        "loss/xe": naive_cross_entropy(captioner, batch),
    }
    penalty = 0.5 * (policy - reference).square().mean()
    total = loss["loss/policy"] + 0.2 * penalty + 0.5 * loss["loss/xe"]
    expected = {"policy/kl": kl, "policy/entropy": entropy, "loss/total": total} | loss
    assert {key: logged[key] for key in expected} == pytest.approx(
        {key: value.item() for key, value in expected.items()}, rel=1e-4
    )
    assert logged["completion/length"] == pytest.approx(
        mask.sum(-1).double().mean().item()
    )


def test_the_times_of_a_step_are_those_of_its_stages(captioner, batches, monkeypatch):
    """The clock shows 1 at the start, 2 after sampling, 4 after scoring, 8 after the
    first update, then 16 and 32.
    """
    clock = SimpleNamespace(
        perf_counter=iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]).__next__
    )
    monkeypatch.setattr("rl_caption.scst.step.time", clock)
    task = scst_task(captioner, updates_per_rollout=2)
    times = []
    for log in task.training_step(batches, 0):
        logged = log.reduce(task.accelerator)
        times.append({key: logged[key] for key in logged if key.startswith("time/")})
    assert times == [
        {"time/rollout": 1.0, "time/reward": 2.0, "time/update": 4.0},
        {"time/update": 16.0},
    ]


@pytest.mark.parametrize("dropout", [False, True])
def test_equal_beginnings_are_scored_once_unless_dropout_tells_them_apart(
    captioner, dropout
):
    task = scst_task(captioner, num_samples=4, temperature=0.5, dropout=dropout)
    scored = []
    hook = captioner.policy.lm_head.register_forward_hook(
        lambda module, arguments, output: (
            scored.append(len(output)) if torch.is_grad_enabled() else None
        )
    )
    gradient(captioner, task, batches_of(captioner, 3, 3))
    hook.remove()
    words = [
        [[*text.split(), "."] for text in record["samples"]] for record in task.samples
    ]
    tokens = sum(
        min(len(caption), LENGTH) for captions in words for caption in captions
    )
    different = sum(
        len(
            {
                tuple(caption[:t])
                for caption in captions
                for t in range(min(len(caption), LENGTH))
            }
        )
        for captions in words
    )
    assert different < 0.9 * tokens
    assert scored == [tokens if dropout else different]


def test_dropout_is_off_in_self_critical_training_unless_asked_for_and_on_in_cross_entropy():
    captioner = tiny_captioner(dropout=0.3)
    batches = batches_of(captioner, 4, 4)
    cross_entropy = CrossEntropyTask(Accelerator(cpu=True), captioner, captioner.policy)
    for task, noisy in (
        (scst_task(captioner), 0),
        (scst_task(captioner, dropout=True), 1),
        (cross_entropy, 1),
    ):
        one, other = (
            gradient(captioner, task, batches),
            gradient(captioner, task, batches),
        )
        difference = norm({name: one[name] - other[name] for name in one})
        assert difference > 1e-3 if noisy else difference == 0
        assert captioner.policy.training, "the model is put back into training mode"


@pytest.mark.parametrize("size", [4, 2])
def test_with_dropout_the_greedy_baseline_is_decoded_without_it(size):
    captioner = tiny_captioner(dropout=0.5)
    batches = batches_of(captioner, 4, size)
    plain, noisy = (
        scst_task(captioner, advantage="greedy", dropout=dropout)
        for dropout in (False, True)
    )
    for task in (plain, noisy):
        gradient(captioner, task, batches)
    assert [record["greedy"] for record in noisy.samples] == [
        record["greedy"] for record in plain.samples
    ]
    assert [record["samples"] for record in noisy.samples] != [
        record["samples"] for record in plain.samples
    ]
    assert captioner.policy.training


def test_kl_to_the_starting_policy_is_0_at_the_start_and_so_is_its_gradient(
    captioner, batches
):
    start = tiny_captioner().policy.requires_grad_(False)
    plain = gradient(captioner, scst_task(captioner), batches)
    task = scst_task(captioner, ref_policy=start, kl_coef=100.0)
    assert_equal_gradients(plain, gradient(captioner, task, batches), atol=1e-6)
    assert task.log.reduce(task.accelerator)["policy/kl"] == pytest.approx(
        0.0, abs=1e-9
    )
    assert all(p.grad is None for p in start.parameters())


def test_kl_to_the_starting_policy_is_0_in_bf16(captioner):
    """Computed in float32, the starting policy would differ from itself by what bf16 rounds."""
    start = copy.deepcopy(captioner.policy).eval()
    AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare_model(captioner.policy)
        task = replace(
            scst_task(captioner, ref_policy=start, kl_coef=0.1),
            accelerator=accelerator,
            model=model,
        )
        gradient(captioner, task, batches_of(captioner, 4, 4))
        assert task.log.reduce(accelerator)["policy/kl"] == 0
    finally:
        AcceleratorState._reset_state()


def test_the_same_step_twice_is_the_same_to_the_bit(captioner):
    one, other = (
        gradient(
            captioner,
            scst_task(captioner, advantage="greedy", xe_weight=0.5),
            batches_of(captioner, 4, 2),
        )
        for _ in range(2)
    )
    assert_equal_gradients(one, other, atol=0)


@pytest.mark.parametrize(
    ("micro_batches", "options", "expected"),
    [
        (1, {}, 1),
        (
            2,
            {},
            2 * 2,
        ),  # all are decoded before the first is scored: their states would have to be kept
        (1, {"dropout": True}, 2),
        (1, {"xe_weight": 0.5}, 1 + 1),
    ],
)
def test_an_image_is_encoded_once_where_its_states_can_be_kept(
    captioner, micro_batches, options, expected
):
    seen = []
    captioner.policy.encoder.register_forward_hook(lambda *_: seen.append(1))
    found = gradient(
        captioner,
        scst_task(captioner, **options),
        batches_of(captioner, 4, 4 // micro_batches),
    )
    assert len(seen) == expected
    assert any(
        name.startswith("encoder") and g.abs().max() > 0 for name, g in found.items()
    )
