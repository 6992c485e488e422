"""Rewards by name: listing, building, and what is refused."""

import math
import sys

import pytest

from rewards.registry import REWARDS, available, build, load, parameters
from rewards.text.cider import CiderD


class WordCount:
    """Number of words, as often as asked."""

    __name__ = "words"
    columns = frozenset({"image_id"})
    bounds = (0.0, math.inf)
    signature = "words"

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, prompts, completions, **columns):
        return [self.factor * len(text.split()) for text in completions]


class NoReward:
    """Has nothing that a reward has."""


def test_every_name_names_a_class():
    assert available() == sorted(REWARDS)
    for name in available():
        assert isinstance(load(name), type)
        assert isinstance(parameters(name), list)


def test_build_passes_arguments_and_takes_targets_from_outside():
    assert isinstance(build("cider", eos=False), CiderD)
    assert build("bleu", n=2).__name__ == "bleu2"
    made = build(f"{__name__}:WordCount", factor=2)
    assert made(None, ["a b"]) == [4]


def test_what_cannot_be_built_is_explained():
    wrong = [
        ("cidr", {}, r"reward is 'cidr' \(.*cider\?\).*bertscore"),
        ("cider", {"sigmaa": 1}, r"'cider'.*sigma"),
        (
            "rewards.clipscore:ClipScore",
            {},
            "rewards.clipscore:ClipScore.*No module named",
        ),
        ("rewards.text.cider:CiderE", {}, "'CiderE'"),
        (f"{__name__}:NoReward", {}, "not a reward"),
        ("specs", {}, "backbone"),
        ("cider", {"tokenizer": "ptbb"}, "tokenizer is .ptbb.: expected ptb"),
    ]
    for name, kwargs, message in wrong:
        with pytest.raises(ValueError, match=message):
            build(name, **kwargs)


class WithoutColumns:
    """Its call does not take the columns that it does not read."""

    __name__, columns, bounds, signature = (
        "without_columns",
        frozenset(),
        (0.0, 1.0),
        "",
    )

    def __call__(self, prompts, completions):
        return [0.0 for _ in completions]


class OddBounds(WordCount):
    """The larger bound comes first."""

    bounds = (1.0, 0.0)


class NoBounds(WordCount):
    bounds = None


@pytest.mark.parametrize("name", ["WithoutColumns", "OddBounds", "NoBounds"])
def test_a_reward_that_cannot_be_called_or_has_no_bounds_is_refused(name):
    with pytest.raises(ValueError, match=name):
        build(f"tests.core.unit.test_reward_registry:{name}")


def test_the_working_directory_is_searched_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rewards_of_a_test.py").write_text(
        "from tests.core.unit.test_reward_registry import WordCount\n"
    )
    with pytest.raises(ValueError, match="rewards_not_there"):
        build("rewards_not_there:WordCount")
    assert build("rewards_of_a_test:WordCount")(None, ["a b"]) == [2]
    assert sys.path[-1] == str(tmp_path)
