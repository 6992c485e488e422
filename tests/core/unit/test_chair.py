"""CHAIR by hand: mentions of objects, its two rates, the reward and its files."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewards.base import RewardError
from rewards.registry import build
from rewards.text.chair import ObjectVocabulary, chair_counts, read_objects
from rl_caption.data.scenes import ScenesData
from rl_caption.data.scenes.language import plural
from rl_caption.data.scenes.world import SHAPES
from rl_caption.evaluation.hallucination import chair_of_sums
from tests.clip_for_tests import noise_image

SCENES = "rl_caption.data.scenes.oracle:SceneObjects"

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
def synonyms(tmp_path: Path) -> Path:
    file = tmp_path / "synonyms.txt"
    file.write_text(SYNONYMS)
    return file


def test_mentions_by_hand(synonyms: Path) -> None:
    expected = {
        "Two men and a puppy.": ["person", "dog"],
        "a man eats a hot dog": ["person", "hot dog"],
        "a baby bird on a passenger train": ["bird", "train"],
        "a baby near the train": ["person", "train"],
        "a toilet seat, two seats and the toilet's seat": ["toilet", "toilet"],
        "buses near seats under cloudy skies": ["bus", "chair"],
        "people with wine glasses, knives and bow ties": ["person", "wine glass", "knife", "tie"],
        "the sky": [],
    }
    vocabulary = ObjectVocabulary.read(synonyms)
    assert {caption: vocabulary.mentions(caption) for caption in expected} == expected


def test_rates_by_hand() -> None:
    mentions = [["dog", "dog", "person"], ["train"], []]
    objects = [{"dog"}, {"train", "person"}, {"bird"}]
    counts = np.array(
        [chair_counts(own, known) for own, known in zip(mentions, objects, strict=True)], float
    )
    assert chair_of_sums(counts.sum(axis=0, keepdims=True), 3).tolist() == [[1 / 4, 1 / 3, 2 / 4]]
    assert chair_of_sums(np.array([chair_counts([], {"dog"})], float), 1).tolist() == [
        [0.0, 0.0, 0.0]
    ]
    assert chair_of_sums(np.array([chair_counts(["cat"], {"dog"})], float), 1).tolist() == [
        [1.0, 1.0, 0.0]
    ]
    assert chair_of_sums(np.array([chair_counts(["dog"], {"dog"})], float), 1).tolist() == [
        [0.0, 0.0, 1.0]
    ]


def test_the_reward_counts_the_file_and_the_references(tmp_path: Path, synonyms: Path) -> None:
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


def test_objects_of_coco_instances(tmp_path: Path, synonyms: Path) -> None:
    file = tmp_path / "instances.json"
    instances = {
        "images": [{"id": 1}, {"id": 2}],
        "categories": [{"id": 5, "name": "dog"}, {"id": 6, "name": "wine glass"}],
        "annotations": [{"image_id": 1, "category_id": 5}, {"image_id": 1, "category_id": 6}],
    }
    file.write_text(json.dumps(instances))
    found = read_objects(file, ObjectVocabulary.read(synonyms))
    assert found == {"1": {"dog", "wine glass"}, "2": frozenset()}


def test_wrong_files_and_arguments_are_named(tmp_path: Path, synonyms: Path) -> None:
    bad, objects = tmp_path / "bad.txt", tmp_path / "o.json"
    for lines, message in (("dog\nwolf, dog\n", "line 2: 'dog'"), ("\n", r"bad\.txt' has")):
        bad.write_text(lines)
        with pytest.raises(ValueError, match=message):
            build("chair", synonyms=str(bad))
    for content, message in (("{", r"o\.json is"), ("[1]", "neither"), ('{"1": ["cow"]}', "'cow'")):
        objects.write_text(content)
        with pytest.raises(ValueError, match=message):
            build("chair", synonyms=str(synonyms), objects=str(objects))
    for option, value in (
        ("measure", "f1"),
        ("references", False),
        ("synonyms", "absent"),
        ("detector", "absent:No"),
    ):
        with pytest.raises(ValueError, match=option):
            build("chair", **{"synonyms": str(synonyms), option: value})


class Detector:
    """Finds what a path says; counts what it looks at."""

    signature = "detector"

    def __init__(self, known: str = "") -> None:
        self.looked: list[str] = []
        self.known = known.split()

    def __call__(self, images: Sequence[str]) -> list[list[str]]:
        self.looked += images
        return [[*self.known, *Path(image).stem.split("_")] for image in images]


def test_a_detector_looks_at_each_image_once(tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text('{"1": ["bird"], "2": []}')
    kwargs: dict[str, Any] = {
        "synonyms": ["dog, puppy", "person, man", "bird"],
        "references": False,
    }
    reward: Any = build("chair", **kwargs, detector=f"{__name__}:Detector")
    captions, images = (
        ["a puppy and a man", "a man", "birds"],
        ["dog.png", "dog.png", "person_bird.png"],
    )
    assert reward.columns == {"image"}
    assert reward(None, captions, image=images) == pytest.approx([0.5, 0.0, 1.0])
    assert reward(None, captions[:1], image=["person_bird.png"]) == pytest.approx([0.5])
    assert reward.detector.looked == ["dog.png", "person_bird.png"]
    assert re.fullmatch(r"CHAIR\[precision,3 objects\[\w{8}\] of detector\]", reward.signature)
    others = kwargs | {"synonyms": ["dog", "person, man", "bird"]}
    assert (
        build("chair", **others, detector=f"{__name__}:Detector").signature != reward.signature
    ), "other words"
    both = build(
        "chair", **kwargs, objects=str(tmp_path / "o.json"), detector=f"{__name__}:Detector"
    )
    assert both.columns == {"image", "image_id"}
    assert both(None, ["a dog and a bird"] * 2, image=["dog.png"] * 2, image_id=["1", "2"]) == [
        1.0,
        0.5,
    ]
    with pytest.raises(RewardError, match=r"'cat'.*synonyms"):
        reward(None, ["a dog"], image=["cat.png"])
    reward.detector = lambda images: [["bird"]] * len(images)
    reward.detector.signature = "lambda"
    image = noise_image(1)
    for frames in (image, [image, image], (image, image)):  # PIL images have no hash
        assert reward(None, ["a bird", "a dog"], image=[frames, frames]) == [1.0, 0.0]
    assert all(not isinstance(key, int) for key in reward._seen), (
        "an id of an object may be another's later"
    )
    reward.detector = lambda images: []
    reward.detector.signature = "lambda"
    with pytest.raises(RewardError, match=r"lambda returned 0 .* 1 "):
        reward(None, ["a dog"], image=["bird.png"])


def test_objects_of_generated_scenes_are_known_exactly() -> None:
    kwargs: dict[str, Any] = {"synonyms": [*SHAPES], "references": False, "detector": SCENES}
    precision, recall = (
        build("chair", **kwargs, measure=measure) for measure in ("precision", "recall")
    )
    rows = ScenesData(num_train=40, num_val=0, num_test=0, num_unseen=0).split("train")
    scene = next(row for row in rows if len({thing.shape for thing in row["scene"].things}) == 2)
    here = sorted({thing.shape for thing in scene["scene"].things})
    absent = next(shape for shape in SHAPES if shape not in here)
    captions = [
        f"two {plural(here[0])} and a red {absent}",
        f"a {here[0]} above a {here[1]}",
        "a shape",
        absent,
    ]
    images = [scene["image"]] * 4
    assert precision(None, captions, image=images) == [0.5, 1.0, 1.0, 0.0]
    assert recall(None, captions, image=images) == [0.5, 1.0, 0.0, 0.0]
    for row in rows:
        told = row["references"]
        assert precision(None, told, image=[row["image"]] * len(told)) == [1.0] * len(told), (
            "references are true"
        )
    with pytest.raises(RewardError, match=r"photo\.jpg"):
        precision(None, ["a circle"], image=["photo.jpg"])
