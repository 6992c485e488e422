"""CIDEr-D against recorded scores, the live toolkit and its definition written out; the reward
around it.
"""

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider

from rewards.base import Reward, RewardError
from rewards.text import cider as cider_module
from rewards.text.cider import CiderD, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.ngrams import ngram_counts
from tests.captions_for_tests import LazyColumn, published_system

CASE = json.loads(
    (Path(__file__).parents[1] / "golden" / "cider_four_images.json").read_text()
)["cases"][0]
CANDIDATES = [text.split() for text in CASE["candidates"]]
REFERENCES = [[text.split() for text in texts] for texts in CASE["references"]]
Tokens = Sequence[str]
frequencies = DocumentFrequencies.from_references


def plain_cider_d(candidates, references, df, n=4, sigma=6.0):
    """CIDEr-D of one candidate after the other, from dicts, as its definition reads, in the
    toolkit's order of sums.
    """
    counts = dict(df.table.items())

    def vector(tokens):
        weights, squares = {}, [0.0] * n
        for ngram, count in ngram_counts(tokens, n).items():
            frequency = max(1.0, float(counts.get(ngram, 0)))
            weights[ngram] = float(count) * float(df.log_documents - np.log(frequency))
            squares[len(ngram) - 1] += weights[ngram] ** 2
        return weights, [math.sqrt(square) for square in squares]

    def similarities(candidate, reference):
        (weights, norms), (others, other_norms) = vector(candidate), vector(reference)
        difference = max(0, len(candidate) - 1) - max(0, len(reference) - 1)
        penalty = math.e ** (-(float(difference) ** 2) / (2 * sigma**2))
        values = [0.0] * n
        for ngram in (ngram for ngram in weights if ngram in others):
            values[len(ngram) - 1] += min(weights[ngram], others[ngram]) * others[ngram]
        for order in range(n):
            if norms[order] != 0 and other_norms[order] != 0:
                values[order] /= norms[order] * other_norms[order]
            values[order] *= penalty
        return values

    scores = []
    for candidate, own in zip(candidates, references, strict=True):
        sums, total = [0.0] * n, 0.0
        for reference in own:
            values = similarities(candidate, reference)
            sums = [a + b for a, b in zip(sums, values, strict=True)]
        for value in sums:  # not sum(), which compensates
            total += value
        scores.append(total / n / len(own) * 10.0)
    return scores


def toolkit_scores(candidates, references):
    mean, scores = Cider().compute_score(
        {
            row: [" ".join(tokens) for tokens in captions]
            for row, captions in enumerate(references)
        },
        {row: [" ".join(tokens)] for row, tokens in enumerate(candidates)},
    )
    return float(mean), scores.tolist()


def split(texts):
    return [[text.split() for text in own] for own in texts]


@pytest.mark.parametrize(
    ("name", "eos", "document", "rtol"),
    [
        ("cider_d", False, "image", 1e-15),
        ("cider_d_eos", True, "image", 1e-12),
        ("cider_d_caption_df", False, "caption", 1e-7),
    ],
)
def test_recorded_scores_of_four_images(name, eos, document, rtol):
    end = [EOS] if eos else []
    documents = REFERENCES
    if document == "caption":
        documents = [[tokens] for captions in REFERENCES for tokens in captions]
    df = frequencies(documents, eos=eos)
    own = [[[*tokens, *end] for tokens in captions] for captions in REFERENCES]
    found = cider_d([[*tokens, *end] for tokens in CANDIDATES], own, df)
    np.testing.assert_allclose(found, CASE[name], rtol=rtol)
    with pytest.raises(AssertionError):  # a perturbed recording is seen
        np.testing.assert_allclose(found, np.array(CASE[name]) * (1 + 1e-5), rtol=rtol)


def test_squares_are_those_of_the_toolkit():
    """(ln 46 - ln 8)² by C's power, which the toolkit takes, is another double than the product
    (glibc 2.36).
    """
    own = [
        [" ".join(["left"] * (image < 8) + ["right"] * (image < 9)) or "none"]
        for image in range(46)
    ]
    texts = [text.split() for text in ["left right new", "right left left right"] * 23]
    df = frequencies(split(own), eos=False)
    assert cider_d(texts, split(own), df) == toolkit_scores(texts, split(own))[1]


