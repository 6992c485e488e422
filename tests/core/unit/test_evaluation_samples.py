"""Several captions for each image: diversity, and the best of k."""

import numpy as np
import pytest
from pycocoevalcap.bleu.bleu import Bleu

from rl_caption.evaluation.metrics import EvaluationError
from rl_caption.evaluation.samples import best_of, evaluate_samples
from tests.captions_for_tests import CAPTIONS, REFERENCES

SAMPLES = {
    image_id: [text, "a man on a wave", REFERENCES[image_id][0]]
    for image_id, text in CAPTIONS.items()
}


def test_best_of_k_by_hand():
    scores = np.array([[1.0, 4.0, 2.0]])
    similarity = np.array(
        [
            [
                [1.0, 0.1, 0.5],
                [0.1, 1.0, 0.3],
                [0.5, 0.3, 1.0],
            ]
        ]
    )
    one, two, three = best_of(scores, similarity)
    assert one == (1.0, 1.0, 1.0)
    # two are as similar to each other: the first
    assert two == (2.5, 4.0, 1.0)
    # the third has 0.8, the others 0.6 and 0.4
    assert three == pytest.approx((7 / 3, 4.0, 2.0))


@pytest.mark.parametrize(
    "order",
    [
        [0, 1, 2, 3],
        [2, 0, 3, 1],
        [3, 2, 1, 0],
    ],
)
def test_of_equally_similar_captions_the_first_is_the_choice_despite_rounding(order):
    """All captions are to the others 0.1, 0.2 and 0.3, in another order; what each is
    to itself does not count.
    """
    near = np.array(
        [
            [0.7, 0.1, 0.2, 0.3],
            [0.1, 0.9, 0.3, 0.2],
            [0.2, 0.3, 1e9, 0.1],
            [0.3, 0.2, 0.1, 0.3],
        ]
    )
    scores = np.array([[1.0, 2.0, 3.0, 4.0]])
    best = best_of(scores, near[order][:, order][None])
    assert best[3].consensus == 1.0


def test_diversity_of_copies_and_of_different_captions():
    copied = {key: [text] * 3 for key, text in CAPTIONS.items()}
    copies = evaluate_samples(copied, REFERENCES).metrics
    assert copies["mBLEU-4"] == pytest.approx(1.0, abs=1e-6)
    assert copies["self-CIDEr"] == pytest.approx(0.0, abs=1e-6)
    shares = []
    for text in CAPTIONS.values():
        words = text.split()
        shares.append(len(set(words)) / len(words) / 3)
    assert copies["Div-1"] == pytest.approx(sum(shares) / 4)
    different = {
        "1": ["a red dog barks", "two cats sleep here"],
        "2": ["some trains were parked", "one bus drives by"],
    }
    other = evaluate_samples(different, REFERENCES).metrics
    assert other["self-CIDEr"] == pytest.approx(1.0)
    assert other["mBLEU-4"] < 1e-3
    assert other["Div-1"] == 1.0
    assert other["Div-2"] == 6 / 8


def test_mbleu_is_the_mean_of_the_toolkits_corpus_scores():
    scores = []
    for i in range(3):
        singles = {key: [own[i]] for key, own in SAMPLES.items()}
        others = {key: own[:i] + own[i + 1 :] for key, own in SAMPLES.items()}
        totals, _ = Bleu(4).compute_score(others, singles, verbose=0)
        scores.append(totals[3])
    found = evaluate_samples(SAMPLES, REFERENCES).metrics
    assert found["mBLEU-4"] == pytest.approx(sum(scores) / 3)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"1": ["a", "b"], "2": ["a"]}, r"image '2'.*2"),
        ({"1": "ab"}, "image '1' are 'ab'"),
        ({"9": ["a", "b"]}, "'9'"),
    ],
)
def test_bad_input_is_named(samples, message):
    with pytest.raises(EvaluationError, match=message):
        evaluate_samples(samples, REFERENCES)
