"""Which tokens can be drawn, and from which distribution."""

import math

import pytest
import torch

from rewards.mixed import MixedReward
from rl_caption.captioners.tokens import forbid, sample_tokens
from rl_caption.runtime.options import MAX_TEMPERATURE, MIN_TEMPERATURE
from rl_caption.runtime.types import CaptionBatch, Rollout
from rl_caption.scst.objectives import token_logprobs_and_entropy
from rl_caption.scst.rollout import term_scores

FORBIDDEN = (0, 1, 4)


def noise_to_its_ends(rows):
    """[rows, 40] numbers in [0, 1), the smallest and the largest float32 among them."""
    noise = torch.rand(rows, 40, generator=torch.Generator().manual_seed(0))
    noise[:, 0], noise[:, 1] = 0.0, 1 - 2**-24
    return noise


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1.0, 90.0, MAX_TEMPERATURE])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
def test_forbidden_tokens_are_never_drawn_and_have_no_probability(temperature, scale):
    torch.manual_seed(0)
    own = scale * torch.randn(30, 9)
    before = own.clone()
    logits = forbid(own, FORBIDDEN)
    assert torch.equal(own, before), "the model's logits stay as they are"
    drawn = sample_tokens(logits, noise_to_its_ends(30), temperature)
    allowed = [2, 3, 5, 6, 7, 8]
    assert torch.isin(drawn, torch.tensor(allowed)).all()
    logprobs, entropy = token_logprobs_and_entropy(logits, drawn[:, 5], temperature)
    scaled = logits[:, allowed].double() / temperature
    expected = torch.distributions.Categorical(logits=scaled).entropy()
    assert torch.allclose(entropy.double(), expected, atol=1e-5)
    assert logprobs.isfinite().all()


def test_sums_that_round_differently_draw_no_forbidden_token(monkeypatch):
    """A sum in parallel may end higher at a token of probability 0 than at the one before it."""
    exact = torch.Tensor.cumsum

    def rounded(values, dim):
        found = exact(values, dim)
        found[:, 4] += 0.01
        return found

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded)
    logits = forbid(torch.zeros(1, 9), FORBIDDEN)
    noise = torch.linspace(0, 1 - 2**-24, 2000).unsqueeze(0)
    counts = torch.bincount(sample_tokens(logits, noise, 1.0)[0], minlength=9)
    assert not counts[list(FORBIDDEN)].any()
    assert (counts[[2, 3, 5, 6, 7, 8]] > 300).all()


def test_a_sum_that_does_not_end_at_1_changes_no_draw(monkeypatch):
    torch.manual_seed(0)
    logits, noise = torch.randn(4, 9), torch.rand(4, 500)
    drawn, exact = sample_tokens(logits, noise, 1.0), torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *given: 0.875 * exact(*given))
    assert torch.equal(sample_tokens(logits, noise, 1.0), drawn)


def test_noise_of_0_draws_the_first_token_that_has_a_probability():
    logits = torch.tensor([[-1e9, 0.0, 3.0], [0.0, 0.0, 0.0]])
    assert sample_tokens(logits, torch.zeros(2, 1), 1.0).tolist() == [[1], [0]]


def test_a_policy_of_nan_draws_some_token_so_that_the_loss_can_say_so():
    drawn = sample_tokens(torch.full((2, 9), math.nan), noise_to_its_ends(2), 1.0)
    assert ((drawn >= 0) & (drawn < 9)).all()


class OwnImage:
    """1 for a caption that names its own image, reference and whether it ended."""

    __name__ = signature = "own"
    columns = frozenset({"references", "image_id", "finished"})
    bounds = (0.0, 1.0)

    def __call__(self, prompts, completions, references, image_id, finished, **columns):
        scores = []
        for row in zip(completions, references, image_id, finished, strict=True):
            text, captions, name, ended = row
            scores.append(float(text == f"{name} {captions[0]} {ended}"))
        return scores


@pytest.mark.parametrize("with_greedy", [False, True])
def test_samples_and_greedy_captions_are_scored_with_the_row_of_their_own_image(
    with_greedy,
):
    rows = [
        {"image_id": f"image{i}", "references": [f"reference{i}"], "image": None}
        for i in range(2)
    ]
    finished = [[True, False, True], [False, False, True]]
    texts = [
        [f"image{i} reference{i} {ended}" for ended in finished[i]] for i in range(2)
    ]
    greedy = {}
    if with_greedy:
        greedy["greedy_texts"] = ["image0 reference0 False", "image1 reference1 True"]
        greedy["greedy_finished"] = torch.tensor([False, True])
    rollout = Rollout(
        torch.zeros(2, 3, 4, dtype=torch.long),
        torch.ones(2, 3, 4, dtype=torch.bool),
        torch.tensor(finished),
        texts,
        **greedy,
    )
    reward = MixedReward({"own": (OwnImage(), 1.0)})
    found = term_scores(reward, rollout, CaptionBatch(rows, {}))
    assert found == {"own": [1.0] * (8 if with_greedy else 6)}
