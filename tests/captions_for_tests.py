"""Four images' captions and references, in tokens that are separated by spaces, and a mark for tests with Java."""

import shutil

import pytest

REFERENCES = {
    "1": ["a dog runs in the park", "the dog is running in a park", "a small dog in the park"],
    "2": ["a train on the tracks", "a train passing by the station", "a red train is on the tracks near a station"],
    "3": ["a man riding a wave on a surfboard", "a surfer rides a big wave"],
    "4": ["two people sitting on a bench", "a couple on a bench in the park"],
}
CAPTIONS = {
    "1": "a dog in the park",
    "2": "a train on the tracks near a station",
    "3": "a man on a wave",
    "4": "two people on a bench in a park with a a a",
}


def needs_java(test):
    """Mark a test that is skipped where there is no Java runtime."""
    return pytest.mark.java(pytest.mark.skipif(shutil.which("java") is None, reason="no Java runtime")(test))
