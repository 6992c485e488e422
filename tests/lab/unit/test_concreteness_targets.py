"""Length standardisation, logistic regression, and the program that writes targets for a student."""

import json
import math

import numpy as np
import pytest

from rl_caption.cli.main import main
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json_lines
from rl_caption.data.formats import rows_of
from rl_caption.data.published import caption_targets
from rl_caption.lab.concreteness import (
    Combination,
    fit_combination,
    make_targets,
    standardize,
)
from rl_caption.lab.config import ConcretenessConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError


class Share:
    """Share of the caption's characters that are a letter."""

    columns, bounds = frozenset[str](), (0.0, 1.0)

    def __init__(self, letter: str, scale: float = 1.0) -> None:
        self.letter, self.scale = letter, scale
        self.__name__ = self.signature = f"share of {letter}"

    def __call__(self, prompts, completions, **columns):
        return [
            self.scale * text.count(self.letter) / len(text) for text in completions
        ]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(("reading", "mean"), [("logit", 0.5), ("median", 0.0)])
def test_standardisation_by_hand(reading, mean):
    # logit(1/2) = 0 and logit(0.8) = ln 4: mean ln 2, deviation ln 2, so z is -1 and 1.
    found = standardize(
        [0.5, 0.8, 0.3],
        [4, 4, 7],
        reading,
    )
    assert found.tolist() == pytest.approx(
        [sigmoid(mean - 1), sigmoid(mean + 1), sigmoid(mean)]
    )
    assert np.median(found) == pytest.approx(
        {"logit": 0.6224593, "median": 0.5}[reading]
    )


def test_ends_are_clipped_and_others_refused():
    # logit(0.1) = -ln 9 and logit(0.9) = ln 9: z is -1 and 1 again.
    found = standardize([0.0, 1.0], [1, 1], "median", margin=0.1)
    assert found.tolist() == pytest.approx([sigmoid(-1), sigmoid(1)])
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"score is {wrong}:"):
            standardize([0.5, wrong], [1, 1])


@pytest.mark.parametrize("l2", [0.0, 1.0, 10.0])
def test_logistic_regression_is_the_optimum(l2):
    """By the first-order conditions."""
    generator = np.random.default_rng(1)
    scores = generator.normal(size=(200, 2))
    chances = 1 / (1 + np.exp(0.5 - scores @ [2, -1]))
    labels = generator.random(200) < chances
    found = fit_combination(scores, labels, l2)
    residual = labels - found(scores)
    assert residual.sum() == pytest.approx(0, abs=1e-3)
    slopes = scores.T @ residual
    assert slopes == pytest.approx(l2 * np.array(found.weights), abs=1e-3)
    combined = Combination([1.0, -2.0], 0.5)([[0.5, 1.0]])
    assert combined.tolist() == pytest.approx([sigmoid(-1.0)])


CAPTIONS = [
    "a cat",
    "two cats",
    "a great day",
    "bees",
    "an aardvark and a cat",
    "the sea",
]


def config(folder, **changes):
    (folder / "captions.txt").write_text("\n".join([*CAPTIONS, "", "a  cat"]))
    ratings = [
        {"caption": "a cat", "rating": 3},
        {"caption": "the sea", "rating": 2},
        {"caption": "a great day", "rating": 0},
        {"caption": "a cat", "rating": 2},
        {"caption": "nothing much", "rating": 1},
    ]
    write_json_lines(folder / "ratings.jsonl", ratings)
    scorers = {}
    for letter in "at":
        kwargs = {"letter": letter}
        scorers[letter] = JudgeConfig(target=f"{__name__}:Share", kwargs=kwargs)
    values = {"scorers": scorers, "out": str(folder / "out")} | changes
    return ConcretenessConfig(captions=str(folder / "captions.txt"), **values)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_ratings_each_scorer_has_targets_of_its_own(tmp_path):
    make_targets(config(tmp_path))
    out = tmp_path / "out"
    scores = [caption.count("a") / len(caption) for caption in CAPTIONS]
    expected = standardize(
        scores, [len(caption.split()) for caption in CAPTIONS]
    ).tolist()
    found = read(out / "targets_a.jsonl")
    assert [line["caption"] for line in found] == CAPTIONS, (
        "a caption counts a single time"
    )
    assert [line["target"] for line in found] == pytest.approx(expected)
    assert [line["a"] for line in read(out / "scores.jsonl")] == pytest.approx(expected)
    rows = rows_of(
        caption_targets(out / "targets_a.jsonl", val_fraction=0.4), checked=True
    )
    assert [*rows] == ["train", "val"]


def features(captions):
    rows = []
    for text in captions:
        rows.append([text.count(letter) / len(text) for letter in "at"])
    return rows


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_with_ratings_scores_are_combined(tmp_path, capsys, suffix):
    """CSV is that of the authors."""
    config(tmp_path)
    ratings = read(tmp_path / "ratings.jsonl")
    lines = ["sample_id,caption,concreteness_annotation,icc_score"]
    lines += [f"1.0e+12,{one['caption']},{one['rating']},0.5" for one in ratings]
    (tmp_path / "ratings.csv").write_text("\n".join(lines))
    words = [f"--captions={tmp_path}/captions.txt", f"--out={tmp_path}/out"]
    words += [
        f"--ratings={tmp_path}/ratings.{suffix}",
        "--standardize=none",
        "--l2=0.5",
    ]
    for letter in "at":
        words.append(f"--scorers.{letter}.target={__name__}:Share")
        words.append(f"--scorers.{letter}.kwargs.letter={letter}")
    assert main(["concreteness", *words]) == 0
    # Mean ratings 2.5, 2, 0, 1: the median is 1.5.
    rated = ["a cat", "the sea", "a great day", "nothing much"]
    expected = fit_combination(
        features(rated),
        [True, True, False, False],
        0.5,
    )
    summary = json.loads(capsys.readouterr().out)
    assert summary["intercept"] == pytest.approx(expected.intercept)
    assert [*summary["weights"].values()] == pytest.approx(expected.weights)
    found = [line["target"] for line in read(tmp_path / "out" / "targets.jsonl")]
    assert found == pytest.approx(expected(features(CAPTIONS)).tolist())


def test_wrong_ratings_are_named_before_anything_is_scored(tmp_path):
    made = config(
        tmp_path,
        ratings=str(tmp_path / "ratings.jsonl"),
        scorers={"x": JudgeConfig(target="nowhere:Never")},
    )
    for line, error, message in (
        ('{"caption": "a cat"}', DataError, r"ratings\.jsonl.*'a cat'"),
        ('{"caption": "a cat", "rating": NaN}', DataError, "rating.*'a cat'"),
        ('{"caption": "b", "rating": 1}', ConfigError, r"ratings.*none of 2"),
    ):
        (tmp_path / "ratings.jsonl").write_text(
            '{"caption": "a", "rating": 1}\n' + line
        )
        with pytest.raises(error, match=message):
            make_targets(made)
