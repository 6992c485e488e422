"""CIDEr-D against recorded scores and the toolkit's scorer; the reward around it."""

import pickle
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.cider.cider_scorer import CiderScorer, precook

from rewards.base import Reward, RewardError
from rewards.files import load_json
from rewards.text import cider as cider_module
from rewards.text.cider import CiderD, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from tests.captions_for_tests import LazyColumn

GOLDEN = Path(__file__).parents[1] / "golden" / "cider_four_images.json"
CASE = load_json(GOLDEN)["cases"][0]
TEXTS = CASE["candidates"]
OWN = CASE["references"]
frequencies = DocumentFrequencies.from_references


def split(texts):
    return [[text.split() for text in own] for own in texts]


CANDIDATES = [text.split() for text in TEXTS]
REFERENCES = split(OWN)


def toolkit_scores(candidates, references, df, n=4, sigma=6.0):
    """Scores by the toolkit's class, which gets document frequencies from elsewhere."""

    class Scorer(CiderScorer):
        ref_len = property(lambda self: df.log_documents, lambda self, value: None)

    def cook(tokens):
        return precook(" ".join(tokens), n)

    scorer = Scorer(n=n, sigma=sigma)
    scorer.document_frequency = defaultdict(float, df.table.items())
    scorer.ctest = list(map(cook, candidates))
    scorer.crefs = [list(map(cook, captions)) for captions in references]
    return scorer.compute_cider()


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
    own = [[tokens + end for tokens in captions] for captions in REFERENCES]
    found = cider_d([tokens + end for tokens in CANDIDATES], own, df)
    np.testing.assert_allclose(found, CASE[name], rtol=rtol)


def test_squares_are_those_of_the_toolkit():
    """(ln 46 - ln 8)² by C's power is another double than the product (glibc 2.36)."""
    documents = []
    for image in range(46):
        words = ["left"] * (image < 8) + ["right"] * (image < 9)
        documents.append([words or ["none"]])
    texts = split([["left right new", "right left left right"] * 23])[0]
    df = frequencies(documents, eos=False)
    assert cider_d(texts, documents, df) == toolkit_scores(texts, documents, df)


WORDS = ["a", "dog", "on", "the", "beach", "red", "ball", EOS]
reference = st.lists(st.sampled_from(WORDS), max_size=9)
own_references = st.lists(reference, min_size=1, max_size=4)
candidate = st.lists(st.sampled_from([*WORDS, "new", "newer"]), max_size=12)


@settings(max_examples=150)
@given(
    corpus=st.lists(own_references, min_size=1, max_size=5),
    others=st.lists(own_references, max_size=3),
    data=st.data(),
    n=st.integers(2, 6),
)
def test_scores_equal_the_toolkits_to_the_bit(corpus, others, data, n):
    df = frequencies(corpus, eos=False, n=6)
    images = [*corpus, *others]  # also references whose n-grams were not counted
    pairs = st.tuples(candidate, st.sampled_from(images))
    rows = data.draw(st.lists(pairs, min_size=1, max_size=12))
    candidates, own = zip(*rows, strict=True)
    expected = toolkit_scores(candidates, own, df, n=n, sigma=5.0)
    assert cider_d(candidates, own, df, n, 5.0) == expected
    copies = [list(captions) for captions in own]
    assert cider_d(candidates, copies, df, n, 5.0) == expected


MANY = [f"w{number}" for number in range(70_000)]
CORPUS = [
    [MANY[:40_000]],
    [MANY[39_000:]],
    [["w1", "w69999"]],
]
REPEATED = [
    [["a"] * 400 + ["dog"], ["the", "dog"]],
    [["a", "dog"]],
    [["red", "beach"]],
]


@pytest.mark.parametrize(
    ("df", "candidates", "references"),
    [
        (
            frequencies(CORPUS, eos=False),
            [
                ["w1", "w69999"],
                ["w69999", "w1"],
                MANY[39_990:40_010],
            ],
            [CORPUS[2], CORPUS[2], CORPUS[1]],
        ),
        (
            DocumentFrequencies.from_counts({}, 2.0, eos=False),
            [["a", "b"], []],
            [[["a", "b"]]] * 2,
        ),
        (
            frequencies(REPEATED, eos=False),
            [
                ["a"] * 299 + ["dog"],
                ["a", "dog"],
                ["red"],
            ],
            REPEATED,
        ),
    ],
)
def test_odd_corpora_have_the_toolkits_scores(df, candidates, references):
    expected = toolkit_scores(candidates, references, df)
    assert cider_d(candidates, references, df) == expected


@pytest.mark.parametrize("most", [1, 40])
def test_captions_are_scored_in_batches(monkeypatch, most):
    df = frequencies(REFERENCES, eos=False)
    candidates = [*CANDIDATES, []]
    own = [*REFERENCES, REFERENCES[0]]
    monkeypatch.setattr(cider_module, "MOST_TOKENS", most)
    assert cider_d(candidates, own, df) == toolkit_scores(candidates, own, df)


# the reward


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
    df = DocumentFrequencies.from_texts(references, eos=False)
    assert by_id == CiderD(df, eos=False)(None, texts, references=references)
    assert reward(None, texts, references=references) != by_id


def test_eos_is_given_to_finished_captions_only():
    text = "a dog runs in the park"
    columns = {"references": [[text]] * 2, "finished": [True, False]}
    reward = CiderD(made_df())
    finished, cut = reward(None, [text] * 2, **columns)
    assert cut < finished == pytest.approx(10.0)
    assert reward(None, [text], references=[[text]]) == [finished]
    reward = CiderD(made_df(eos=False), eos=False)
    without = reward(None, [text] * 2, **columns)
    assert without == pytest.approx([10.0, 10.0]), "the same caption"


def test_a_score_that_is_rounded_above_the_bound_is_the_bound():
    references = [["d h c f"], ["b h c"]]
    df = frequencies(split(references), eos=False)
    captions = [own[0] for own in references]
    unbounded = cider_d([captions[0].split()], split(references)[:1], df)
    assert unbounded[0] > 10
    scores = CiderD(df, eos=False)(None, captions, references=references)
    assert scores == [10.0, 7.5]


@pytest.mark.parametrize(
    ("candidates", "references", "n"),
    [
        ([["a"], ["b"]], [[["a"]], []], 4),
        ([["a"]], [[["a"]]], 5),
    ],
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
    ],
)
def test_frequencies_of_another_convention_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CiderD(**arguments)


@pytest.mark.parametrize(
    "references",
    [
        [],
        [["a"], "a dog"],
    ],
)
def test_wrong_references_are_refused(references):
    with pytest.raises(RewardError, match=r"references|row 1"):
        CiderD(made_df())(None, ["a", "b"], references=references)
