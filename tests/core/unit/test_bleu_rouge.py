"""BLEU and ROUGE-L against recorded scores; ``test_evaluation_metrics.py`` compares with the live
toolkit.
"""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from rewards.text.bleu import Bleu, bleu_counts, bleu_of_counts
from rewards.text.rouge import RougeL, longest_common_subsequence, rouge_l
from tests.captions_for_tests import published_system

CASE = json.loads(
    (Path(__file__).parents[1] / "golden" / "bleu_rouge_toolkit.json").read_text()
)["cases"][0]


def corpus_bleu(candidates, references):
    counts = [bleu_counts(*pair) for pair in zip(candidates, references, strict=True)]
    return bleu_of_counts(np.sum(counts, axis=0).tolist())


@pytest.mark.parametrize("factor", [1.0, 1.0 + 1e-6])
def test_recorded_scores(factor):
    candidates = [text.split() for text in CASE["candidates"]]
    references = [[text.split() for text in texts] for texts in CASE["references"]]
    for found, recorded in (
        (corpus_bleu(candidates, references), CASE["corpus_bleu"]),
        (
            [
                bleu_of_counts(bleu_counts(*pair))
                for pair in zip(candidates, references, strict=True)
            ],
            CASE["sentence_bleu"],
        ),
        (
            [rouge_l(*pair) for pair in zip(candidates, references, strict=True)],
            CASE["rouge_l"],
        ),
    ):  # a perturbed recording is seen
        with contextlib.nullcontext() if factor == 1 else pytest.raises(AssertionError):
            np.testing.assert_allclose(found, np.array(recorded) * factor, rtol=1e-12)


@pytest.mark.parametrize(
    "system",
    [
        "magic_result",
        "contrastive_result",
    ],
)
def test_published_systems_have_their_recorded_scores(system, shared_data):
    candidates, references, recorded = published_system(shared_data, system)
    expected = [recorded[f"Bleu_{order}"] for order in (1, 2, 3, 4)]
    np.testing.assert_allclose(corpus_bleu(candidates, references), expected, rtol=1e-5)
    mine = [rouge_l(*pair) for pair in zip(candidates, references, strict=True)]
    assert np.mean(mine) == pytest.approx(recorded["ROUGE_L"], rel=1e-5)


def test_longest_common_subsequence():
    assert longest_common_subsequence(list("aab"), list("baa")) == 2
    long = [
        str(index % 7) for index in range(300)
    ]  # more tokens than a machine word has bits
    assert longest_common_subsequence(long, long) == 300


def test_captions_without_a_word_agree_with_each_other_alone():
    assert [rouge_l([], [own]) for own in ([], ["a"], ["-"])] == [1.0, 0.0, 0.0]
    assert rouge_l(["a"], [[]]) == 0.0


def test_wrong_arguments_are_refused():
    for call, message in (
        (lambda: Bleu(0), "n is 0"),
        (lambda: RougeL(0), "beta is 0"),
        (lambda: bleu_counts(["a"], []), "^BLEU.* reference"),
        (lambda: rouge_l(["a"], []), "^ROUGE-L.* reference"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_count_is_clipped_at_the_largest_of_a_reference():
    counts = bleu_counts(["a", "a", "a"], [["a", "a"], ["a"]])
    assert counts[0] == 2


def test_the_beta_of_the_toolkit_is_the_default():
    one = {"references": [["a dog runs on grass"]]}
    assert RougeL()(None, ["a dog"], **one) == RougeL(beta=1.2)(None, ["a dog"], **one)
