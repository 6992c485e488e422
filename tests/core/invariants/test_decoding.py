"""Decoding methods equal Transformers' own."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import (
    beam_search,
    constrain,
    logits_without_cache,
)
from rl_caption.captioners.tokens import caption_mask, forbid, sample_tokens
from rl_caption.scst.objectives import token_logprobs
from rl_caption.scst.rollout import sampling_noise
from rl_caption.training.validation import decode_candidates
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.hf_models_for_tests import tiny_hf_captioner
from tests.zoo.language_models import PROMPT

IDS = ["a", "b", "c"]
BAD_WORDS = {"a", "in", "is", "near", "on", "the"}
"""Of the tiny vocabulary."""


@torch.no_grad()
def ending_captioner(seed=0, ends=3.0):
    """A captioner whose captions end at different lengths, and its inputs."""
    captioner = tiny_captioner(seed=seed)
    captioner.policy.norm.bias.add_(
        ends * captioner.policy.lm_head.weight[captioner.eos_token_id]
    )
    return captioner, captioner.preprocess(tiny_rows(3))


def trimmed(token_ids, captioner):
    """Lists of token ids up to EOS."""
    mask = caption_mask(token_ids, captioner.eos_token_id)
    return [
        ids[own].tolist()
        for ids, own in zip(token_ids.flatten(0, -2), mask.flatten(0, -2), strict=True)
    ]


@torch.no_grad()
@pytest.mark.parametrize(
    ("seed", "beams", "count", "limit", "length_penalty", "ngram"),
    [
        (0, 4, 4, 8, 1.0, 0),
        (1, 5, 3, 12, 0.0, 0),
        (2, 4, 4, 12, 2.0, 2),
        (3, 3, 2, 12, 0.0, 1),
        (4, 5, 5, 12, -1.0, 3),
    ],
)
def test_the_best_beams_and_their_scores_are_those_of_transformers(
    seed, beams, count, limit, length_penalty, ngram
):
    captioner, inputs = ending_captioner(seed)
    options = {
        "num_beams": beams,
        "max_new_tokens": limit,
        "length_penalty": length_penalty,
    }
    options |= {"num_return_sequences": count, "no_repeat_ngram_size": ngram}
    found = captioner.generate_with_scores(
        captioner.policy, inputs, Decoding(**options)
    )
    # A policy that cannot say what no caption may contain.
    hook = captioner.policy.lm_head.register_forward_hook(
        lambda module, args, out: forbid(out, captioner.forbidden)
    )
    own = captioner.policy.generate(
        **inputs, return_dict_in_generate=True, output_scores=True, **options
    )
    hook.remove()
    assert trimmed(found.token_ids, captioner) == trimmed(
        own.sequences[:, 1:], captioner
    )
    assert torch.allclose(found.scores.flatten(), own.sequences_scores, atol=1e-5)
    best = captioner.generate(
        captioner.policy, inputs, Decoding(**options | {"num_return_sequences": 1})
    )
    assert trimmed(best, captioner) == trimmed(found.token_ids[:, :1], captioner)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 8, "top_p": 0.8, "temperature": 1.4, "no_repeat_ngram_size": 1},
    ],
)
def test_samples_and_greedy_captions_are_those_of_transformers_with_the_same_random_numbers(
    options, monkeypatch
):
    captioner, inputs = ending_captioner(ends=1.0)
    noise = sampling_noise(5, 0, IDS, 4, 10)
    found = captioner.generate(
        captioner.policy,
        inputs,
        Decoding(num_samples=4, with_greedy=True, max_new_tokens=10, **options),
        noise,
    )
    numbers = iter(noise.flatten(0, 1).T)

    def multinomial(probabilities, num_samples):
        return sample_tokens(probabilities.log(), next(numbers).unsqueeze(1), 1.0)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    shared = {
        "max_new_tokens": 10,
        "no_repeat_ngram_size": options.get("no_repeat_ngram_size", 0),
    }
    sampling = (
        {"temperature": 1.0, "top_k": 0, "do_sample": True, "num_return_sequences": 4}
        | shared
        | options
    )
    drawn = captioner.policy.generate(
        **inputs, **sampling
    )  # its settings suppress what no caption may contain
    assert trimmed(found[:, :4], captioner) == trimmed(drawn[:, 1:], captioner)
    greedy = captioner.policy.generate(**inputs, do_sample=False, **shared)
    assert trimmed(found[:, 4:], captioner) == trimmed(greedy[:, 1:], captioner)
    full = captioner.generate(
        captioner.policy,
        inputs,
        Decoding(num_samples=4, with_greedy=True, max_new_tokens=10),
        noise,
    )
    assert trimmed(full, captioner) != trimmed(found, captioner), (
        "the case must hold a token that is left out"
    )


GROUPS = json.loads(
    (Path(__file__).parents[1] / "golden" / "group_beam_search.json").read_text()
)


@pytest.mark.parametrize(
    "case",
    GROUPS["cases"],
    ids=lambda case: f"{case['num_beams']}-{case['num_beam_groups']}",
)
def test_diverse_beam_search_is_that_of_transformers_4(case):
    logits, first = torch.tensor(GROUPS["logits"]), torch.tensor([3, 5, 7, 9])
    table = SimpleNamespace(eos_token_id=1, pad_token_id=0, forbidden=(0,))
    captions, scores = case["captions"], torch.tensor(case["scores"])
    options = {
        key: value for key, value in case.items() if key not in ("captions", "scores")
    }
    decoding = Decoding(num_return_sequences=case["num_beams"], **options)

    def next_logits(prefixes):
        return logits[first if prefixes is None else prefixes.tokens]

    found = beam_search(table, next_logits, decoding)
    assert trimmed(found.token_ids, table) == [
        ids for of_image in captions for ids in of_image
    ]
    assert torch.allclose(found.scores, scores, atol=1e-5)
    other = beam_search(table, next_logits, decoding.replace(diversity_penalty=1e-9))
    assert not torch.allclose(other.scores, scores, atol=1e-5)


@torch.no_grad()
def test_groups_of_beams_are_the_same_without_a_cache():
    captioner, inputs = ending_captioner(1, ends=1.0)
    decoding = Decoding(
        num_beams=6,
        num_beam_groups=3,
        diversity_penalty=0.5,
        num_return_sequences=6,
        max_new_tokens=8,
    )
    found = captioner.generate_with_scores(captioner.policy, inputs, decoding)
    slow = beam_search(
        captioner,
        logits_without_cache(captioner, captioner.policy, inputs),
        decoding,
    )
    assert torch.equal(found.token_ids, slow.token_ids)
    assert torch.allclose(found.scores, slow.scores, atol=1e-5)


@torch.no_grad()
def test_scores_of_constrained_beams_are_the_models_log_probabilities(tmp_path):
    captioner = tiny_hf_captioner("git", tmp_path, PROMPT)
    inputs = captioner.preprocess(tiny_rows(3))
    decoding = Decoding(
        num_beams=4, num_return_sequences=4, max_new_tokens=6, no_repeat_ngram_size=1
    )
    decoding = decoding.replace(remove_bad_endings=True)
    ids, scores = captioner.generate_with_scores(captioner.policy, inputs, decoding)
    mask = caption_mask(ids, captioner.eos_token_id)
    logprobs = token_logprobs(
        captioner.token_logits(captioner.policy, inputs, ids), ids
    )
    assert torch.allclose(scores, (logprobs * mask).sum(-1) / mask.sum(-1), atol=1e-4)
    assert (scores.diff(dim=1) <= 0).all()
    assert all(len(set(tokens)) == len(tokens) for tokens in trimmed(ids, captioner))


# constraints


@torch.no_grad()
@pytest.mark.parametrize("num_beams", [1, 4])
def test_no_caption_that_ends_ends_badly(num_beams):
    captioner, inputs = ending_captioner(seed=3)
    assert set(captioner.words) >= BAD_WORDS
    samples = 0 if num_beams > 1 else 40
    decoding = Decoding(
        num_samples=samples,
        with_greedy=not samples,
        temperature=1.0,
        max_new_tokens=12,
        num_beams=num_beams,
        length_penalty=0.0,
        num_return_sequences=num_beams,
    )
    noise = sampling_noise(0, 0, IDS, samples, 12) if samples else None

    def endings(one):
        ids = captioner.generate(captioner.policy, inputs, one, noise).flatten(0, 1)
        ended = (ids == captioner.eos_token_id).any(-1)
        assert ended.any()
        return {text.split()[-1] for text in captioner.decode(ids[ended]) if text}

    assert endings(decoding) & BAD_WORDS
    assert not endings(decoding.replace(remove_bad_endings=True)) & BAD_WORDS


def test_words_are_looked_at_and_not_their_tokens():
    logits = torch.zeros(3, 5)
    texts = ["a dog on", "a cabin", "he is behind the"]
    captioner = SimpleNamespace(eos_token_id=2, decode=lambda ids: texts)
    decoding = Decoding(remove_bad_endings=True)
    first = constrain(captioner, decoding, torch.empty(3, 0).long(), logits)
    assert torch.equal(first, logits)
    found = constrain(captioner, decoding, torch.ones(3, 2), logits)
    assert found.isinf().nonzero().tolist() == [[0, 2], [2, 2]]


def test_a_repeated_trigram_costs_what_self_critical_pytorch_takes():
    """Its lines: alpha = 2.0; logprobs + mask * -0.693 * alpha, mask counting earlier occurrences."""
    tokens = torch.tensor(
        [
            [5, 6, 7, 5, 6, 7, 5, 6],
            [5, 6, 8, 5, 6, 7, 5, 6],
            [1, 2, 3, 4, 5, 6, 7, 8],
            [4] * 8,
        ]
    )
    decoding = Decoding(block_trigrams=2.0)
    found = constrain(None, decoding, tokens, torch.zeros(4, 9))
    expected = torch.zeros(4, 9)
    expected[0, 7] = -2 * 1.386
    expected[1, 7:] = -1.386
    expected[3, 4] = -6 * 1.386
    assert torch.allclose(found, expected)
    assert constrain(None, decoding, tokens[:, :2], expected) is expected


@torch.no_grad()
def test_trigrams_that_cost_much_are_not_repeated():
    captioner, inputs = ending_captioner(ends=-3.0)

    def repeated(decoding):
        ids = trimmed(captioner.generate(captioner.policy, inputs, decoding), captioner)
        return sum(
            len(one) - 2 - len({*zip(one, one[1:], one[2:], strict=False)})
            for one in ids
        )

    for plain in (
        Decoding(max_new_tokens=16),
        Decoding(max_new_tokens=16, num_beams=3),
    ):
        assert repeated(plain) > 0 == repeated(plain.replace(block_trigrams=100.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences is 2"),
        (
            {"num_beams": 5, "num_beam_groups": 2, "diversity_penalty": 1.0},
            "num_beam_groups is 2",
        ),
        ({"temperature": float("nan")}, "temperature"),
        ({"num_samples": 2, "num_beams": 2}, "num_samples is 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**options)


def test_a_decoding_says_all_that_captions_depend_on():
    beams = Decoding(num_beams=6, length_penalty=0.0, remove_bad_endings=True)
    assert beams.describe() == (
        "beam search, num_beams 6, length_penalty 0.0, remove_bad_endings True, "
        "max_new_tokens 24"
    )
    assert Decoding(batch_size=3).describe() == "greedy, max_new_tokens 24"


@pytest.mark.parametrize("batch_size", [1, 3, 10**6])
def test_a_batch_has_at_most_the_images_that_there_are(batch_size, monkeypatch):
    captioner, rows, sizes = tiny_captioner(), tiny_rows(3), []
    original = type(captioner).preprocess

    def preprocess(captioner, batch):
        sizes.append(len(batch))
        return original(captioner, batch)

    expected = decode_candidates(
        captioner, captioner.policy, rows, Decoding(max_new_tokens=8), Accelerator()
    )
    monkeypatch.setattr(type(captioner), "preprocess", preprocess)
    decoding = Decoding(max_new_tokens=8, batch_size=batch_size)
    assert (
        decode_candidates(captioner, captioner.policy, rows, decoding, Accelerator())
        == expected
    )
    assert sizes == ([1, 1, 1] if batch_size == 1 else [3])
