"""The fluency reward under a tiny GPT-2: log-probabilities token by token, EOS, clamping, and what
is refused.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards.base import RewardError
from rewards.frozen_model import most_tokens
from rewards.registry import build
from rewards.text.perplexity import Perplexity
from tests.zoo.language_models import tiny_gpt2

TEXTS = ["a red circle on the left", "the blue square", "", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"))


def by_hand(folder, text, end):
    """Mean of ln p of each token, by one pass of the model for each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    ids += [tokenizer.eos_token_id] * end
    values = []
    for position in range(1, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:position]])).logits[0, -1].double()
        values.append(float(logits.log_softmax(-1)[ids[position]]))
    return sum(values) / len(values)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_mean_log_probabilities(folder, batch_size):
    finished = [True, False, True, True]
    options = {"floor": -50.0, "batch_size": batch_size}
    found = Perplexity(str(folder), **options)(None, TEXTS, finished=finished)
    expected = [by_hand(folder, *row) for row in zip(TEXTS, finished, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in found}) == 4
    reward = Perplexity(str(folder), eos=False, **options)
    without = reward(None, TEXTS, finished=finished)
    assert without[1] == pytest.approx(found[1], abs=1e-5)
    assert without[0] == pytest.approx(by_hand(folder, TEXTS[0], False), abs=1e-5)
    assert without[2] == -50.0, "no token"


def test_log_likelihoods_are_sums_over_tokens(folder):
    reward = Perplexity(str(folder), floor=-1.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, found in zip(TEXTS, reward.log_likelihoods(TEXTS), strict=True):
        count = len(tokenizer(text)["input_ids"]) + 1
        assert found == pytest.approx(count * by_hand(folder, text, True), abs=1e-4)
    without = Perplexity(str(folder), eos=False)
    assert without.log_likelihoods(["", "a"])[0] == 0.0
    assert reward.log_likelihoods([]) == []


def test_scores_are_clamped_and_long_captions_cut(folder):
    free = Perplexity(str(folder), floor=-50.0)
    scores = free(None, TEXTS)
    floor = sorted(scores)[1]
    reward = build("perplexity", model=str(folder), floor=floor)
    assert reward.bounds == (floor, 0.0)
    expected = [max(floor, score) for score in scores]
    assert reward(None, TEXTS) == pytest.approx(expected, abs=1e-5)
    long, longer = free(None, ["a " * 1024, "a " * 1100])
    assert long == pytest.approx(longer, abs=1e-6)
    half = Perplexity(str(folder), floor=-50.0, precision="bf16")
    assert half.signature != free.signature
    assert half(None, TEXTS) == pytest.approx(scores, abs=0.2)


def test_positions_of_roberta_start_after_that_of_padding():
    def limit(model_type, **shape):
        config = SimpleNamespace(model_type=model_type, **shape)
        return most_tokens(config, SimpleNamespace(model_max_length=600))

    shape = {"max_position_embeddings": 514, "pad_token_id": 1}
    assert limit("xlm-roberta", **shape) == 512
    assert limit("bert", **shape) == 514
    assert limit("t5") == 600


def test_bad_arguments_and_scores_are_named(folder):
    for option, value in (("floor", 0.0), ("floor", -math.inf), ("model", ".")):
        with pytest.raises(ValueError, match=rf"{option}.*{value}"):
            Perplexity(**{"model": str(folder), option: value})
    broken = Perplexity(str(folder))
    with pytest.raises(RewardError, match="'finished' has 1 items"):
        broken(None, TEXTS, finished=[True])
    broken._frozen.network.transformer.wte.weight.data.fill_(math.nan)
    with pytest.raises(RewardError, match="nan"):
        broken(None, TEXTS)