@pytest.mark.parametrize(
    "system",
    [
        "magic_result",
        "contrastive_result",
    ],
)
def test_four_published_systems_equal_the_live_toolkit(system, shared_data):
    candidates, references, recorded = published_system(shared_data, system)
    mean, scores = toolkit_scores(candidates, references)
    np.testing.assert_allclose(
        cider_d(candidates, references, frequencies(references, eos=False)),
        scores,
        rtol=1e-9,
    )
    assert mean == pytest.approx(recorded["CIDEr"], rel=1e-5), (
        "the recording tokenised whole files with Java"
    )


WORDS = ["a", "dog", "on", "the", "beach", "red", "ball", EOS]
own_references = st.lists(
    st.lists(st.sampled_from(WORDS), max_size=9), min_size=1, max_size=4
)
candidate = st.lists(st.sampled_from([*WORDS, "new", "newer"]), max_size=12)


@settings(max_examples=150)
@given(
    corpus=st.lists(own_references, min_size=1, max_size=5),
    others=st.lists(own_references, max_size=3),
    data=st.data(),
    n=st.integers(1, 6),
)
def test_scores_equal_the_definition_to_the_bit(corpus, others, data, n):
    df = frequencies(corpus, eos=False, n=6)
    images = [*corpus, *others]  # also references whose n-grams were not counted
    pairs = st.tuples(candidate, st.sampled_from(images))
    rows = data.draw(st.lists(pairs, min_size=1, max_size=12))
    candidates, own = zip(*rows, strict=True)
    expected = plain_cider_d(candidates, own, df, n, 5.0)
    assert cider_d(candidates, own, df, n, 5.0) == expected
    copies = [list(captions) for captions in own]
    assert cider_d(candidates, copies, df, n, 5.0) == expected


def test_many_words_no_frequencies_and_words_that_repeat():
    many = [f"w{number}" for number in range(70_000)]
    corpus = [[many[:40_000]], [many[39_000:]], [["w1", "w69999"]]]
    repeated = [
        [["a"] * 400 + ["dog"], ["the", "dog"]],
        [["a", "dog"]],
        [["red", "beach"]],
    ]
    few = [["w1", "w69999"], ["w69999", "w1"], many[39_990:40_010]]
    for df, candidates, own in (
        (frequencies(corpus, eos=False), few, [corpus[2], corpus[2], corpus[1]]),
        (
            DocumentFrequencies.from_counts({}, 2.0, eos=False),
            [["a", "b"], []],
            [[["a", "b"]]] * 2,
        ),
        (
            frequencies(repeated, eos=False),
            [["a"] * 299 + ["dog"], ["a", "dog"], ["red"]],
            repeated,
        ),
    ):
        assert cider_d(candidates, own, df) == plain_cider_d(candidates, own, df)


def test_captions_are_scored_in_batches(monkeypatch):
    df = frequencies(REFERENCES, eos=False)
    candidates, own = [*CANDIDATES, []], [*REFERENCES, REFERENCES[0]]
    for most in (1, 40):
        monkeypatch.setattr(cider_module, "MOST_TOKENS", most)
        assert cider_d(candidates, own, df) == plain_cider_d(candidates, own, df)


# the reward

TEXTS, OWN = CASE["candidates"], CASE["references"]


def made_df(eos=True):
    return frequencies(REFERENCES, eos=eos)


def test_reward_with_eos_scores_as_recorded(tmp_path):
    made_df().save(tmp_path / "df.npz")
    reward = CiderD(tmp_path / "df.npz")
    assert isinstance(reward, Reward)
    scores = reward(None, TEXTS, references=OWN, completion_ids=None)
    np.testing.assert_allclose(scores, CASE["cider_d_eos"], rtol=1e-12)
    messages = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert reward(None, messages, references=OWN) == scores, "the cache changes nothing"
    assert reward(None, TEXTS, references=LazyColumn(OWN)) == scores
    name = f"STANDARD_wInit+Cider-D[n4,s6.0]+df[{made_df().fingerprint[:8]}]"
    assert reward.signature == name
    assert CiderD(frequencies(REFERENCES[1:], eos=True)).signature != name
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(None, TEXTS, references=OWN) == scores


