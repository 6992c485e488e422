"""Weighted sums of rewards and of their z-scores; what a configuration makes of them, with one
network for all.
"""

import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from rewards.base import Reward, RewardError
from rewards.clip import backbone as backbone_module
from rewards.clip.l_clipscore import RefLClipScore
from rewards.mixed import MixedReward, Moments, moments, z_scores
from rewards.registry import build
from rewards.text.cider import CiderD
from rl_caption.config.build import build_reward
from rl_caption.config.schema import RewardConfig, RewardTerm
from rl_caption.runtime.types import CaptionBatch, Rollout
from rl_caption.scst.rollout import score_rollouts
from tests.clip_for_tests import noise_image, tiny_student


class Table:
    """Looks the score of a caption up."""

    __name__ = "table"
    columns = frozenset({"image_id"})
    bounds = (-10.0, math.inf)
    signature = "table"

    def __init__(self, scores: Mapping[str, float]) -> None:
        self.scores = dict(scores)

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return [self.scores[text] for text in completions]


FIRST = {"a": 1.0, "b": 2.0, "c": 6.0}
SECOND = {"a": 0.2, "b": 0.1, "c": 0.3}


REFERENCES = [["a dog runs"], ["two cats sleep"]]
TEXTS = ["a dog runs", "two cats"]


def test_a_mixture_is_the_weighted_sum_of_its_terms():
    mixed = MixedReward(
        {"rouge_l": (build("rouge_l"), 2.0), "repetition": (build("repetition"), -0.5)}
    )
    terms = mixed.terms(None, TEXTS, references=REFERENCES)
    assert list(terms) == ["rouge_l", "repetition"]
    assert terms["rouge_l"] == build("rouge_l")(None, TEXTS, references=REFERENCES)
    logged: dict[str, float] = {}
    total = mixed(None, TEXTS, references=REFERENCES, log_metric=logged.__setitem__)
    assert total == pytest.approx(
        [2 * a - 0.5 * b for a, b in zip(*terms.values(), strict=True)]
    )
    assert total == mixed.combine(terms)
    assert logged == {
        f"reward/{name}": pytest.approx(sum(own) / 2) for name, own in terms.items()
    }
    assert (mixed.bounds, mixed.columns) == ((0.0, 2.5), {"references"})
    assert mixed.signature == "2*[ROUGE-L[b1.2]+ptb]+-0.5*[repetition[n2]+ptb]"
    assert isinstance(pickle.loads(pickle.dumps(mixed)), Reward)


def test_columns_are_united_and_a_term_without_weight_adds_no_bound():
    mixed = MixedReward({"table": (Table(FIRST), 0), "cider": (CiderD(), 0.5)})
    assert (mixed.columns, mixed.bounds) == ({"references", "image_id"}, (0, 5))
    alone = MixedReward({"cider": (CiderD(), 1.0)})
    assert (alone.signature, alone.bounds) == (CiderD().signature, (0, 10))


def test_weights_are_numbers():
    for weight in (math.nan, "1", True):
        with pytest.raises(ValueError, match="'table'"):
            MixedReward({"table": (Table(FIRST), weight)})  # type: ignore[dict-item]


def test_moments_and_z_scores_by_hand():
    assert moments([1.0, 2.0, 6.0]) == Moments(3.0, math.sqrt(14 / 3))
    assert z_scores([1.0, 3.0, 6.0], Moments(3.0, 2.0)) == [-1.0, 0.0, 1.5]
    scores = [float(x) for x in np.random.default_rng(1).normal(1e6, 1e-3, 500)]
    assert moments(scores) == moments(scores[::-1]) == moments(sorted(scores)), (
        "not even in the last bit"
    )
    for same in (
        [0.1] * 7,
        [0.3],
        [1.0, 1.0 + 1e-7, 1.0],
        [],
    ):  # nothing can be told apart
        found = moments(same)
        assert found.std == 0
        assert z_scores(same, found) == [0.0] * len(same)


def test_a_mixture_of_z_scores():
    mixed = MixedReward(
        {"one": (Table(FIRST), 0.5), "two": (Table(SECOND), 2.0)}, normalize="per_term"
    )
    one, two = np.array([1.0, 2.0, 6.0]), np.array([0.2, 0.1, 0.3])
    expected = 0.5 * (one - one.mean()) / one.std() + 2 * (two - two.mean()) / two.std()
    assert mixed(None, ["a", "b", "c"]) == pytest.approx(expected.tolist())
    assert mixed.terms(None, ["a", "b"]) == {"one": [1.0, 2.0], "two": [0.2, 0.1]}, (
        "terms stay raw"
    )
    assert mixed(None, ["a"]) == [0.0], (
        "one caption alone cannot be told apart from others"
    )
    assert mixed(None, []) == []
    assert mixed.bounds == (-math.inf, math.inf)
    assert mixed.signature == "per_term(0.5*[table]+2*[table])"
    assert pickle.loads(pickle.dumps(mixed)).signature == mixed.signature


