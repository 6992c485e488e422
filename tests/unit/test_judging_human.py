"""Correlation with ratings by hand, and files of ratings."""

import json
import math
import random
from itertools import combinations

import pytest
from scipy import stats

from rewards.registry import build
from rl_caption.data.base import DataError
from rl_caption.meta_evaluation.ratings import correlations, pearson, read_ratings, unfitted

SCORES, RATINGS = [0.0, 1.0, 2.0, 1.0], [1.0, 2.0, 4.0, 5.0]
# Means 1 and 3. Deviations -1 0 1 0 and -2 -1 1 2: products 3, squares 2 and 10.
PCC = 3 / math.sqrt(20)


def test_pearson_and_both_readings_of_one_minus_r2_by_hand():
    found = correlations(SCORES, RATINGS)
    assert found.pearson == pytest.approx(PCC)
    assert found.inverse_r_squared == pytest.approx(20 / 9)
    # Differences 1 1 2 4: squares 22.
    assert found.unfitted_ratings == pytest.approx(22 / 10)
    assert found.unfitted_scores == pytest.approx(22 / 2)
    # Pairs: 01 C, 02 C, 03 C, 12 C, 13 tied score, 23 D.
    assert found.tau_b == pytest.approx(3 / math.sqrt(5 * 6))
    assert found.tau_c == pytest.approx(2 * 3 / (16 * 2 / 3))
    assert found.sample_tau_b is None
    assert found.notes == []
    assert found.count == 4


def test_scale_matters_to_the_unfitted_reading_only():
    scaled = correlations([10 * score for score in SCORES], RATINGS)
    assert scaled.pearson == pytest.approx(PCC)
    assert scaled.inverse_r_squared == pytest.approx(20 / 9)
    assert scaled.unfitted_ratings == pytest.approx((1 + 64 + 256 + 25) / 10)
    tiny = correlations([score * 1e-4 for score in SCORES], RATINGS)
    assert tiny.unfitted_scores > 1e7
    assert tiny.unfitted_ratings < 10


def test_the_reading_of_the_specs_paper():
    pcc, printed = 0.5228, 3.65  # the row of SPECS in the SPECS paper, table 2: PCC and "1 - R^2"
    # y = pcc * x + the rest, which is orthogonal to x, so that the correlation is pcc.
    x, rest = [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]
    y = [pcc * a + math.sqrt(1 - pcc**2) * b for a, b in zip(x, rest, strict=True)]
    assert pearson(x, y) == pytest.approx(pcc)
    assert correlations(x, y).inverse_r_squared == pytest.approx(printed, rel=0.006)


def test_sample_wise_tau_is_within_groups():
    # Within each image the order is right, between the images it is not.
    found = correlations([5, 6, 1, 2], [1, 2, 3, 4], ["a", "a", "b", "b"])
    assert found.sample_tau_b is not None
    assert (found.sample_tau_b.mean, found.sample_tau_b.groups) == (1, 2)
    assert found.tau_b == pytest.approx((2 - 4) / 6)


def test_undefined_values_are_none_with_a_reason():
    found = correlations([1.0, 1.0], [1.0, 2.0], ["a", "b"])
    assert found.pearson is found.inverse_r_squared is found.tau_b is found.tau_c is None
    assert found.unfitted_scores is None
    assert found.unfitted_ratings == pytest.approx(1 / 0.5)
    assert found.sample_tau_b is None
    assert any("pearson: all 2 scores are 1" in note for note in found.notes)
    assert any("sample-wise: none of 2 groups has different ratings" in note for note in found.notes)
    with pytest.raises(ValueError, match="rating 1 is nan"):
        correlations([1, 2], [1, math.nan])
    with pytest.raises(ValueError, match="2 scores and 3 ratings"):
        correlations([1, 2], [1, 2, 3])
    assert unfitted([1, 2], [1, 2]) == 0