def test_reward_without_df_counts_the_images_of_the_call():
    reward = CiderD(eos=False)
    repeated = [text for text in TEXTS for _ in range(2)]
    references = [texts for texts in OWN for _ in range(2)]
    for ids in ({}, {"image_id": list("11223344")}):
        found = reward(None, repeated, references=references, **ids)
        np.testing.assert_allclose(found, np.repeat(CASE["cider_d"], 2), rtol=1e-12)
    assert reward.signature == "NO<EOS>_w/oInit+Cider-D[n4,s6.0]"
    assert reward(None, [], references=[]) == []


def test_image_ids_keep_images_with_equal_captions_apart():
    references = [["a red dog"], ["a red dog"], ["the blue cat sits"]]
    texts = ["a red dog", "a red dog", "the blue cat"]
    reward = CiderD(eos=False)
    by_id = reward(None, texts, references=references, image_id=["1", "2", "3"])
    tokens = [text.split() for text in texts]
    assert by_id == toolkit_scores(tokens, split(references))[1]
    assert reward(None, texts, references=references) != by_id


def test_eos_is_given_to_finished_captions_only():
    text = "a dog runs in the park"
    columns = {"references": [[text]] * 2, "finished": [True, False]}
    finished, cut = CiderD(made_df())(None, [text] * 2, **columns)
    assert cut < finished == pytest.approx(10.0)
    assert CiderD(made_df())(None, [text], references=[[text]]) == [finished]
    without = CiderD(made_df(eos=False), eos=False)(None, [text] * 2, **columns)
    assert without == pytest.approx([10.0, 10.0]), "the same caption"


def test_cached_tokens_belong_to_all_references_of_an_image():
    df = DocumentFrequencies.from_texts([["a dog"], ["two cats"], ["a bird"]], eos=True)
    lists = [["a dog"], ["a dog", "two cats"], ["a dog", "a bird"]]
    alone = [CiderD(df)(None, ["two cats"], references=[own])[0] for own in lists]
    together = CiderD(df)
    for _ in range(2):
        assert [
            together(None, ["two cats"], references=[own])[0] for own in lists
        ] == alone


def test_a_score_that_is_rounded_above_the_bound_is_the_bound():
    references = [["d h c f"], ["b h c"]]
    df = frequencies(split(references), eos=False)
    captions = [own[0] for own in references]
    assert cider_d([captions[0].split()], split(references)[:1], df)[0] > 10
    scores = CiderD(df, eos=False)(None, captions, references=references)
    assert scores == [10.0, 7.5]


@pytest.mark.parametrize(
    ("candidates", "references", "n"),
    [
        ([["a"]], REFERENCES, 4),
        ([["a"], ["b"]], [[["a"]], []], 4),
        ([["a"]], [[["a"]]], 5),
    ],
    ids=["another number", "no references", "longer than counted"],
)
def test_candidates_that_cannot_be_scored_are_refused(candidates, references, n):
    with pytest.raises(ValueError, match=r"candidate|n = 5"):
        cider_d(candidates, references, made_df(), n=n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"df": made_df(eos=False), "eos": True}, "eos=False"),
        ({"df": made_df(eos=True), "eos": False}, "eos=True"),
        ({"df": frequencies(REFERENCES, eos=True, tokenizer="ids")}, "'ids'"),
        ({"df": made_df(), "n": 5}, "up to 4"),
    ],
)
def test_frequencies_of_another_convention_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CiderD(**arguments)


@pytest.mark.parametrize(
    "references", [[], [["a"]], [["a"], []], [["a"], "a dog"], [["a"], ["b", 3]]]
)
def test_wrong_references_are_refused(references):
    with pytest.raises(RewardError, match=r"references|row 1"):
        CiderD(made_df())(None, ["a", "b"], references=references)