def test_moments_of_more_captions_may_be_given():
    mixed = MixedReward({"one": (Table(FIRST), 2.0)}, normalize="per_term")
    assert mixed.combine({"one": [1.0, 5.0]}, {"one": Moments(3.0, 4.0)}) == [-1.0, 1.0]
    assert MixedReward({"one": (Table(FIRST), 2.0)}).combine(
        {"one": [1.0]}, {"one": Moments(3.0, 4.0)}
    ) == [2.0]
    with pytest.raises(ValueError, match="normalize"):
        RewardConfig(terms={"repetition": RewardTerm()}, normalize="batch")  # type: ignore[arg-type]


# one optimizer step


def rollout_of(texts: list[list[str]], greedy: list[str] | None) -> Rollout:
    shape = (len(texts), len(texts[0]))
    return Rollout(
        token_ids=torch.zeros(*shape, 1, dtype=torch.long),
        mask=torch.ones(*shape, 1, dtype=torch.bool),
        finished=torch.ones(shape, dtype=torch.bool),
        texts=texts,
        greedy_texts=greedy,
        greedy_finished=None
        if greedy is None
        else torch.ones(len(greedy), dtype=torch.bool),
    )


def batch_of(images: int) -> CaptionBatch:
    rows = [
        {"image_id": str(i), "image": noise_image(i), "references": ["a"]}
        for i in range(images)
    ]
    return CaptionBatch(rows, {})  # type: ignore[arg-type]


def test_greedy_captions_are_normalised_by_the_moments_of_the_samples_of_all_micro_batches():
    reward = MixedReward({"one": (Table(FIRST), 1.0)}, normalize="per_term")
    rollouts = [rollout_of([["a", "b"]], ["c"]), rollout_of([["b", "b"]], ["a"])]
    first, second = score_rollouts(
        reward, rollouts, [batch_of(1)] * 2, Accelerator(cpu=True)
    )
    samples = np.array([1.0, 2.0, 2.0, 2.0])
    found: Any = [*first.samples[0], *second.samples[0], first.greedy, second.greedy]
    expected = (np.array([1, 2, 2, 2, 6, 1]) - samples.mean()) / samples.std()
    assert [float(value) for value in found] == pytest.approx(
        expected.tolist(), rel=1e-6
    )
    assert first.terms == {"one": [1.0, 2.0]}, "logged raw, without the greedy caption"


def test_per_group_standardises_every_term_within_the_samples_of_an_image():
    terms = {"one": (Table(FIRST), 0.5), "two": (Table(SECOND), 2.0)}
    reward = MixedReward(terms, normalize="per_group")
    rollouts = [
        rollout_of([["a", "b"], ["c", "a"]], ["c", "b"]),
        rollout_of([["b", "b"]], ["a"]),
    ]
    batches = [batch_of(2), batch_of(1)]
    first, second = score_rollouts(reward, rollouts, batches, Accelerator(cpu=True))
    # Of two different samples, one is a standard deviation above their mean and one below.
    assert first.samples.flatten().tolist() == pytest.approx(
        [-0.5 + 2, 0.5 - 2, 0.5 + 2, -0.5 - 2]
    )
    # By the samples a and b, c is 6 - 1.5 over 0.5 and 0.3 - 0.15 over 0.05; by c and a, b is -1.5
    # / 2.5 and -3.
    assert first.greedy is not None
    assert first.greedy.tolist() == pytest.approx(
        [0.5 * 9 + 2 * 3, -0.5 * 0.6 - 2 * 3], rel=1e-6
    )
    assert second.samples.tolist() == [[0.0, 0.0]], "nothing can be told apart"
    assert reward.signature == "per_group(0.5*[table]+2*[table])"
    (alone,) = score_rollouts(
        reward, [rollout_of([["c", "a"]], None)], [batch_of(1)], Accelerator(cpu=True)
    )
    assert torch.equal(alone.samples[0], first.samples[1]), "other images do not matter"


# CLIP-based terms


@pytest.fixture
def loads(monkeypatch):
    """Names of the networks that were loaded."""
    original, names = backbone_module._load, []

    def counted(options: Any, device: str) -> Any:
        names.append(options.backbone)
        return original(options, device)

    monkeypatch.setattr(backbone_module, "_load", counted)
    return names


def clip_terms(student: Path, **second: Any) -> RewardConfig:
    folder = str(student)
    return RewardConfig(
        terms={
            "l_clipscore": RewardTerm(weight=0.3, kwargs={"backbone": folder}),
            "repetition": RewardTerm(),
            "ref_l_clipscore": RewardTerm(
                weight=0.7, kwargs={"backbone": folder, **second}
            ),
        }
    )


