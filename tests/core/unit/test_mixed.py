"""Weighted sums of rewards and of their z-scores; terms that share a network."""

import math
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from scipy.stats import zscore

from rewards.base import Reward, RewardError
from rewards.clip.l_clipscore import RefLClipScore
from rewards.mixed import MixedReward, Moments, moments, z_scores
from rewards.registry import build
from rewards.text.cider import CiderD
from rl_caption.config.build import build_reward
from rl_caption.config.schema import RewardConfig, RewardTerm
from rl_caption.runtime.types import CaptionBatch, Rollout
from rl_caption.scst.rollout import score_rollouts
from tests.clip_for_tests import Counted, noise_image, tiny_student


class Table:
    """Looks the score of a caption up."""

    __name__ = signature = "table"
    columns = frozenset({"image_id"})
    bounds = (-10.0, math.inf)

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, prompts, completions, **columns):
        return [self.scores[text] for text in completions]


FIRST = {"a": 1.0, "b": 2.0, "c": 6.0}
SECOND = {"a": 0.2, "b": 0.1, "c": 0.3}
TWO = {"one": (Table(FIRST), 0.5), "two": (Table(SECOND), 2.0)}


def test_a_mixture_is_the_weighted_sum_of_its_terms():
    parts = {"rouge_l": 2.0, "repetition": -0.5}
    terms = {}
    for name, weight in parts.items():
        terms[name] = (build(name), weight)
    mixed = MixedReward(terms)
    columns = {"references": [["a dog runs"], ["two cats sleep"]]}
    texts = ["a dog runs", "two cats"]
    terms = mixed.terms(None, texts, **columns)
    assert list(terms) == ["rouge_l", "repetition"]
    assert terms["rouge_l"] == build("rouge_l")(None, texts, **columns)
    logged = {}
    total = mixed(None, texts, **columns, log_metric=logged.__setitem__)
    rows = zip(*terms.values(), strict=True)
    assert total == pytest.approx([2 * a - 0.5 * b for a, b in rows])
    assert logged == {
        "reward/rouge_l": pytest.approx(sum(terms["rouge_l"]) / 2),
        "reward/repetition": pytest.approx(sum(terms["repetition"]) / 2),
    }
    assert mixed.bounds == (0.0, 2.5)
    assert mixed.columns == {"references"}
    assert mixed.signature == "2*[ROUGE-L[b1.2]+ptb]+-0.5*[repetition[n2]+ptb]"
    assert isinstance(pickle.loads(pickle.dumps(mixed)), Reward)
    alone = MixedReward({"one": (build("rouge_l"), 1.0)})
    assert alone.signature == "ROUGE-L[b1.2]+ptb"


def test_columns_are_united_and_a_term_without_weight_adds_no_bound():
    terms = {"table": (Table(FIRST), 0), "cider": (CiderD(), 0.5)}
    mixed = MixedReward(terms)
    assert mixed.columns == {"references", "image_id"}
    assert mixed.bounds == (0, 5)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("table", math.nan),
        ("total", 1.0),
    ],
)
def test_wrong_weights_and_names_of_other_log_keys_are_refused(name, weight):
    with pytest.raises(ValueError, match=f"'{name}'"):
        MixedReward({name: (Table(FIRST), weight)})


def test_moments_and_z_scores_by_hand():
    assert moments([1.0, 2.0, 6.0]) == Moments(3.0, math.sqrt(14 / 3))
    assert z_scores([1.0, 3.0, 6.0], Moments(3.0, 2.0)) == [-1.0, 0.0, 1.5]
    scores = np.random.default_rng(1).normal(1e6, 1e-3, 500).tolist()
    # the order does not matter, not even in the last bit
    assert moments(scores) == moments(scores[::-1])
    assert moments(scores) == moments(sorted(scores))
    # nothing can be told apart
    for same in (
        [0.1] * 7,
        [0.3],
        [1.0, 1.0 + 1e-7, 1.0],
        [],
    ):
        found = moments(same)
        assert found.std == 0
        assert z_scores(same, found) == [0.0] * len(same)


def test_a_mixture_of_z_scores():
    mixed = MixedReward(TWO, normalize="per_term")
    one = zscore([1.0, 2.0, 6.0])
    two = zscore([0.2, 0.1, 0.3])
    expected = 0.5 * one + 2 * two
    assert mixed(None, ["a", "b", "c"]) == pytest.approx(expected.tolist())
    assert mixed(None, ["a"]) == [0.0], "one alone cannot be told apart"
    assert mixed.bounds == (-math.inf, math.inf)
    assert mixed.signature == "per_term(0.5*[table]+2*[table])"
    alone = MixedReward({"one": (Table(FIRST), 2.0)}, normalize="per_term")
    given = {"one": Moments(3.0, 4.0)}
    assert alone.combine({"one": [1.0, 5.0]}, given) == [-1.0, 1.0]


# one optimizer step


def scores_of(reward, *texts, greedy=None):
    """Scores of micro-batches; ``greedy`` has the greedy captions of each."""
    rollouts = []
    batches = []
    for number, own in enumerate(texts):
        shape = (len(own), len(own[0]))
        rollout = Rollout(
            token_ids=torch.zeros(*shape, 1, dtype=torch.long),
            mask=torch.ones(*shape, 1, dtype=torch.bool),
            finished=torch.ones(shape, dtype=torch.bool),
            texts=own,
            greedy_texts=greedy and greedy[number],
            greedy_finished=torch.ones(len(own)).bool() if greedy else None,
        )
        rollouts.append(rollout)
        rows = [{"image_id": str(row)} for row in range(len(own))]
        batches.append(CaptionBatch(rows, {}))
    return score_rollouts(reward, rollouts, batches, Accelerator(cpu=True))


