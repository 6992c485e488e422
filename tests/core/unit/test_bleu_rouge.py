"""BLEU and ROUGE-L against recorded scores, and CIDEr-D of a published system;
``test_evaluation_metrics.py`` compares with the live toolkit.
"""

from pathlib import Path

import numpy as np
import pytest

from rewards.files import load_json
from rewards.text.bleu import Bleu, bleu_counts, bleu_of_counts
from rewards.text.cider import cider_d
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.rouge import RougeL, longest_common_subsequence, rouge_l
from tests.captions_for_tests import published_system

GOLDEN = Path(__file__).parents[1] / "golden" / "bleu_rouge_toolkit.json"
CASE = load_json(GOLDEN)["cases"][0]


def scored(candidates, references):
    """Corpus BLEU, BLEU and ROUGE-L of each caption."""
    pairs = list(zip(candidates, references, strict=True))
    counts = [bleu_counts(*pair) for pair in pairs]
    return {
        "corpus_bleu": bleu_of_counts(np.sum(counts, axis=0).tolist()),
        "sentence_bleu": list(map(bleu_of_counts, counts)),
        "rouge_l": [rouge_l(*pair) for pair in pairs],
    }


@pytest.mark.parametrize("key", ["corpus_bleu", "sentence_bleu", "rouge_l"])
def test_recorded_scores(key):
    candidates = [text.split() for text in CASE["candidates"]]
    references = [[text.split() for text in texts] for texts in CASE["references"]]
    found = scored(candidates, references)[key]
    np.testing.assert_allclose(found, CASE[key], rtol=1e-12)
    perturbed = np.array(CASE[key]) * (1 + 1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found, perturbed, rtol=1e-12)


def test_a_published_system_has_its_recorded_scores(shared_data):
    candidates, references, recorded = published_system(shared_data, "magic_result")
    found = scored(candidates, references)
    bleu = [recorded[f"Bleu_{order}"] for order in (1, 2, 3, 4)]
    np.testing.assert_allclose(found["corpus_bleu"], bleu, rtol=1e-5)
    rouge = np.mean(found["rouge_l"])
    assert rouge == pytest.approx(recorded["ROUGE_L"], rel=1e-5)
    df = DocumentFrequencies.from_references(references, eos=False)
    cider = np.mean(cider_d(candidates, references, df))
    assert cider == pytest.approx(recorded["CIDEr"], rel=1e-5)


def test_longest_common_subsequence():
    assert longest_common_subsequence(list("aab"), list("baa")) == 2
    # more tokens than a machine word has bits
    long = [str(index % 7) for index in range(300)]
    assert longest_common_subsequence(long, long) == 300


def test_captions_without_a_word_agree_with_each_other_alone():
    assert rouge_l([], [[]]) == 1.0
    assert rouge_l([], [["a"]]) == 0.0
    assert rouge_l(["a"], [[]]) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Bleu(0), "n is 0"),
        (lambda: RougeL(0), "beta is 0"),
        (lambda: bleu_counts(["a"], []), "^BLEU.* reference"),
        (lambda: rouge_l(["a"], []), "^ROUGE-L.* reference"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_count_is_clipped_at_the_largest_of_a_reference():
    counts = bleu_counts(["a", "a", "a"], [["a", "a"], ["a"]])
    assert counts[0] == 2


def test_the_beta_of_the_toolkit_is_the_default():
    one = {"references": [["a dog runs on grass"]]}
    found = RougeL()(None, ["a dog"], **one)
    assert found == RougeL(beta=1.2)(None, ["a dog"], **one)
