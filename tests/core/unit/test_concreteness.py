"""Sets of concreteness ratings, the released ICC scores on them, baselines by words and length."""

import pytest

from rewards.registry import build
from rl_caption.cli.main import main
from rl_caption.lab.meta_evaluation.figures import rated_figures
from rl_caption.lab.meta_evaluation.sets import load
from tests.judgement_sets_for_tests import BUILDERS

RATINGS = "Concreteness_ratings_Brysbaert_et_al_BRM.txt"
WORDS = "rewards.text.concreteness:WordConcreteness"


def words(folder, **options):
    BUILDERS["icc_words"](folder)
    return build(WORDS, ratings=str(folder / RATINGS), **options)


def test_the_first_captions_and_their_released_scores(tmp_path):
    BUILDERS["icc_captions"](tmp_path)
    (part,) = load("icc_captions", tmp_path, partial=True, kwargs={"first": 2})
    assert part.ratings == [3, 0]
    assert list(part.released.values()) == [[0.9, 0.1]]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (200, (0.691, 0.665, 0.538)),
        (None, (0.724, 0.749, 0.604)),
    ],
)
def test_released_scores_agree_with_people_as_the_paper_says(
    shared_data, first, expected
):
    """Yanuka et al. 2024 print 0.69, 0.67, 0.54 for 200 captions: the first of the 500 in the file."""
    folder = shared_data / "concreteness"
    (part,) = load("icc_captions", folder, kwargs={"first": first})
    (scores,) = part.released.values()
    found = {figure.name: figure.value for figure in rated_figures(part, scores)}
    names = ("pearson", "spearman", "tau_b")
    assert [found[name] for name in names] == pytest.approx(expected, abs=5e-4)


def test_the_published_ratings_of_words(shared_data):
    (nouns,) = load("icc_words", shared_data / "concreteness")
    assert len(nouns.image_ids) == 14_592
    reward = build(WORDS, ratings=str(shared_data / "concreteness" / RATINGS))
    # rows of the file
    assert reward(None, ["Essentialness", "avocado."]) == [1.04, 4.89]


def test_a_metric_that_needs_references_is_refused(tmp_path, capsys):
    BUILDERS["icc_captions"](tmp_path)
    command = f"judge --set icc_captions --data {tmp_path} --partial true"
    with pytest.raises(SystemExit):
        main([*command.split(), "--metrics", "rouge"])
    assert "references" in capsys.readouterr().err


def test_mean_concreteness_of_words(tmp_path):
    reward = words(tmp_path)
    captions = ["A Dog and a cat.", "Great meaning of baking soda", "dogs", "the day"]
    # Articles and "soda" are not in the small list; two-word expressions are not looked up.
    expected = [
        (4.85 + 4.86) / 2,
        (2.2 + 1.93) / 2,
        1.0,
        4.04,
    ]
    assert reward(None, captions) == pytest.approx(expected)
    assert reward.bounds == (1.0, 5.0)
    path = tmp_path / RATINGS
    path.write_text(path.read_text().replace("\ndog\t", '\n"day\t0\t1\nDog\t'))
    reward = build(WORDS, ratings=str(path))
    assert reward(None, ["a dog", "A DOG"]) == [4.85, 4.85]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Conc.M", "Mean", "Conc.M"),
        ("4.86", "5.86", "line 3: 'cat'"),
        ("4.86", "", "line 3"),
        ("\t0\t", "\t1\t", "no words"),
    ],
)
def test_a_wrong_list_of_words_is_named(tmp_path, old, new, message):
    BUILDERS["icc_words"](tmp_path)
    path = tmp_path / RATINGS
    count = -1 if message == "no words" else 1
    path.write_text(path.read_text().replace(old, new, count))
    with pytest.raises(ValueError, match=message):
        build(WORDS, ratings=str(path))
