"""Sets of concreteness ratings, the released ICC scores on them, and the baselines on words and
length.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from rewards.registry import build
from rl_caption.cli.main import main
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.figures import rated_figures
from rl_caption.lab.meta_evaluation.program import compare_with_people
from rl_caption.lab.meta_evaluation.sets import load
from rl_caption.runtime.errors import ConfigError
from tests.judgement_sets_for_tests import BUILDERS

RATINGS = "Concreteness_ratings_Brysbaert_et_al_BRM.txt"
WORDS = "rewards.text.concreteness:WordConcreteness"


def words(folder: Path, **options: Any) -> Any:
    BUILDERS["icc_words"](folder)
    return build(WORDS, ratings=str(folder / RATINGS), **options)


def test_captions_and_their_released_scores(tmp_path):
    BUILDERS["icc_captions"](tmp_path)
    (found,) = load("icc_captions", tmp_path, partial=True)
    assert found.captions[0] == "A dog, on a couch"
    assert (found.ratings, found.images, found.references) == ([3, 0, 2, 1], [], [])
    assert list(found.released.values()) == [[0.9, 0.1, 1.02, 0.05]]
    (part,) = load("icc_captions", tmp_path, partial=True, kwargs={"first": 2})
    assert (part.ratings, list(part.released.values())) == ([3, 0], [[0.9, 0.1]])
    for first in (1, "2"):
        with pytest.raises(ConfigError, match=f"first is {first!r}: expected"):
            load("icc_captions", tmp_path, partial=True, kwargs={"first": first})


def test_words_by_their_part_of_speech(tmp_path):
    BUILDERS["icc_words"](tmp_path)
    (nouns,) = load("icc_words", tmp_path, partial=True)
    assert (nouns.captions, nouns.ratings) == (
        ["dog", "cat", "day", "meaning"],
        [4.85, 4.86, 4.04, 1.93],
    )
    assert nouns.excluded == {"Dom_Pos is not Noun": 2}


@pytest.mark.parametrize(
    ("first", "expected"), [(200, (0.691, 0.665, 0.538)), (None, (0.724, 0.749, 0.604))]
)
def test_released_scores_agree_with_people_as_the_paper_says(
    shared_data, first, expected
):
    """Yanuka et al. 2024 print 0.69, 0.67, 0.54 for 200 captions: the first of the 500 in the file."""
    (part,) = load(
        "icc_captions", shared_data / "concreteness", kwargs={"first": first}
    )
    (scores,) = part.released.values()
    found = {
        figure.name: figure.value
        for figure in rated_figures(part, scores)
        if figure.published
    }
    assert [found[name] for name in ("pearson", "spearman", "tau_b")] == pytest.approx(
        expected, abs=5e-4
    )
    shifted = rated_figures(part, [*scores[1:], scores[0]])
    assert all(
        abs(figure.value or 0) < 0.2 for figure in shifted if figure.published
    ), "the scores of other captions"


def test_the_published_ratings_of_words(shared_data):
    (nouns,) = load("icc_words", shared_data / "concreteness")
    assert len(nouns.image_ids) == 14_592
    reward = build(WORDS, ratings=str(shared_data / "concreteness" / RATINGS))
    assert reward(None, ["Essentialness", "avocado."]) == [1.04, 4.89], (
        "rows of the file"
    )


def test_figures_of_captions_without_images(tmp_path, capsys):
    BUILDERS["icc_captions"](tmp_path)
    words(tmp_path)
    arguments = [
        "--set",
        "icc_captions",
        "--data",
        str(tmp_path),
        "--metrics",
        "length",
        "--partial",
        "true",
    ]
    arguments += [
        "--judges.words.target",
        WORDS,
        "--judges.words.kwargs.ratings",
        str(tmp_path / RATINGS),
    ]
    assert (
        main(["judge", *arguments, "--bootstrap", "50", "--out", str(tmp_path / "out")])
        == 0
    )
    shown = capsys.readouterr().out
    assert "4 judgements of captions, 4 different ratings" in shown
    assert "50 resamples of captions" in shown
    (result,) = json.loads((tmp_path / "out" / "agreement.json").read_text())["sets"]
    assert list(result["figures"]) == ["ICC (released scores)", "length", "words"]
    ratings, length = [3, 0, 2, 1], [5, 3, 5, 5]
    found = {figure["name"]: figure["value"] for figure in result["figures"]["length"]}
    assert found["pearson"] == pytest.approx(stats.pearsonr(length, ratings).statistic)
    assert found["spearman"] == pytest.approx(
        stats.spearmanr(length, ratings).statistic
    )
    assert found["tau_b"] == pytest.approx(stats.kendalltau(length, ratings).statistic)
    # Of the six pairs of (0.9, 0.1, 1.02, 0.05) and (3, 0, 2, 1), two are discordant.
    released = {
        figure["name"]: figure["value"]
        for figure in result["figures"]["ICC (released scores)"]
    }
    assert released["tau_b"] == pytest.approx((4 - 2) / 6)
    in_main_table = {
        figure["name"]
        for figure in result["figures"]["length"]
        if figure["table"] == "main"
    }
    assert in_main_table == {"pearson", "spearman", "tau_b", "tau_c"}


def test_metrics_that_need_more_than_the_caption_are_refused(tmp_path):
    BUILDERS["icc_captions"](tmp_path)
    config = JudgeSetConfig(
        set="icc_captions",
        data=str(tmp_path),
        metrics="rouge",
        partial=True,
        out=str(tmp_path / "out"),
    )
    with pytest.raises(ConfigError, match=r"references.*icc_captions"):
        compare_with_people(config)


def test_mean_concreteness_of_words(tmp_path):
    reward = words(tmp_path)
    captions = [
        "A Dog and a cat.",
        "Great meaning of baking soda",
        "dogs",
        "",
        "the day",
    ]
    # Articles and "soda" are not in the small list; two-word expressions are not looked up.
    assert reward(None, captions) == pytest.approx(
        [(4.85 + 4.86) / 2, (2.2 + 1.93) / 2, 1.0, 1.0, 4.04]
    )
    assert reward.bounds == (1.0, 5.0)


def test_words_of_the_list_are_found_in_lower_case(tmp_path):
    BUILDERS["icc_words"](tmp_path)
    path = tmp_path / RATINGS
    path.write_text(path.read_text().replace("\ndog\t", "\nDog\t"))
    assert build(WORDS, ratings=str(path))(None, ["a dog", "A DOG"]) == [4.85, 4.85]


def test_a_wrong_list_of_words_is_named(tmp_path):
    BUILDERS["icc_words"](tmp_path)
    path, wrong = tmp_path / RATINGS, tmp_path / "wrong.txt"
    for old, new, message in (
        ("Conc.M", "Mean", r"wrong\.txt.*\['Conc.M'\]"),
        ("4.86", "5.86", "line 3: 'cat'.*5.86"),
        ("4.86", "", "line 3"),
    ):
        wrong.write_text(path.read_text().replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            build(WORDS, ratings=str(wrong))
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        build(WORDS, ratings=str(tmp_path / "nowhere.txt"))


def test_length_counts_words():
    reward = build("rewards.text.concreteness:CaptionLength")
    assert reward(None, ["a  red circle", ""]) == [3.0, 0.0]
    assert reward.bounds == (0.0, math.inf)
