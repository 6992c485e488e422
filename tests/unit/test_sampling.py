"""Which tokens can be drawn, and from which distribution."""

import math

import pytest
import torch
from torch import Tensor

from rl_caption.captioners.base import TEMPERATURES, Decoding, forbid, sample_tokens
from rl_caption.scst.objectives import token_logprobs_and_entropy

FORBIDDEN = (0, 1, 4)


def noise_to_its_ends(rows: int) -> Tensor:
    """[rows, 40] numbers in [0, 1), the smallest and the largest float32 among them."""
    noise = torch.rand(rows, 40, generator=torch.Generator().manual_seed(0))
    noise[:, 0], noise[:, 1] = 0.0, 1 - 2**-24
    return noise


@pytest.mark.parametrize("temperature", [TEMPERATURES.min, TEMPERATURES.max, 1e-3, 1.0, 90.0, 1e3])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
def test_forbidden_tokens_are_never_drawn_and_have_no_probability(temperature, scale):
    torch.manual_seed(0)
    logits = forbid(scale * torch.randn(30, 9), FORBIDDEN)
    drawn = sample_tokens(logits, noise_to_its_ends(30), temperature)
    assert ((drawn >= 0) & (drawn < 9)).all()
    assert not torch.isin(drawn, torch.tensor(FORBIDDEN)).any()
    logprobs, entropy = token_logprobs_and_entropy(logits, drawn[:, 5], temperature)
    allowed = [token for token in range(9) if token not in FORBIDDEN]
    expected = torch.distributions.Categorical(logits=logits[:, allowed].double() / temperature)
    assert torch.allclose(entropy.double(), expected.entropy(), atol=1e-5)
    assert logprobs.isfinite().all()


def test_sums_that_round_differently_draw_no_forbidden_token(monkeypatch):
    """A sum in parallel may end higher at a token of probability 0 than at the one before it."""
    exact = torch.Tensor.cumsum

    def rounded(values: Tensor, dim: int) -> Tensor:
        found = exact(values, dim)
        found[:, 4] += 0.01
        return found

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded)
    logits = forbid(torch.zeros(1, 9), FORBIDDEN)
    noise = torch.linspace(0, 1 - 2**-24, 2000).unsqueeze(0)
    counts = torch.bincount(sample_tokens(logits, noise, 1.0)[0], minlength=9)
    assert not counts[list(FORBIDDEN)].any()
    assert (counts[[2, 3, 5, 6, 7, 8]] > 300).all()


def test_a_policy_of_nan_draws_some_token_so_that_the_loss_can_say_so():
    drawn = sample_tokens(torch.full((2, 9), math.nan), noise_to_its_ends(2), 1.0)
    assert ((drawn >= 0) & (drawn < 9)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": math.inf}, "temperature is inf: expected at most 1000000"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"num_samples": -1}, "num_samples is -1 and num_beams 1: expected at least 0 and 1"),
        ({"num_beams": 0}, "num_samples is 0 and num_beams 0"),
    ],
)
def test_decoding_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**options)
