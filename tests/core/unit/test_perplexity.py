"""The fluency reward under a tiny GPT-2: log-probabilities, EOS, clamping, wrong arguments."""

import math
from statistics import fmean
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
    """ln p of each token, by one pass of the model for each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]
    if end:
        ids.append(tokenizer.eos_token_id)
    values = []
    for position in range(1, len(ids)):
        with torch.no_grad():
            output = model(torch.tensor([ids[:position]]))
        logits = output.logits[0, -1].double()
        values.append(float(logits.log_softmax(-1)[ids[position]]))
    return values


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_mean_log_probabilities(folder, batch_size):
    finished = [True, False, True, True]
    options = {"floor": -50.0, "batch_size": batch_size}
    reward = Perplexity(str(folder), **options)
    found = reward(None, TEXTS, finished=finished)
    for text, end, score in zip(TEXTS, finished, found, strict=True):
        expected = fmean(by_hand(folder, text, end))
        assert score == pytest.approx(expected, abs=1e-5)
    reward = Perplexity(str(folder), eos=False, **options)
    without = reward(None, TEXTS, finished=finished)
    expected = fmean(by_hand(folder, TEXTS[0], False))
    assert without[:2] == pytest.approx([expected, found[1]], abs=1e-5)
    assert without[2] == -50.0, "no token"


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


@pytest.mark.parametrize(
    ("model_type", "shape", "expected"),
    [
        ("xlm-roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("bert", {"max_position_embeddings": 514, "pad_token_id": 1}, 514),
        ("t5", {}, 600),
    ],
)
def test_positions_of_roberta_start_after_that_of_padding(model_type, shape, expected):
    config = SimpleNamespace(model_type=model_type, **shape)
    tokenizer = SimpleNamespace(model_max_length=600)
    assert most_tokens(config, tokenizer) == expected


def test_bad_arguments_and_scores_are_named(folder):
    for option, value in (
        ("floor", 0.0),
        ("floor", -math.inf),
        ("model", "."),
    ):
        with pytest.raises(ValueError, match=rf"{option}.*{value}"):
            Perplexity(**{"model": str(folder), option: value})
    broken = Perplexity(str(folder))
    with pytest.raises(RewardError, match="'finished' has 1 items"):
        broken(None, TEXTS, finished=[True])
    broken._frozen.network.transformer.wte.weight.data.fill_(math.nan)
    with pytest.raises(RewardError, match="nan"):
        broken(None, TEXTS)
