"""CHAIR by hand: mentions of objects, its two rates, the reward and its files."""

import json

import numpy as np
import pytest

from rewards.base import RewardError
from rewards.registry import build
from rewards.text.chair import ObjectVocabulary, chair_counts, read_objects
from rl_caption.evaluation.hallucination import chair_of_sums

SYNONYMS = """person, man, woman, boy, baby, passenger
dog, puppy
bird
train
hot dog
toilet
chair, seat
wine glass
tie, bow tie
knife
skis, ski
bus
"""


@pytest.fixture
def synonyms(tmp_path):
    file = tmp_path / "synonyms.txt"
    file.write_text(SYNONYMS)
    return file


def test_mentions_by_hand(synonyms):
    expected = {
        "Two men and a puppy.": ["person", "dog"],
        "a man eats a hot dog": ["person", "hot dog"],
        "a baby bird on a passenger train": ["bird", "train"],
        "a baby near the train": ["person", "train"],
        "a toilet seat, two seats and the toilet's seat": ["toilet", "toilet"],
        "buses near seats under cloudy skies": ["bus", "chair"],
        "people with wine glasses, knives and bow ties": [
            "person",
            "wine glass",
            "knife",
            "tie",
        ],
        "the sky": [],
    }
    vocabulary = ObjectVocabulary.read(synonyms)
    assert {caption: vocabulary.mentions(caption) for caption in expected} == expected


def test_rates_by_hand():
    mentions = [["dog", "dog", "person"], ["train"], []]
    objects = [{"dog"}, {"train", "person"}, {"bird"}]
    counts = np.array(
        [
            chair_counts(own, known)
            for own, known in zip(mentions, objects, strict=True)
        ],
        float,
    )
    assert chair_of_sums(counts.sum(axis=0, keepdims=True), 3).tolist() == [
        [1 / 4, 1 / 3, 2 / 4]
    ]
    assert chair_of_sums(np.array([chair_counts([], {"dog"})], float), 1).tolist() == [
        [0.0, 0.0, 0.0]
    ]
    assert chair_of_sums(
        np.array([chair_counts(["cat"], {"dog"})], float), 1
    ).tolist() == [[1.0, 1.0, 0.0]]
    assert chair_of_sums(
        np.array([chair_counts(["dog"], {"dog"})], float), 1
    ).tolist() == [[0.0, 0.0, 1.0]]


def test_the_reward_counts_the_file_and_the_references(tmp_path, synonyms):
    file = tmp_path / "objects.json"
    file.write_text(json.dumps({"7": ["dog"], "8": []}))
    captions = ["a dog, a man and a bird", "a train", "the sky"]
    columns = {"image_id": [7, 7, 8], "references": [["a man"], ["a man"], ["a bird"]]}
    kwargs = {"synonyms": str(synonyms), "objects": str(file)}
    expected = {
        "precision": [2 / 3, 0.0, 1.0],
        "caption": [0.0, 0.0, 1.0],
        "recall": [1.0, 0.0, 0.0],
    }
    for measure, scores in expected.items():
        assert build("chair", **kwargs, measure=measure)(
            None, captions, **columns
        ) == pytest.approx(scores)
    alone = build("chair", **kwargs, references=False)
    assert alone.columns == {"image_id"}
    assert alone(None, captions, **columns) == pytest.approx([1 / 3, 0.0, 1.0])
    mentioned = build("chair", synonyms=str(synonyms))
    assert mentioned.columns == {"references"}
    assert mentioned(None, captions, **columns) == pytest.approx([1 / 3, 0.0, 1.0])
    with pytest.raises(RewardError, match="'9'"):
        alone(None, ["a dog"], image_id=[9])


def test_objects_of_coco_instances(tmp_path, synonyms):
    file = tmp_path / "instances.json"
    instances = {
        "images": [{"id": 1}, {"id": 2}],
        "categories": [{"id": 5, "name": "dog"}, {"id": 6, "name": "wine glass"}],
        "annotations": [
            {"image_id": 1, "category_id": 5},
            {"image_id": 1, "category_id": 6},
        ],
    }
    file.write_text(json.dumps(instances))
    found = read_objects(file, ObjectVocabulary.read(synonyms))
    assert found == {"1": {"dog", "wine glass"}, "2": frozenset()}


def test_wrong_files_and_arguments_are_named(tmp_path, synonyms):
    bad, objects = tmp_path / "bad.txt", tmp_path / "o.json"
    for lines, message in (
        ("dog\nwolf, dog\n", "line 2.*'dog'"),
        ("\n", r"bad\.txt' has"),
    ):
        bad.write_text(lines)
        with pytest.raises(ValueError, match=message):
            build("chair", synonyms=str(bad))
    for content, message in (
        ("{", r"o\.json"),
        ("[1]", "instances"),
        ('{"1": ["cow"]}', "'cow'"),
    ):
        objects.write_text(content)
        with pytest.raises(ValueError, match=message):
            build("chair", synonyms=str(synonyms), objects=str(objects))
    for option, value in (
        ("measure", "f1"),
        ("references", False),
        ("synonyms", "absent"),
    ):
        with pytest.raises(ValueError, match=option):
            build("chair", **{"synonyms": str(synonyms), option: value})
