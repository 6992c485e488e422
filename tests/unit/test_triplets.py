"""Triplets: base and positive are prefixes of the caption, the negative has a unit of another image."""

import json
from pathlib import Path

import pytest

from rewards.text.detail_units import detail_units, prefixes
from rl_caption.data.scenes import ScenesData
from rl_caption.data.scenes.world import Draws
from rl_caption.reward_models.triplets import Donor, continued, make_triplets, read_donors, shuffled_words

ROWS = ScenesData(num_train=40, num_val=0, num_test=0, num_unseen=0).split("train")
CAPTIONS = [row["long_reference"] for row in ROWS]


def test_base_and_positive_are_prefixes_and_the_negative_is_of_another_caption() -> None:
    triplets = make_triplets(CAPTIONS, seed=1, shuffle_rate=0)
    lengths = set()
    for caption, triplet in zip(CAPTIONS, triplets, strict=True):
        grown = prefixes(detail_units(caption))
        assert triplet is not None
        place = grown.index(triplet.base)
        lengths.add(place)
        assert triplet.positive == grown[place + 1]
        assert triplet.negative.startswith(triplet.base)
        unit = triplet.negative.removeprefix(triplet.base).strip()
        others = [detail_units(other) for other in CAPTIONS if other != caption]
        # The unit at the same place, or the last one of a shorter caption; no comma follows a full stop.
        lead = ",;: " if triplet.base.endswith(".") else " "
        assert unit in {units[min(place + 1, len(units) - 1)].lstrip(lead).strip() for units in others}
        assert unit.lower() != triplet.positive.removeprefix(triplet.base).strip().lower()
    assert len(lengths) > 3


def test_triplets_are_a_function_of_the_seed() -> None:
    assert make_triplets(CAPTIONS, 1) == make_triplets(CAPTIONS, 1)
    assert make_triplets(CAPTIONS, 1) != make_triplets(CAPTIONS, 2)
    donors = [Donor("z", detail_units(CAPTIONS[0]))]
    assert make_triplets(CAPTIONS[1:4], 1, donors=donors) == make_triplets(CAPTIONS[1:], 1, donors=donors)[:3]


@pytest.mark.parametrize("per", ["unit", "row"])
def test_shuffled_negatives_have_the_words_of_the_others_in_another_order(per: str) -> None:
    whole = make_triplets(CAPTIONS, 1, 0.0, per)  # type: ignore[arg-type]
    mixed = make_triplets(CAPTIONS, 1, 1.0, per)  # type: ignore[arg-type]
    different = 0
    for one, other in zip(whole, mixed, strict=True):
        assert one is not None
        assert other is not None
        assert (one.base, one.positive) == (other.base, other.positive)
        assert sorted(one.negative.strip(".").split()) == sorted(other.negative.strip(".").split())
        different += one.negative != other.negative
    assert different > len(CAPTIONS) / 2


def test_shuffling_per_row_is_the_same_in_every_step_and_per_unit_is_not() -> None:
    def shuffled(seed: int, per: str) -> list[bool]:
        plain, mixed = (make_triplets(CAPTIONS, seed, rate, per) for rate in (0.0, 0.5))  # type: ignore[arg-type]
        return [one != other for one, other in zip(plain, mixed, strict=True)]

    # A shuffled unit may come out as it was: rows that are ever shuffled, and the others.
    by_row = [any(row) for row in zip(*(shuffled(seed, "row") for seed in range(12)), strict=True)]
    by_unit = [any(row) for row in zip(*(shuffled(seed, "unit") for seed in range(12)), strict=True)]
    assert 0.25 < sum(by_row) / len(by_row) < 0.75
    assert sum(by_unit) / len(by_unit) > 0.95


def test_shuffled_words_keep_the_punctuation_at_the_ends() -> None:
    draws = Draws("test", 0)
    text = shuffled_words(", and a small 3.5 m (old) boat.", draws)
    assert text[:2] == ", "
    assert text[-1] == "."
    assert sorted(text[2:-1].split()) == sorted(["and", "a", "small", "3.5", "m", "(old)", "boat"])
    assert shuffled_words("...", draws) == "..."


def test_none_without_two_units_or_without_another_image() -> None:
    long = "A dog runs and a cat sits. The sky is blue."
    assert make_triplets([long, "A dog."], 0)[1] is None
    assert make_triplets([long, long], 0) == [None, None]
    assert make_triplets([long, "A fish swims. It is red."], 0, image_ids=["a", "a"]) == [None, None]
    assert make_triplets([long], 0) == [None]
    # In the same words, though of another image, it would be no negative.
    assert make_triplets([long], 0, donors=[Donor("b", detail_units(long))]) == [None]
    assert make_triplets([], 0) == []


def test_donors_replace_the_batch() -> None:
    (triplet,) = make_triplets(["A dog runs. The sky is blue."], 0, 0.0, donors=[Donor("other", ["a red bus"])])
    assert triplet is not None
    assert triplet.negative == triplet.base + " a red bus"


def test_donors_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "captions.json"
    path.write_text(json.dumps([{"image_id": 7, "caption": CAPTIONS[0]}, {"image_id": 8, "caption": "A red bus."}]))
    assert read_donors(path) == [Donor("7", detail_units(CAPTIONS[0])), Donor("8", ["A red bus."])]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"shuffle_rate = 1\.5: expected a share"):
        make_triplets(CAPTIONS, 0, 1.5)
    with pytest.raises(ValueError, match="per = 'token': expected 'unit' or 'row'"):
        make_triplets(CAPTIONS, 0, per="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 image ids for 2 captions"):
        make_triplets(["a", "b"], 0, image_ids=["x"])


@pytest.mark.parametrize(
    ("base", "unit", "joined"),
    [
        ("A red circle", ", a blue star", "A red circle, a blue star"),
        ("A red circle.", ", a blue star", "A red circle. a blue star"),
        ("A red circle.", " The background is grey.", "A red circle. The background is grey."),
        ("A red circle", "a blue star", "A red circle a blue star"),
    ],
)
def test_units_of_other_captions_are_joined_without_double_punctuation(base: str, unit: str, joined: str) -> None:
    """A metric could tell a false detail by ".," alone."""
    assert continued(base, unit) == joined
