"""CIDEr-D against recorded scores, the live toolkit and its definition written out; the reward
around it.
"""

import json
import math
import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider

from rewards.base import Reward, RewardError
from rewards.text import cider as cider_module
from rewards.text.cider import CiderD, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.ngrams import NGram, ngram_counts
from tests.captions_for_tests import LazyColumn, published_system

CASE = json.loads(
    (Path(__file__).parents[1] / "golden" / "cider_four_images.json").read_text()
)["cases"][0]
CANDIDATES = [text.split() for text in CASE["candidates"]]
REFERENCES = [[text.split() for text in texts] for texts in CASE["references"]]
Tokens = Sequence[str]
frequencies = DocumentFrequencies.from_references


def plain_cider_d(
    candidates: Any,
    references: Any,
    df: DocumentFrequencies,
    n: int = 4,
    sigma: float = 6.0,
) -> list:
    """CIDEr-D of one candidate after the other, from dicts, as its definition reads, in the
    toolkit's order of sums.
    """
    return [
        _plain_score(candidate, own, df, n, sigma)
        for candidate, own in zip(candidates, references, strict=True)
    ]


@cache
def counts_of(df: DocumentFrequencies) -> dict[NGram, float]:
    return dict(df.table.items())


def _plain_vector(
    tokens: Tokens, df: DocumentFrequencies, n: int
) -> tuple[dict[NGram, float], list[float]]:
    weights, squares = {}, [0.0] * n
    for ngram, count in ngram_counts(tokens, n).items():
        weights[ngram] = float(count) * float(
            df.log_documents - np.log(max(1.0, float(counts_of(df).get(ngram, 0))))
        )
        squares[len(ngram) - 1] += weights[ngram] ** 2
    return weights, [math.sqrt(square) for square in squares]


def _plain_score(
    candidate: Tokens,
    references: Sequence[Tokens],
    df: DocumentFrequencies,
    n: int,
    sigma: float,
) -> float:
    weights, norms = _plain_vector(candidate, df, n)
    sums, total = [0.0] * n, 0.0
    for reference in references:
        others, other_norms = _plain_vector(reference, df, n)
        difference = max(0, len(candidate) - 1) - max(0, len(reference) - 1)
        penalty = math.e ** (-(float(difference) ** 2) / (2 * sigma**2))
        values = [0.0] * n
        for ngram in (ngram for ngram in weights if ngram in others):
            values[len(ngram) - 1] += min(weights[ngram], others[ngram]) * others[ngram]
        for order in range(n):
            if norms[order] != 0 and other_norms[order] != 0:
                values[order] /= norms[order] * other_norms[order]
            sums[order] += values[order] * penalty
    for value in sums:  # not sum(), which compensates
        total += value
    return total / n / len(references) * 10.0


def toolkit_scores(
    candidates: list[list[str]], references: list[list[list[str]]]
) -> tuple[float, list[float]]:
    mean, scores = Cider().compute_score(
        {
            row: [" ".join(tokens) for tokens in captions]
            for row, captions in enumerate(references)
        },
        {row: [" ".join(tokens)] for row, tokens in enumerate(candidates)},
    )
    return float(mean), scores.tolist()


def split(texts: Sequence[Sequence[str]]) -> list[list[list[str]]]:
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
    documents: Any = REFERENCES
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
        "nucleus_result_run_1",
        "top_k_result_run_1",
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
    rows = data.draw(
        st.lists(
            st.tuples(candidate, st.integers(0, len(images) - 1)),
            min_size=1,
            max_size=12,
        )
    )
    candidates, own = (
        [tokens for tokens, _ in rows],
        [images[number] for _, number in rows],
    )
    expected = plain_cider_d(candidates, own, df, n, 5.0)
    assert cider_d(candidates, own, df, n, 5.0) == expected
    assert (
        cider_d(candidates, [list(captions) for captions in own], df, n, 5.0)
        == expected
    ), "lists of their own"
    assert all(-1e-9 <= score <= 10 + 1e-9 for score in expected)


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


def made_df(eos: bool = True) -> DocumentFrequencies:
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
    assert (
        reward.signature
        == f"STANDARD_wInit+Cider-D[n4,s6.0]+df[{made_df().fingerprint[:8]}]"
    )
    assert CiderD(frequencies(REFERENCES[1:], eos=True)).signature != reward.signature
    copy = pickle.loads(pickle.dumps(reward))
    assert (copy(None, TEXTS, references=OWN), copy.fingerprint) == (
        scores,
        reward.fingerprint,
    )


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
    assert (
        by_id == toolkit_scores([text.split() for text in texts], split(references))[1]
    )
    assert reward(None, texts, references=references) != by_id


def test_eos_is_given_to_finished_captions_only():
    texts, references = ["a dog runs in the park"] * 2, [["a dog runs in the park"]] * 2
    finished, cut = CiderD(made_df())(
        None, texts, references=references, finished=[True, False]
    )
    assert cut < finished == pytest.approx(10.0)
    assert CiderD(made_df())(None, texts, references=references) == [finished] * 2
    without = CiderD(made_df(eos=False), eos=False)(
        None, texts, references=references, finished=[True, False]
    )
    assert without == pytest.approx([10.0, 10.0]), (
        "without EOS both are the same caption"
    )


def test_wrong_input_is_refused():
    for candidates, references, n, message in (
        ([["a"]], [[["a"]], [["a"]]], 4, "1 candidates.* 2 lists"),
        ([["a"], ["b"]], [[["a"]], []], 4, "candidate 1"),
        ([["a"]], [[["a"]]], 5, r"4.*n = 5"),
    ):
        with pytest.raises(ValueError, match=message):
            cider_d(candidates, references, made_df(), n=n)
    for arguments, message in (
        ({"df": made_df(eos=False), "eos": True}, "eos=False"),
        ({"df": made_df(eos=True), "eos": False}, "eos=True"),
        ({"df": frequencies(REFERENCES, eos=True, tokenizer="ids")}, "'ids'"),
        ({"df": made_df(), "n": 5}, "up to 4"),
        ({"n": 0}, "n is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            CiderD(**arguments)  # type: ignore[arg-type]
    for columns, message in (
        ({}, r"column 'references'.*\[\]"),
        ({"references": [["a"]]}, r"1.*2 captions"),
        ({"references": [["a"], []]}, "row 1 has"),
        ({"references": [["a"], "a dog"]}, "row 1 has the references 'a dog'"),
        ({"references": [["a"], ["b", 3]]}, r"row 1.*3"),
    ):
        with pytest.raises(RewardError, match=message):
            CiderD(made_df())(None, ["a", "b"], **columns)


def test_cached_tokens_belong_to_all_references_of_an_image():
    df = DocumentFrequencies.from_texts([["a dog"], ["two cats"], ["a bird"]], eos=True)
    lists = [["a dog"], ["a dog", "two cats"], ["a dog", "a bird"]]
    alone = [CiderD(df)(None, ["two cats"], references=[own])[0] for own in lists]
    together = CiderD(df)
    for _ in range(2):
        assert [
            together(None, ["two cats"], references=[own])[0] for own in lists
        ] == alone
