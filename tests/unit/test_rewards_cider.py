"""CIDEr-D against recorded scores, the live toolkit, and what the definition implies."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider

from rewards.base import Reward, RewardError
from rewards.text.cider import CiderD, cider, cider_d
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.tokenize import tokenize

CASE = json.loads((Path(__file__).parents[1] / "golden" / "cider_four_images.json").read_text())["cases"][0]
CANDIDATES = [text.split() for text in CASE["candidates"]]
REFERENCES = [[text.split() for text in texts] for texts in CASE["references"]]


def variants(case: dict) -> dict[str, tuple[list[float], list[float]]]:
    """Return (found, recorded) of each recorded variant."""
    df = DocumentFrequencies.from_references(REFERENCES, eos=False)
    eos_df = DocumentFrequencies.from_references(REFERENCES, eos=True)
    caption_df = DocumentFrequencies.from_references(REFERENCES, eos=False, document="caption")
    ended = [[*tokens, EOS] for tokens in CANDIDATES]
    ended_references = [[[*tokens, EOS] for tokens in captions] for captions in REFERENCES]
    return {
        "cider_d": (cider_d(CANDIDATES, REFERENCES, df), case["cider_d"]),
        "cider": (cider(CANDIDATES, REFERENCES, df), case["cider"]),
        "cider_d_eos": (cider_d(ended, ended_references, eos_df), case["cider_d_eos"]),
        "cider_d_caption_df": (cider_d(CANDIDATES, REFERENCES, caption_df), case["cider_d_caption_df"]),
    }


@pytest.mark.parametrize(
    ("name", "rtol"), [("cider_d", 1e-15), ("cider", 1e-12), ("cider_d_eos", 1e-12), ("cider_d_caption_df", 1e-7)]
)
def test_recorded_scores_of_four_images(name: str, rtol: float) -> None:
    found, recorded = variants(CASE)[name]
    np.testing.assert_allclose(found, recorded, rtol=rtol)
    with pytest.raises(AssertionError):  # a perturbed recording is seen
        np.testing.assert_allclose(found, np.array(recorded) * (1 + 1e-5), rtol=rtol)


def toolkit_scores(candidates: list[list[str]], references: list[list[list[str]]]) -> tuple[float, list[float]]:
    mean, scores = Cider().compute_score(
        {row: [" ".join(tokens) for tokens in captions] for row, captions in enumerate(references)},
        {row: [" ".join(tokens)] for row, tokens in enumerate(candidates)},
    )
    return float(mean), scores.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_random_corpora_equal_the_live_toolkit_to_the_bit(seed: int) -> None:
    source = random.Random(seed)
    words = "a b c d e f g h".split()[: source.randint(2, 8)]  # noqa: SIM905

    def caption(longest: int = 14) -> list[str]:
        return source.choices(words, k=source.randint(0, longest))

    references = [[caption() for _ in range(source.randint(1, 5))] for _ in range(source.randint(2, 25))]
    candidates = [caption() for _ in references]
    mine = cider_d(candidates, references, DocumentFrequencies.from_references(references, eos=False))
    assert mine == toolkit_scores(candidates, references)[1]


def test_the_published_oracle(shared_data: Path) -> None:
    folder = shared_data / "coco_fakecap_oracle"
    texts = json.loads((folder / "gts.json").read_text())
    results = json.loads((folder / "res.json").read_text())
    references = [[text.split() for text in texts[key]] for key in texts]
    candidates = [results[key][0].split() for key in texts]
    df = DocumentFrequencies.from_references(references, eos=False)
    assert np.mean(cider_d(candidates, references, df)) == pytest.approx(0.5997905185184199, rel=1e-12)


@pytest.mark.parametrize("system", ["magic_result", "contrastive_result", "nucleus_result_run_1", "top_k_result_run_1"])
def test_four_published_systems_equal_the_live_toolkit(system: str, shared_data: Path) -> None:
    folder = shared_data / "coco_karpathy_test"
    texts = {row["image_name"]: row["captions"] for row in json.loads((folder / "refs.json").read_text())}
    results = json.loads((folder / "predictions" / f"{system}.json").read_text())
    references = [[tokenize(text) for text in texts[row["image_name"]]] for row in results]
    candidates = [tokenize(row["caption"]) for row in results]
    df = DocumentFrequencies.from_references(references, eos=False)
    mine = cider_d(candidates, references, df)
    mean, scores = toolkit_scores(candidates, references)
    np.testing.assert_allclose(mine, scores, rtol=1e-9)
    recorded = json.loads((folder / "scores_pycocoevalcap.json").read_text())["scores"][system]["CIDEr"]
    assert mean == pytest.approx(recorded, rel=1e-5), "the recording tokenised whole files with Java"


CAPTIONS = st.lists(st.sampled_from("red dog cat on a mat the runs".split()), min_size=1, max_size=9)  # noqa: SIM905


@given(st.lists(CAPTIONS, min_size=1, max_size=4), CAPTIONS)
def test_scores_stay_in_bounds(own: list[list[str]], candidate: list[str]) -> None:
    df = DocumentFrequencies.from_references([*REFERENCES, own], eos=False)
    for score in (*cider_d([candidate], [own], df), *cider([candidate], [own], df)):
        assert -1e-9 <= score <= 10 + 1e-9


def test_the_reference_itself_gets_ten_and_orders_without_ngrams_nothing() -> None:
    df = DocumentFrequencies.from_references([*REFERENCES, [["blue", "boat", "far", "out"]]], eos=False)
    full = ["blue", "boat", "far", "out"]
    assert cider_d([full], [[full]], df) == pytest.approx([10.0])
    assert cider_d([["blue", "boat"]], [[["blue", "boat"]]], df) == pytest.approx([5.0])
    assert cider_d([["blue"]], [[["blue"]]], df) == pytest.approx([2.5])
    assert cider_d([[]], [[["blue"]]], df) == [0.0]


def test_wrong_input_is_refused() -> None:
    df = DocumentFrequencies.from_references(REFERENCES, eos=False)
    with pytest.raises(ValueError, match="1 candidates and 2 lists"):
        cider_d([["a"]], [[["a"]], [["a"]]], df)
    with pytest.raises(ValueError, match="candidate 1 has no reference"):
        cider_d([["a"], ["b"]], [[["a"]], []], df)
    with pytest.raises(ValueError, match=r"up to 4.*n = 5"):
        cider_d([["a"]], [[["a"]]], df, n=5)


# the reward


def made_df(eos: bool = True) -> DocumentFrequencies:
    return DocumentFrequencies.from_references(REFERENCES, eos=eos)


def test_reward_with_eos_scores_as_recorded() -> None:
    reward = CiderD(made_df())
    assert isinstance(reward, Reward)
    scores = reward(None, CASE["candidates"], references=CASE["references"], completion_ids=None)
    np.testing.assert_allclose(scores, CASE["cider_d_eos"], rtol=1e-12)
    assert reward(None, CASE["candidates"], references=CASE["references"]) == scores, "the cache changes nothing"
    counted = f"+df[{made_df().fingerprint[:8]}]"
    assert [len(scores), reward.signature] == [4, f"STANDARD_wInit+Cider-D[n4,s6.0]{counted}"]
    other = DocumentFrequencies.from_references(REFERENCES[1:], eos=True)
    assert CiderD(other).signature != reward.signature, "scores under other document frequencies do not compare"


def test_reward_without_df_counts_the_images_of_the_call() -> None:
    reward = CiderD(eos=False)
    repeated = [text for text in CASE["candidates"] for _ in range(2)]
    references = [texts for texts in CASE["references"] for _ in range(2)]
    np.testing.assert_allclose(reward(None, repeated, references=references), np.repeat(CASE["cider_d"], 2), rtol=1e-12)
    named = reward(None, repeated, references=references, image_id=list("11223344"))
    np.testing.assert_allclose(named, np.repeat(CASE["cider_d"], 2), rtol=1e-12)
    assert reward.signature == "NO<EOS>_w/oInit+Cider-D[n4,s6.0]"
    assert reward(None, [], references=[]) == []


def test_image_ids_keep_images_with_equal_captions_apart() -> None:
    references = [["a red dog"], ["a red dog"], ["the blue cat sits"]]
    texts = ["a red dog", "a red dog", "the blue cat"]
    reward = CiderD(eos=False)
    together = reward(None, texts, references=references)
    apart = reward(None, texts, references=references, image_id=["1", "2", "3"])
    tokens = [[tokenize(text) for text in captions] for captions in references]
    assert apart == toolkit_scores([tokenize(text) for text in texts], tokens)[1]
    assert together != apart


def test_eos_is_given_to_finished_captions_only() -> None:
    reward = CiderD(made_df())
    references = [["a dog runs in the park"]] * 2
    finished, cut = reward(None, ["a dog runs in the park"] * 2, references=references, finished=[True, False])
    assert finished == pytest.approx(10.0)
    assert cut < finished
    assert reward(None, ["a dog runs in the park"], references=references[:1]) == [finished]


def test_reward_survives_pickling_without_its_cache() -> None:
    reward = CiderD(made_df())
    scores = reward(None, CASE["candidates"], references=CASE["references"])
    copy = pickle.loads(pickle.dumps(reward))
    assert not copy._cache
    assert copy(None, CASE["candidates"], references=CASE["references"]) == scores
    assert copy.fingerprint == reward.fingerprint


def test_cache_is_bounded_and_scores_do_not_depend_on_it() -> None:
    small, large = CiderD(made_df(), cache_images=1), CiderD(made_df())
    order = [0, 1, 0, 2, 3, 1, 0]
    texts = [CASE["candidates"][index] for index in order]
    references = [CASE["references"][index] for index in order]
    assert small(None, texts, references=references) == large(None, texts, references=references)
    assert len(small._cache) == 1


def test_messages_are_scored_like_strings() -> None:
    reward = CiderD(made_df())
    messages = [[{"role": "assistant", "content": text}] for text in CASE["candidates"]]
    assert reward(None, messages, references=CASE["references"]) == reward(
        None, CASE["candidates"], references=CASE["references"]
    )


def test_df_of_another_convention_is_refused() -> None:
    with pytest.raises(ValueError, match="without <eos>"):
        CiderD(made_df(eos=False), eos=True)
    with pytest.raises(ValueError, match="with <eos>"):
        CiderD(made_df(eos=True), eos=False)
    other = DocumentFrequencies.from_references(REFERENCES, eos=True, tokenizer="ids")
    with pytest.raises(ValueError, match="'ids'"):
        CiderD(other)
    with pytest.raises(ValueError, match="up to 4"):
        CiderD(made_df(), n=5)
    with pytest.raises(ValueError, match="n = 0"):
        CiderD(n=0)


@pytest.mark.parametrize(
    ("references", "message"),
    [
        (None, "needs the column 'references'"),
        ([["a"]], "1 items for 2 captions"),
        ([["a"], []], "row 1 has no reference"),
        ([["a"], "a dog"], "row 1 are 'a dog'"),
        ([["a"], ["b", 3]], "row 1 has the reference 3"),
    ],
)
def test_bad_references_are_errors(references: object, message: str) -> None:
    columns = {} if references is None else {"references": references}
    with pytest.raises(RewardError, match=message):
        CiderD(made_df())(None, ["a", "b"], **columns)


def test_the_reward_reads_document_frequencies_from_a_file(tmp_path: Path) -> None:
    made_df().save(tmp_path / "df.npz")
    reward = CiderD(tmp_path / "df.npz")
    np.testing.assert_allclose(
        reward(None, CASE["candidates"], references=CASE["references"]), CASE["cider_d_eos"], rtol=1e-12
    )
