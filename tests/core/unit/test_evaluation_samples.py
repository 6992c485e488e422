"""Several captions for each image: diversity, and the best of k."""

import numpy as np
import pytest

from rl_caption.evaluation.metrics import EvaluationError, validation_cider
from rl_caption.evaluation.samples import best_of, evaluate_samples
from tests.captions_for_tests import CAPTIONS, REFERENCES

SAMPLES = {
    image_id: [text, "a man on a wave", REFERENCES[image_id][0]]
    for image_id, text in CAPTIONS.items()
}


def test_best_of_k_by_hand():
    scores = np.array([[1.0, 4.0, 2.0]])
    similarity = np.array([[[1.0, 0.1, 0.5], [0.1, 1.0, 0.3], [0.5, 0.3, 1.0]]])
    one, two, three = best_of(scores, similarity)
    assert one == (1.0, 1.0, 1.0)
    assert two == (2.5, 4.0, 1.0), "two are as similar to each other: the first"
    assert three == pytest.approx((7 / 3, 4.0, 2.0)), (
        "the third has 0.8, the others 0.6 and 0.4"
    )


def test_of_equally_similar_captions_the_first_is_the_choice_whatever_rounding_says():
    """All captions are to the others 0.1, 0.2 and 0.3, in another order; what each is to itself
    does not count.
    """
    near = np.array(
        [
            [0.7, 0.1, 0.2, 0.3],
            [0.1, 0.9, 0.3, 0.2],
            [0.2, 0.3, 1e9, 0.1],
            [0.3, 0.2, 0.1, 0.3],
        ]
    )
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0], [1, 3, 0, 2]):
        (last,) = best_of(
            np.array([[1.0, 2.0, 3.0, 4.0]]), near[order][:, order][None]
        )[3:]
        assert last.consensus == 1.0


def test_scores_are_those_of_validation():
    found = evaluate_samples(SAMPLES, REFERENCES)
    each = [
        validation_cider({key: own[i] for key, own in SAMPLES.items()}, REFERENCES)
        for i in range(3)
    ]
    assert found.best_of[0].mean == pytest.approx(each[0])
    assert found.best_of[-1].mean == pytest.approx(sum(each) / 3)


def test_diversity_of_copies_and_of_different_captions():
    copies = evaluate_samples(
        {key: [text] * 3 for key, text in CAPTIONS.items()}, REFERENCES
    ).metrics
    assert copies["mBLEU-4"] == pytest.approx(1.0, abs=1e-6)
    assert copies["self-CIDEr"] == pytest.approx(0.0, abs=1e-6)
    words = {key: len(text.split()) for key, text in CAPTIONS.items()}
    distinct = {key: len(set(text.split())) for key, text in CAPTIONS.items()}
    assert copies["Div-1"] == pytest.approx(
        sum(distinct[key] / words[key] / 3 for key in words) / 4
    )
    other = evaluate_samples(
        {
            "1": ["a red dog barks", "two cats sleep here"],
            "2": ["some trains were parked", "one bus drives by"],
        },
        REFERENCES,
    ).metrics
    assert other["self-CIDEr"] == pytest.approx(1.0)
    assert other["mBLEU-4"] < 1e-3
    assert (other["Div-1"], other["Div-2"]) == (1.0, 6 / 8)


def test_mbleu_is_the_mean_of_the_toolkits_corpus_scores():
    from pycocoevalcap.bleu.bleu import Bleu

    texts = {
        key: [" ".join(text.split()) for text in own] for key, own in SAMPLES.items()
    }
    scores = []
    for i in range(3):
        others = {key: own[:i] + own[i + 1 :] for key, own in texts.items()}
        scores.append(
            Bleu(4).compute_score(
                others, {key: [own[i]] for key, own in texts.items()}, verbose=0
            )[0][3]
        )
    assert evaluate_samples(SAMPLES, REFERENCES).metrics["mBLEU-4"] == pytest.approx(
        sum(scores) / 3
    )


def test_bad_input_is_named():
    for samples, references, message in (
        ({"1": ["a", "b"], "2": ["a"]}, REFERENCES, r"image '2'.*2"),
        ({"1": "ab"}, REFERENCES, "image '1' are 'ab'"),
        ({"9": ["a", "b"]}, REFERENCES, "'9'"),
    ):
        with pytest.raises(EvaluationError, match=message):
            evaluate_samples(samples, references)  # type: ignore[arg-type]
