"""Intervals and paired tests, against scipy and against the metrics of resampled captions."""

import numpy as np
import pytest
from scipy import stats

from rl_caption.evaluation import Evaluation, EvaluationError, evaluate_captions
from rl_caption.evaluation.confidence import (
    bleu_of_sums,
    check_same_images,
    compare,
    with_intervals,
)
from rl_caption.evaluation.results import format_differences
from tests.captions_for_tests import CAPTIONS, REFERENCES


def of_means(values, key="SPICE"):
    """An evaluation whose metric is the mean of ``values``."""
    per_image = {}
    for number, value in enumerate(values.tolist()):
        per_image[str(number)] = {key: value}
    mean = float(values.mean())
    return Evaluation({key: mean}, "S", len(values), per_image=per_image)


def evaluated(captions, *names):
    return evaluate_captions(captions, REFERENCES, metrics=names, tokenizer="none")


def test_intervals_equal_scipys():
    values = np.random.default_rng(1).gamma(2.0, size=40)
    found = with_intervals(of_means(values), 20000)
    wanted = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=20000,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(2),
    )
    # Two draws of 20000 resamples: their quantiles differ by about 1 % of the width.
    low, high = wanted.confidence_interval
    interval = pytest.approx((low, high), abs=0.04 * (high - low))
    assert found.intervals["SPICE"] == interval
    text = "95 % percentile bootstrap over images, 20000 resamples, seed 0"
    assert found.interval == text


def test_p_equals_scipys_exact_test():
    generator = np.random.default_rng(3)
    first = generator.normal(size=9)
    second = first + generator.normal(0.5, 1.0, size=9)
    wanted = stats.permutation_test(
        (second, first),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
    )
    found = compare(of_means(first), of_means(second), 20000)["SPICE"]
    assert wanted.null_distribution.size == 2**9, "scipy goes through all exchanges"
    error = 4 * np.sqrt(wanted.pvalue / 20000)
    assert found["p"] == pytest.approx(wanted.pvalue, abs=error)
    assert found["difference"] == pytest.approx(wanted.statistic, rel=1e-12)
    low, high = found["interval"]
    assert low < found["difference"] < high


def test_equal_systems_do_not_differ_in_any_order_of_images():
    reverse = dict(reversed(CAPTIONS.items()))
    one, other = (
        evaluated(captions, "bleu", "rouge", "cider")
        for captions in (CAPTIONS, reverse)
    )
    assert with_intervals(one, 200).intervals == with_intervals(other, 200).intervals
    for found in compare(one, other, 50).values():
        assert found["difference"] == 0.0
        assert found["interval"] == (0.0, 0.0)
        assert found["p"] == 1.0
    without_bleu = evaluated(CAPTIONS, "rouge")
    assert list(compare(one, without_bleu, 10)) == ["ROUGE-L"]


@pytest.mark.parametrize("words", [99, 3])  # whole, shorter than references
def test_bleu_is_resampled_by_its_counts(words):
    captions = {key: " ".join(text.split()[:words]) for key, text in CAPTIONS.items()}
    drawn = [2, 0, 1, 1]
    counts = evaluated(captions, "bleu").bleu_counts
    (values,) = bleu_of_sums(np.array([drawn]) @ counts)
    ids = np.repeat([*"1234"], drawn)
    again = evaluate_captions(
        {str(place): captions[key] for place, key in enumerate(ids)},
        {str(place): REFERENCES[key] for place, key in enumerate(ids)},
        metrics=("bleu",),
        tokenizer="none",
    )
    expected = [again.metrics[f"BLEU-{n}"] for n in (1, 2, 3, 4)]
    assert values == pytest.approx(expected, rel=1e-9)


def test_intervals_are_drawn_anew_from_their_seed():
    one = evaluated(CAPTIONS, "bleu", "rouge", "cider")
    first, again, other = (
        with_intervals(one, 300, seed=seed).intervals for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert set(first) == {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr"}
    for key, (low, high) in first.items():
        assert low <= one.metrics[key] <= high
    assert with_intervals(one, 0) == one


def test_systems_of_other_images_are_refused():
    with pytest.raises(EvaluationError, match="2 of 4"):
        compare(of_means(np.arange(4.0)), of_means(np.arange(2.0)), 10)
    systems = ({"1": "", "2": ""}, {"1": ""})
    with pytest.raises(EvaluationError, match=r"1 of 2.*a.json.*b.json.*\['2'\]"):
        check_same_images(*systems, ["a.json", "b.json"])


def test_the_table_names_direction_and_units():
    differences = compare(of_means(np.zeros(4)), of_means(np.ones(4)), 19)
    assert differences["SPICE"]["p"] == 2 / 2**4, (
        "one exchange of 16, in two directions"
    )
    lines = format_differences(differences, ["xe", "rl"], 19).splitlines()
    assert lines[2].startswith(
        "| SPICE (x100) | 0.00 | 100.00 | +100.00 | +100.00 to +100.00 | 0."
    )
    assert lines[-1].startswith("difference: rl minus xe")