def test_all_agree_with_scipy_and_with_counting_pairs():
    """Ties in both, as ratings have; sample-wise by a plain loop over images."""
    numbers = random.Random(3)
    scores = [numbers.randrange(12) / 4 for _ in range(60)]
    ratings = [float(numbers.randrange(1, 6)) for _ in scores]
    images = [index // 5 for index in range(60)]
    found = correlations(scores, ratings, images)
    assert found.pearson == pytest.approx(stats.pearsonr(scores, ratings)[0])
    assert found.inverse_r_squared == pytest.approx(1 / stats.linregress(scores, ratings).rvalue ** 2)
    assert found.tau_b == pytest.approx(stats.kendalltau(scores, ratings, variant="b").statistic)
    assert found.tau_c == pytest.approx(stats.somersd(ratings, scores).statistic * somers_to_tau_c(ratings, scores))
    own = [
        stats.kendalltau(scores[start : start + 5], ratings[start : start + 5]).statistic for start in range(0, 60, 5)
    ]
    assert found.sample_tau_b is not None
    assert found.sample_tau_b.mean == pytest.approx(sum(0 if math.isnan(tau) else tau for tau in own) / len(own))


def somers_to_tau_c(x, y):
    """Somers' D is (C - D) over the pairs whose x differ; tau_c takes n^2 (m - 1) / 2m in their place."""
    different = sum(a != b for a, b in combinations(x, 2))
    m = min(len(set(x)), len(set(y)))
    return different * 2 * m / (len(x) ** 2 * (m - 1))


def test_no_correlation_has_no_inverse():
    found = correlations([1, 2, 1, 2], [1, 1, 2, 2])
    assert found.pearson == 0
    assert found.inverse_r_squared is None
    assert "1 / PCC^2: the PCC is 0" in found.notes


def lines(tmp_path, *rows):
    path = tmp_path / "ratings.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_json_lines(tmp_path):
    row = {"image": "a.jpg", "caption": "A dog.", "rating": 3}
    found = read_ratings(lines(tmp_path, row, "", {**row, "rating": 4.5, "group": 7, "system": "x"}))
    assert (found.images, found.captions, found.ratings) == (["a.jpg"] * 2, ["A dog."] * 2, [3.0, 4.5])
    assert found.groups == ["a.jpg", "7"]
    assert found.columns("photos") == {"image": ["photos/a.jpg"] * 2, "image_id": ["a.jpg"] * 2}
    with_references = read_ratings(lines(tmp_path, {**row, "references": ["a dog", "dogs"]}))
    assert with_references.columns()["references"] == [["a dog", "dogs"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rating": "3"}, r"line 2: 'rating' is '3': expected a finite number"),
        ({"rating": True}, r"line 2: 'rating' is True"),
        ({"caption": " "}, r"line 2: 'caption' is ' ': expected text"),
        ({"image": None}, r"line 2: 'image' is None: expected text"),
        ({"group": [1]}, r"line 2: 'group' is \[1\]"),
        ({"references": []}, r"line 2: 'references' is \[\]: expected a list of at least one text"),
        ({"references": ["a dog"]}, r"line 1 has no 'references', other rows have"),
    ],
)
def test_wrong_rows_are_named(tmp_path, change, message):
    row = {"image": "a.jpg", "caption": "A dog.", "rating": 3}
    with pytest.raises(DataError, match=message):
        read_ratings(lines(tmp_path, row, {**row, **change}))


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no ratings"):
        read_ratings(lines(tmp_path, ""))
    with pytest.raises(DataError, match="line 1 is not JSON"):
        read_ratings(lines(tmp_path, "image,caption"))
    with pytest.raises(DataError, match=r"line 1 is '\[1\]': expected an object"):
        read_ratings(lines(tmp_path, "[1]"))
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        read_ratings(tmp_path / "missing.jsonl")


def test_flickr8k(tmp_path):
    judgements = [{"caption": "A  dog .", "rating": 2.0}, {"caption": "A cat", "rating": math.nan}]
    content = {"1_a": {"image_path": "d/1_a.jpg", "ground_truth": ["a dog  runs"], "human_judgement": judgements}}
    path = tmp_path / "flickr8k.json"
    path.write_text(json.dumps(content))
    found = read_ratings(path)
    assert (found.images, found.captions, found.ratings, found.groups) == (["d/1_a.jpg"], ["A dog ."], [2.0], ["1_a"])
    assert found.references == [["a dog runs"]]
    judgements[0]["rating"] = None
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="'1_a', human_judgement 0: 'rating' is None"):
        read_ratings(path)


def test_flickr8k_expert_as_published(shared_data):
    found = read_ratings(shared_data / "flickr8k" / "flickr8k.json")
    assert len(found.ratings) == 16992
    # pycocoevalcap 1.2 on the same 16992 ratings: tau_c of ROUGE-L, x100, 32.314.
    scores = build("rouge_l")(None, found.captions, **found.columns())
    assert correlations(scores, found.ratings).tau_c == pytest.approx(0.32314, abs=5e-6)


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "ratings.jsonl"
    row = {"image": "a.jpg", "caption": "A dog.\u2028It\u0085runs.", "rating": 3}
    path.write_text("\n".join([json.dumps(row, ensure_ascii=False)] * 2), encoding="utf-8")
    assert read_ratings(path).captions == [row["caption"]] * 2
