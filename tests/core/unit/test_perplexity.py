"""The fluency reward under a tiny GPT-2: log-probabilities token by token, EOS, clamping, and what
is refused.
"""

import math
import pickle
from pathlib import Path
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


def by_hand(folder: Path, text: str, end: bool) -> float:
    """Mean of ln p of each token, by one pass of the model for each."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder).eval(),
    )
    ids = [
        tokenizer.bos_token_id,
        *tokenizer(text)["input_ids"],
        *([tokenizer.eos_token_id] if end else []),
    ]
    values = []
    for position in range(1, len(ids)):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:position]])).logits[0, -1].double()
        values.append(float(logits.log_softmax(-1)[ids[position]]))
    return sum(values) / len(values)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_mean_log_probabilities(folder, batch_size):
    reward = Perplexity(str(folder), floor=-50.0, batch_size=batch_size)
    finished = [True, False, True, True]
    found = reward(None, TEXTS, finished=finished)
    assert found == pytest.approx(
        [by_hand(folder, *row) for row in zip(TEXTS, finished, strict=True)], abs=1e-5
    )
    without = Perplexity(str(folder), floor=-50.0, eos=False)(
        None, TEXTS, finished=finished
    )
    assert without[1] == pytest.approx(found[1], abs=1e-5)
    assert without[0] == pytest.approx(by_hand(folder, TEXTS[0], False), abs=1e-5)
    assert without[2] == -50.0, "no token"
    assert len({round(score, 4) for score in found}) == 4


def test_log_likelihoods_are_sums_over_tokens(folder):
    reward = Perplexity(str(folder), floor=-1.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    counts = [len(tokenizer(text)["input_ids"]) + 1 for text in TEXTS]
    expected = [
        count * by_hand(folder, text, True)
        for count, text in zip(counts, TEXTS, strict=True)
    ]
    assert reward.log_likelihoods(TEXTS) == pytest.approx(expected, abs=1e-4)
    without = Perplexity(str(folder), eos=False)
    assert without.log_likelihoods(["", "a"])[0] == 0.0
    assert reward.log_likelihoods([]) == []


def test_scores_are_clamped_and_long_captions_cut(folder):
    free = Perplexity(str(folder), floor=-50.0)
    floor = sorted(free(None, TEXTS))[1]
    reward = build("perplexity", model=str(folder), floor=floor)
    assert reward.bounds == (floor, 0.0)
    assert reward(None, TEXTS) == pytest.approx(
        [max(floor, score) for score in free(None, TEXTS)], abs=1e-5
    )
    assert reward(None, []) == []
    longest = AutoModelForCausalLM.from_pretrained(
        folder
    ).config.max_position_embeddings
    long, longer = free(None, ["a " * longest, "a " * (longest + 40)])
    assert long == pytest.approx(longer, abs=1e-6)


def test_positions_of_roberta_start_after_that_of_padding():
    tokenizer = SimpleNamespace(model_max_length=600)
    shape = {"max_position_embeddings": 514, "pad_token_id": 1}
    assert (
        most_tokens(SimpleNamespace(model_type="xlm-roberta", **shape), tokenizer)
        == 512
    )
    assert most_tokens(SimpleNamespace(model_type="bert", **shape), tokenizer) == 514
    assert most_tokens(SimpleNamespace(model_type="t5"), tokenizer) == 600


def test_signature_precision_and_pickling(folder):
    reward, half = Perplexity(str(folder)), Perplexity(str(folder), precision="bf16")
    assert reward.signature != half.signature
    assert half(None, TEXTS) == pytest.approx(reward(None, TEXTS), abs=0.2)
    assert pickle.loads(pickle.dumps(reward))(None, TEXTS) == reward(None, TEXTS)


def test_bad_arguments_and_scores_are_named(folder):
    for option, value in (
        ("floor", 0.0),
        ("floor", -math.inf),
        ("batch_size", 0),
        ("precision", "int8"),
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
