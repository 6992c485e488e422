"""Four images' captions and references, in tokens that are separated by spaces, and a
mark for tests with Java.
"""

import shutil
from collections.abc import Sequence
from functools import cache

import pytest

from rewards.files import load_json
from rewards.text.tokenize import tokenize

REFERENCES = {
    "1": [
        "a dog runs in the park",
        "the dog is running in a park",
        "a small dog in the park",
    ],
    "2": [
        "a train on the tracks",
        "a train passing by the station",
        "a red train is on the tracks near a station",
    ],
    "3": ["a man riding a wave on a surfboard", "a surfer rides a big wave"],
    "4": ["two people sitting on a bench", "a couple on a bench in the park"],
}
CAPTIONS = {
    "1": "a dog in the park",
    "2": "a train on the tracks near a station",
    "3": "a man on a wave",
    "4": "two people on a bench in a park with a a a",
}


class LazyColumn(Sequence):
    """A sequence that copies an item whenever it is read, as columns of datasets do."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index].copy()


def needs_java(test):
    """Mark a test that is skipped where there is no Java runtime."""
    return pytest.mark.java(
        pytest.mark.skipif(shutil.which("java") is None, reason="no Java runtime")(test)
    )


@cache
def _karpathy_references(file):
    return {
        row["image_name"]: list(map(tokenize, row["captions"]))
        for row in load_json(file)
    }


def published_system(shared_data, name):
    """Tokens of a published system's captions of Karpathy's test split, of the
    references, and its recorded scores.
    """
    folder = shared_data / "coco_karpathy_test"
    tokens = _karpathy_references(folder / "refs.json")
    results = load_json(folder / "predictions" / f"{name}.json")
    references = [tokens[row["image_name"]] for row in results]
    recorded = load_json(folder / "scores_pycocoevalcap.json")["scores"][name]
    return [tokenize(row["caption"]) for row in results], references, recorded