def test_greedy_captions_are_normalised_by_the_moments_of_the_samples_of_all_micro_batches():
    reward = MixedReward({"one": (Table(FIRST), 1.0)}, normalize="per_term")
    greedy = [["c"], ["a"]]
    first, second = scores_of(reward, [["a", "b"]], [["b", "b"]], greedy=greedy)
    samples = np.array([1.0, 2.0, 2.0, 2.0])
    found = [*first.samples[0], *second.samples[0], first.greedy, second.greedy]
    raw = np.array([1, 2, 2, 2, 6, 1])
    expected = (raw - samples.mean()) / samples.std()
    assert list(map(float, found)) == pytest.approx(expected.tolist(), rel=1e-6)
    assert first.terms == {"one": [1.0, 2.0]}, "logged raw, without the greedy caption"


def test_per_group_standardises_every_term_within_the_samples_of_an_image():
    reward = MixedReward(TWO, normalize="per_group")
    texts = [["a", "b"], ["c", "a"]]
    greedy = [["c", "b"], ["a"]]
    first, second = scores_of(reward, texts, [["b", "b"]], greedy=greedy)
    # Of two different samples, one is a standard deviation above their mean and one below.
    expected = [-0.5 + 2, 0.5 - 2, 0.5 + 2, -0.5 - 2]
    assert first.samples.flatten().tolist() == pytest.approx(expected)
    # By the samples a and b, c is 6 - 1.5 over 0.5 and 0.3 - 0.15 over 0.05; by c and a, b is -1.5
    # / 2.5 and -3.
    expected = [0.5 * 9 + 2 * 3, -0.5 * 0.6 - 2 * 3]
    assert first.greedy.tolist() == pytest.approx(expected, rel=1e-6)
    assert second.samples.tolist() == [[0.0, 0.0]], "nothing can be told apart"
    assert reward.signature == "per_group(0.5*[table]+2*[table])"
    (alone,) = scores_of(reward, texts[1:])
    # other images do not matter
    assert torch.equal(alone.samples[0], first.samples[1])


# CLIP-based terms


def clip_terms(student, **second):
    own = {"backbone": str(student)}
    first = RewardTerm(weight=0.3, kwargs=own)
    last = RewardTerm(weight=0.7, kwargs={**own, **second})
    terms = {"l_clipscore": first, "repetition": RewardTerm(), "ref_l_clipscore": last}
    return RewardConfig(terms=terms)


def backbones(reward):
    return [
        reward.rewards[name].backbone for name in ("l_clipscore", "ref_l_clipscore")
    ]


def test_terms_with_the_same_backbone_share_it_and_embed_an_image_once(
    tmp_path, monkeypatch
):
    student = tiny_student(tmp_path / "student")
    options = {"prefix": "A photo depicts ", "precision": "fp32"}
    reward = build_reward(clip_terms(student, **options), [])
    first, second = backbones(reward)
    assert first is second
    counted = Counted(first.encoder)
    monkeypatch.setattr(first, "encoder", counted)
    columns = {
        "image": [noise_image(1), noise_image(2)],
        "references": [["a red dog"], ["two cats", "a cat"]],
    }
    terms = reward.terms(None, ["a dog", "cats"], **columns)
    assert counted.images == 2
    alone = RefLClipScore(student, prefix="A photo depicts ")
    expected = alone(None, ["a dog", "cats"], **columns)
    assert terms["ref_l_clipscore"] == pytest.approx(expected, abs=1e-6)
    first, second = backbones(pickle.loads(pickle.dumps(reward)))
    assert first is second


@pytest.mark.parametrize("other", [{"cache_images": 5}, {"backbone": "other"}])
def test_terms_that_ask_for_something_else_do_not_share(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    for name in ("student", "other"):
        tiny_student(tmp_path / name)
    first, second = backbones(build_reward(clip_terms("student", **other), []))
    assert first is not second


def test_a_reweighted_mixture_is_the_same_but_for_its_weights():
    terms = {"x": (build("rouge_l"), 1.0)}
    mixed = MixedReward(terms, "per_group", "char")
    other = mixed.with_weights({"x": 0.25})
    assert other.weights == {"x": 0.25}
    assert other.rewards == mixed.rewards
    for name in ("normalize", "tokenizer", "columns"):
        assert getattr(other, name) == getattr(mixed, name)


class Returning(Table):
    """Returns the same whatever the captions are, or calls it."""

    bounds = (0.0, 1.0)

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, prompts, completions, **columns):
        return self.answer(completions) if callable(self.answer) else self.answer


def answered(answer):
    mixed = MixedReward({"mine": (Returning(answer), 1.0)})
    return mixed.terms(None, ["a", "b"])["mine"]


WRONG_SCORES = {
    "a number": 0.5,
    "one score too many": [0.1, 0.2, 0.3],
    "a column of a tensor": torch.zeros(2, 1),
    "a missing score": [0.1, None],
    "NaN": [0.1, math.nan],
    "above": [0.1, 1.1],
    "below": [0.1, -1e-4],
}


@pytest.mark.parametrize("answer", WRONG_SCORES.values(), ids=list(WRONG_SCORES))
def test_what_is_no_score_within_the_bounds_is_refused_with_the_term(answer):
    with pytest.raises(RewardError, match="'mine'"):
        answered(answer)


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_scores_are_a_sequence_or_a_tensor_and_rounding_may_pass_the_bounds(make):
    low, high = answered(make([-1e-6, 1 + 1e-6]))
    assert low == pytest.approx(-1e-6)
    assert high == pytest.approx(1 + 1e-6)


def test_what_a_reward_from_outside_raises_names_the_term_and_its_own_line():
    with pytest.raises(RewardError, match=rf"'mine': .*{re.escape(__file__)}, line"):
        answered(lambda completions: sys.exit(0))
