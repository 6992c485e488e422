"""Best of n, the search for exploits and mixtures: pure functions of scored captions."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from rl_caption.evaluation.confidence import Floats
from rl_caption.monitoring.best_of_n import (
    best_of_n,
    best_of_n_scores,
    best_of_n_weights,
    is_constant,
    kl_of_best_of_n,
    needed_kl_coef,
    sample_sizes,
)
from rl_caption.monitoring.exploits import search_exploits
from rl_caption.monitoring.mixing import best_mixtures

IMAGES = [str(number) for number in range(40)]


def draws(seed: int = 0) -> tuple[Floats, Floats]:
    """A reward [40, 16], and a gold score that follows it to a point and falls beyond."""
    rewards = np.random.default_rng(seed).normal(size=(40, 16))
    return rewards, -((rewards - 0.5) ** 2)


def test_weights_are_the_mean_over_all_choices_of_n() -> None:
    rewards = np.array([[0.3, 0.1, 0.3, 0.9, 0.2]])
    for n in range(1, 6):
        expected = np.zeros(5)
        subsets = list(combinations(range(5), n))
        for subset in subsets:
            best = [at for at in subset if rewards[0, at] == max(rewards[0, list(subset)])]
            expected[best] += 1 / len(best) / len(subsets)
        np.testing.assert_allclose(best_of_n_weights(rewards, n)[0], expected, atol=1e-12)
    with pytest.raises(ValueError, match="n is 6"):
        best_of_n_weights(rewards, 6)


def brute_force(rewards: Floats, scores: Floats, n: int) -> float:
    """Mean over images and all subsets of ``n`` samples of the score of the best by ``rewards``; ties are shared."""
    means = []
    for reward, score in zip(rewards, scores, strict=True):
        for subset in combinations(range(len(reward)), n):
            best = max(reward[list(subset)])
            means.append(np.mean([score[at] for at in subset if reward[at] == best]))
    return float(np.mean(means))


def test_curves_and_the_lost_share_are_those_of_all_subsets() -> None:
    generator = np.random.default_rng(7)
    rewards = generator.integers(3, size=(4, 6)).astype(np.float64)  # many ties
    gold, sizes = generator.normal(size=(4, 6)), [1, 2, 3, 4, 5, 6]
    curve = best_of_n(rewards, {"gold": gold}, sizes, IMAGES[:4], 50)["gold"]
    np.testing.assert_allclose(
        curve.mean, [brute_force(rewards, gold, n) for n in sizes], rtol=1e-12
    )
    possible = brute_force(gold, gold, 6)
    assert curve.lost == pytest.approx((possible - curve.mean[-1]) / (possible - gold.mean()))
    perfect = best_of_n(gold, {"gold": gold}, sizes, IMAGES[:4], 50)["gold"]
    assert perfect.lost == pytest.approx(0, abs=1e-12)
    worst = best_of_n(-gold, {"gold": gold}, sizes, IMAGES[:4], 50)["gold"]
    assert (worst.lost or 0) > 1
    assert best_of_n(rewards, {"gold": 0 * gold + 0.1}, sizes, IMAGES[:4], 50)["gold"].lost is None


def test_one_set_of_samples_estimates_the_best_of_n_without_bias() -> None:
    """The largest of n uniform numbers is n / (n + 1) on average."""
    rewards = np.random.default_rng(0).uniform(size=(20_000, 5))
    for n, mean in enumerate(best_of_n_scores(rewards, rewards, range(1, 6)).mean(0), start=1):
        assert mean == pytest.approx(n / (n + 1), abs=0.005)


def test_scores_that_are_no_numbers_are_named() -> None:
    rewards, gold = draws()
    gold[3, 5] = np.nan
    with pytest.raises(ValueError, match=r"^gold.*'3'.* 5\b"):
        best_of_n(rewards, {"gold": gold}, [1, 2], IMAGES)
    with pytest.raises(ValueError, match=r"^gold.*'3'.* 5\b"):
        best_mixtures(rewards, {}, gold, IMAGES)
    with pytest.raises(ValueError, match=r"^gold"):
        best_of_n(rewards, {"gold": gold[:, :4]}, [1, 2], IMAGES)
    with pytest.raises(ValueError, match=r"^rewards"):
        best_of_n(rewards[:7], {}, [1, 2], IMAGES)
    with pytest.raises(ValueError, match=r"^rewards"):
        best_of_n(np.zeros((len(IMAGES), 0)), {}, [1], IMAGES)
    with pytest.raises(ValueError, match=r"^gold.* 1\b.*'b'"):
        search_exploits(
            ["a", "b"],
            lambda _, texts: np.ones(len(texts)),
            lambda *_: np.array([1.0, np.inf]),
            ["red"],
        )
    with pytest.raises(ValueError, match=r"^reward\b"):
        search_exploits(["a"], lambda *_: np.ones(3), lambda *_: np.ones(1), ["red"])
    with pytest.raises(ValueError, match="vocabulary"):
        search_exploits(["a"], lambda *_: np.ones(1), lambda *_: np.ones(1), [])


def test_sizes_and_divergence() -> None:
    assert sample_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert sample_sizes(10) == [1, 2, 4, 8, 10]
    assert kl_of_best_of_n(1) == 0
    assert kl_of_best_of_n(64) == pytest.approx(3.174508, abs=1e-6)


def test_a_gold_score_that_turns() -> None:
    rewards, gold = draws()
    sizes = sample_sizes(16)
    curves = best_of_n(
        rewards, {"reward": rewards, "gold": gold, "same": rewards}, sizes, IMAGES, 200
    )
    assert curves["same"] == curves["reward"]
    assert curves["reward"].mean == sorted(curves["reward"].mean)
    assert curves["reward"].mean[0] == pytest.approx(rewards.mean())
    assert not curves["reward"].turns
    assert curves["reward"].fall == 0
    assert curves["gold"].turns
    assert curves["gold"].peak in (2, 4)
    assert curves["gold"].fall_interval[0] < curves["gold"].fall < curves["gold"].fall_interval[1]
    assert all(
        low <= mean <= high
        for low, mean, high in zip(
            *(getattr(curves["gold"], k) for k in ("low", "mean", "high")), strict=True
        )
    )
    penalty = needed_kl_coef(curves["reward"], curves["gold"], sizes)
    at, kl = sizes.index(curves["gold"].peak), [kl_of_best_of_n(n) for n in sizes]
    value = [
        reward - penalty * divergence
        for reward, divergence in zip(curves["reward"].mean, kl, strict=True)
    ]
    assert max(value[at:]) == pytest.approx(value[at])
    assert needed_kl_coef(curves["reward"], curves["reward"], sizes) == 0


def test_a_constant_reward_chooses_by_chance() -> None:
    _, gold = draws()
    chosen = best_of_n_scores(np.zeros_like(gold), gold, [1, 4, 16])
    np.testing.assert_allclose(chosen, np.repeat(gold.mean(1, keepdims=True), 3, axis=1))
    of_image = np.repeat(gold[:, :1], 16, axis=1)
    assert is_constant(of_image)
    assert not is_constant(gold)
    curve = best_of_n(of_image, {"gold": gold}, [1, 4, 16], IMAGES, 50)["gold"]
    assert curve.lost == pytest.approx(1)
    assert not curve.turns


def test_exploits_of_length_and_none_of_the_truth() -> None:
    def length(rows: Sequence[int], captions: Sequence[str]) -> Floats:
        return np.array([float(len(caption.split())) for caption in captions])

    def gold(rows: Sequence[int], captions: Sequence[str]) -> Floats:
        return np.array([float(caption == "a dog") - len(caption) / 1000 for caption in captions])

    captions = ["a dog", "a cat sits", ""]
    exploits = search_exploits(
        captions, length, gold, ["red", "blue"], rounds=5, max_words=12, seed=1
    )
    assert exploits == search_exploits(
        captions, length, gold, ["red", "blue"], rounds=5, max_words=12, seed=1
    )
    assert {exploit.row for exploit in exploits} == {0, 1, 2}
    assert exploits[0].row == 0, "the largest fall of gold comes first"
    for exploit in exploits:
        assert exploit.reward[1] > exploit.reward[0]
        assert exploit.gold[1] < exploit.gold[0]
        assert exploit.before == captions[exploit.row]
        assert exploit.edit in {"insert", "duplicate", "repeat"}, "what makes a caption longer"
        assert len(exploit.after.split()) == exploit.reward[1] <= 12
    assert search_exploits(captions, gold, gold, ["red"]) == []
    assert search_exploits([], length, gold, ["red"]) == []


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "stress.md").read_text(encoding="utf-8")
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    printed = capsys.readouterr().out
    assert "highest at n = 1" in printed
    assert "two cats -> two cats" in printed


def test_the_mixture_that_helps_comes_first() -> None:
    rewards, gold = draws()
    noise = np.random.default_rng(3).normal(size=rewards.shape)
    best, other = best_mixtures(rewards, {"noise": noise, "gold": 100 * gold}, gold, IMAGES, 200)
    assert (best.other, other.other) == ("gold", "noise")
    assert best.weight > 0.5
    assert best.gain_interval[0] > 0
    assert best.weight_interval[0] <= best.weight <= best.weight_interval[1]
    assert best.weight_interval[0] > 0, "without gold it is worse for certain"
    assert other.gain < best.gain
    with pytest.raises(ValueError, match="images"):
        best_mixtures(rewards[:3], {"noise": noise[:3]}, gold[:3], IMAGES[:3])
    assert len(best_mixtures(rewards[:4], {"noise": noise[:4]}, gold[:4], IMAGES[:4])) == 1
