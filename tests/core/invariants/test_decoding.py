"""Decoding methods equal Transformers' own."""

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import (
    beam_search,
    constrain,
    logits_without_cache,
)
from rl_caption.captioners.tokens import caption_mask, forbid, sample_tokens
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import (
    captions_of,
    near,
    tiny_captioner,
    tiny_rows,
    token_ids,
)

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
        "num_return_sequences": count,
        "no_repeat_ngram_size": ngram,
    }
    policy = captioner.policy
    found = captioner.generate_with_scores(policy, inputs, Decoding(**options))
    # A policy that cannot say what no caption may contain.
    hook = policy.lm_head.register_forward_hook(
        lambda module, args, out: forbid(out, captioner.forbidden)
    )
    scores = {"return_dict_in_generate": True, "output_scores": True}
    own = policy.generate(**inputs, **scores, **options)
    hook.remove()
    ids = trimmed(found.token_ids, captioner)
    assert ids == trimmed(own.sequences[:, 1:], captioner)
    assert near(found.scores.flatten(), own.sequences_scores, 1e-5)
    best = captions_of(
        captioner, inputs, Decoding(**options | {"num_return_sequences": 1})
    )
    assert trimmed(best, captioner) == ids[::count]


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
    decoding = Decoding(num_samples=4, with_greedy=True, max_new_tokens=10)
    some = decoding.replace(**options)
    found = captions_of(captioner, inputs, some, noise)
    numbers = iter(noise.flatten(0, 1).T)

    def multinomial(probabilities, num_samples):
        return sample_tokens(
            probabilities.log(),
            next(numbers).unsqueeze(1),
            1.0,
        )

    monkeypatch.setattr(torch, "multinomial", multinomial)
    ngram = some.no_repeat_ngram_size
    shared = {"max_new_tokens": 10, "no_repeat_ngram_size": ngram}
    sampling = {"temperature": 1.0, "top_k": 0, "num_return_sequences": 4}
    # Its settings suppress what no caption may contain.
    drawn = captioner.policy.generate(
        **inputs, **sampling | shared | options, do_sample=True
    )
    assert trimmed(found[:, :4], captioner) == trimmed(drawn[:, 1:], captioner)
    greedy = captioner.policy.generate(
        **inputs,
        do_sample=False,
        **shared,
    )
    assert trimmed(found[:, 4:], captioner) == trimmed(greedy[:, 1:], captioner)
    full = captions_of(captioner, inputs, decoding, noise)
    assert not torch.equal(full, found), "the case must hold a token that is left out"


GROUPS = json.loads(
    (Path(__file__).parents[1] / "golden" / "group_beam_search.json").read_text()
)


@pytest.mark.parametrize(
    "case",
    GROUPS["cases"],
    ids=lambda case: f"{case['num_beams']}-{case['num_beam_groups']}",
)
def test_diverse_beam_search_is_that_of_transformers_4(case):
    logits = torch.tensor(GROUPS["logits"])
    first = torch.tensor([3, 5, 7, 9])
    table = SimpleNamespace(
        eos_token_id=1,
        pad_token_id=0,
        forbidden=(0,),
    )
    options = dict(case)
    captions = options.pop("captions")
    scores = torch.tensor(options.pop("scores"))
    decoding = Decoding(num_return_sequences=case["num_beams"], **options)

    def next_logits(prefixes):
        return logits[first if prefixes is None else prefixes.tokens]

    found = beam_search(table, next_logits, decoding)
    assert trimmed(found.token_ids, table) == list(chain(*captions))
    assert near(found.scores, scores, 1e-5)
    other = beam_search(
        table,
        next_logits,
        decoding.replace(diversity_penalty=1e-9),
    )
    assert not near(other.scores, scores, 1e-5)


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
    assert near(found.scores, slow.scores, 1e-5)


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
        ids = captions_of(captioner, inputs, one, noise).flatten(0, 1)
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
    first = constrain(
        captioner,
        decoding,
        torch.empty(3, 0).long(),
        logits,
    )
    assert torch.equal(first, logits)
    found = constrain(
        captioner,
        decoding,
        torch.ones(3, 2),
        logits,
    )
    assert found.isinf().nonzero().tolist() == [[0, 2], [2, 2]]


def test_a_repeated_trigram_costs_what_self_critical_pytorch_takes():
    """Its lines: alpha = 2.0; logprobs + mask * -0.693 * alpha, mask counting earlier occurrences."""
    (tokens,) = token_ids(
        "5 6 7 5 6 7 5 6",
        "5 6 8 5 6 7 5 6",
        "1 2 3 4 5 6 7 8",
        "4 4 4 4 4 4 4 4",
        images=1,
    )
    decoding = Decoding(block_trigrams=2.0)
    found = constrain(
        None,
        decoding,
        tokens,
        torch.zeros(4, 9),
    )
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
        ids = trimmed(captions_of(captioner, inputs, decoding), captioner)
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
        ({"num_samples": 2, "num_beams": 2}, "num_samples is 2"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**options)