def test_terms_with_the_same_backbone_load_it_once_and_embed_an_image_once(
    loads, tmp_path, monkeypatch
):
    student = tiny_student(tmp_path / "student")
    reward: Any = build_reward(
        clip_terms(student, prefix="A photo depicts ", precision="fp32"), []
    )
    assert loads == [str(student)]
    first, second = (
        reward.rewards[name] for name in ("l_clipscore", "ref_l_clipscore")
    )
    assert first.backbone is second.backbone
    encoder, encoded = first.backbone.encoder, []
    original = encoder.encode_images
    monkeypatch.setattr(
        encoder,
        "encode_images",
        lambda images: encoded.append(len(images)) or original(images),
    )
    columns = {
        "image": [noise_image(1), noise_image(2)],
        "references": [["a red dog"], ["two cats", "a cat"]],
    }
    terms = reward.terms(None, ["a dog", "cats"], **columns)
    assert encoded == [2]
    alone = RefLClipScore(student, prefix="A photo depicts ")
    assert alone(None, ["a dog", "cats"], **columns) == pytest.approx(
        terms["ref_l_clipscore"], abs=1e-6
    )
    monkeypatch.undo()
    copy = pickle.loads(pickle.dumps(reward))
    assert (
        copy.rewards["l_clipscore"].backbone is copy.rewards["ref_l_clipscore"].backbone
    )


def test_terms_that_ask_for_something_else_do_not_share(loads, tmp_path):
    student, elsewhere = (
        str(tiny_student(tmp_path / name)) for name in ("student", "other")
    )
    for other in (
        {"precision": "bf16"},
        {"truncate": False},
        {"cache_images": 5},
        {"backbone": elsewhere},
    ):
        loads.clear()
        build_reward(clip_terms(Path(student), **other), [])
        assert len(loads) == 2, other


def test_a_reweighted_mixture_is_the_same_but_for_its_weights():
    mixed = MixedReward({"x": (build("rouge_l"), 1.0)}, "per_group", "char")
    other = mixed.with_weights({"x": 0.25})
    assert (other.weights, other.rewards) == ({"x": 0.25}, mixed.rewards)
    for name in ("normalize", "tokenizer", "columns"):
        assert getattr(other, name) == getattr(mixed, name)


class Returning(Table):
    """Returns the same whatever the captions are, or calls it."""

    bounds = (0.0, 1.0)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> Any:
        return self.answer(completions) if callable(self.answer) else self.answer


WRONG_SCORES = {
    "a dict": {0.1: 1, 0.2: 2},
    "a text": "ab",
    "texts": ["0.1", "0.2"],
    "a set": {0.1, 0.2},
    "a number": 0.5,
    "nothing": None,
    "one score too many": [0.1, 0.2, 0.3],
    "a column of a tensor": torch.zeros(2, 1),
    "a scalar tensor": torch.tensor(0.5),
    "an array of texts": np.array(["0.1", "0.2"]),
    "a missing score": [0.1, None],
    "NaN": [0.1, math.nan],
    "a huge number": [0.1, 10**400],
    "above": [0.1, 1.1],
    "below": [0.1, -1e-4],
}


@pytest.mark.parametrize("answer", WRONG_SCORES.values(), ids=list(WRONG_SCORES))
def test_what_is_no_score_within_the_bounds_is_refused_with_the_term(
    answer,
):
    mixed = MixedReward({"mine": (Returning(answer), 1.0)})
    with pytest.raises(RewardError, match="'mine'"):
        mixed.terms(None, ["a", "b"])


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, lambda own: [torch.tensor(x) for x in own]],
)
def test_scores_are_a_list_a_tuple_an_array_or_a_tensor(make):
    mixed = MixedReward({"mine": (Returning(make([0.5, 1.0])), 1.0)})
    assert mixed(None, ["a", "b"]) == [0.5, 1.0]


def test_rounding_may_pass_the_bounds_and_row_value_and_bounds_are_named():
    assert MixedReward({"mine": (Returning([-1e-6, 1 + 1e-6]), 1.0)})(
        None, ["a", "b"]
    ) == [
        -1e-6,
        1 + 1e-6,
    ]
    with pytest.raises(RewardError, match=r"'mine'.*1\.5.*caption 1.*0 to 1"):
        MixedReward({"mine": (Returning([0.5, 1.5]), 1.0)}).terms(None, ["a", "b"])


@pytest.mark.parametrize("name", ["total", "greedy", "std"])
def test_a_term_with_the_name_of_another_log_key_is_refused(name):
    with pytest.raises(ValueError, match=name):
        MixedReward({name: (Table(FIRST), 1.0)})


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (lambda completions: open("/nowhere/file"), "open("),  # noqa: SIM115
        (lambda completions: sys.exit(0), "sys.exit"),
    ],
    ids=["OSError", "SystemExit"],
)
def test_what_a_reward_from_outside_raises_names_the_term_and_its_own_line(
    failure, line
):
    mixed = MixedReward({"mine": (Returning(failure), 1.0)})
    with pytest.raises(RewardError) as raised:
        mixed.terms(None, ["a", "b"])
    message = str(raised.value)
    assert message.startswith("reward term 'mine': ")
    assert __file__ in message
    assert line in message
