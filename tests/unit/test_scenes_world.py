"""The generated world: scenes, their geometry, and their images."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from rl_caption.data.base import DataError
from rl_caption.data.scenes.render import BACKGROUND_RGB, COLOUR_RGB, render
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    PAIRS,
    RADIUS,
    SEEN_PAIRS,
    SHAPES,
    SIZES,
    TEXTURES,
    UNSEEN_PAIRS,
    Fact,
    Scene,
    Thing,
    facts,
    make_scene,
    relations_between,
)

SCENES = [make_scene(seed) for seed in range(400)]


def test_the_world_is_as_large_as_promised() -> None:
    assert len(SHAPES) >= 8
    assert len(COLOURS) >= 8
    assert len(SIZES) == 2
    assert len(TEXTURES) == 3
    assert len(BACKGROUNDS) == 6
    assert {len(scene.things) for scene in SCENES} == {1, 2, 3, 4}
    for attribute, values in {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "texture": TEXTURES}.items():
        assert {getattr(thing, attribute) for scene in SCENES for thing in scene.things} == set(values)
    assert {scene.background for scene in SCENES} == set(BACKGROUNDS)


def test_scenes_do_not_depend_on_process_or_hash_seed() -> None:
    """Another interpreter, with another hash seed, makes the same scenes."""
    program = "from rl_caption.data.scenes.world import make_scene; print([make_scene(s) for s in range(50)])"
    environment = {"PYTHONHASHSEED": "7", "PATH": ""}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([make_scene(seed) for seed in range(50)])


def test_scenes_stay_what_they_were() -> None:
    """Pins the world itself: results recorded with one version must be about the scenes of the next."""
    digest = hashlib.sha256(json.dumps([scene.to_dict() for scene in SCENES]).encode()).hexdigest()
    assert digest[:16] == "3878db858f4df9da"


def test_things_are_inside_and_do_not_overlap() -> None:
    for scene in SCENES:
        for thing in scene.things:
            assert RADIUS[thing.size] <= min(thing.x, thing.y)
            assert max(thing.x, thing.y) <= 1000 - RADIUS[thing.size]
        for one, other in itertools.combinations(scene.things, 2):
            distance = ((one.x - other.x) ** 2 + (one.y - other.y) ** 2) ** 0.5
            assert distance > RADIUS[one.size] + RADIUS[other.size]


def test_relations_are_unambiguous() -> None:
    """Two things are level (at most 6% of the side apart) or clearly not (at least 20%)."""
    for scene in SCENES:
        for one, other in itertools.combinations(scene.things, 2):
            for offset in (abs(one.x - other.x), abs(one.y - other.y)):
                assert offset <= 60 or offset >= 200


def test_same_colour_and_shape_means_same_look() -> None:
    for scene in SCENES:
        looks = {(thing.colour, thing.shape): (thing.size, thing.texture) for thing in scene.things}
        assert all(looks[thing.colour, thing.shape] == (thing.size, thing.texture) for thing in scene.things)
    assert sum(any(len(kind.things) > 1 for kind in scene.kinds) for scene in SCENES) > 40


def test_salient_things_come_first() -> None:
    for scene in SCENES:
        sizes = [thing.size for thing in scene.things]
        assert sizes == sorted(sizes)  # "large" sorts before "small"


def test_leading_pairs_occur_and_pairs_bound_the_rest() -> None:
    for seed in range(60):
        scene = make_scene(seed, SEEN_PAIRS, leading_pairs=UNSEEN_PAIRS)
        used = [(kind.colour, kind.shape) for kind in scene.kinds]
        assert sum(pair in UNSEEN_PAIRS for pair in used) == 1


def test_unseen_pairs_leave_every_colour_and_shape_to_training() -> None:
    assert sorted(colour for colour, _ in UNSEEN_PAIRS) == sorted(COLOURS)
    assert sorted(shape for _, shape in UNSEEN_PAIRS) == sorted(SHAPES)
    assert set(SEEN_PAIRS) | set(UNSEEN_PAIRS) == set(PAIRS)
    assert len(SEEN_PAIRS) == 56


def test_facts_of_a_scene_by_hand() -> None:
    stars = [Thing("star", "blue", "small", "plain", x, 800) for x in (200, 800)]
    scene = Scene("grey", (Thing("ring", "red", "large", "striped", 500, 250), *stars))
    assert facts(scene) == {
        Fact("background", "background", "grey"),
        Fact("shape", "red ring", "ring"),
        Fact("colour", "red ring", "red"),
        Fact("size", "red ring", "large"),
        Fact("texture", "red ring", "striped"),
        Fact("shape", "blue star", "star"),
        Fact("colour", "blue star", "blue"),
        Fact("size", "blue star", "small"),
        Fact("texture", "blue star", "plain"),
        Fact("count", "blue star", "2"),
        Fact("relation", "blue star / red ring", ""),
    }
    # One star is to the left of the ring and one to the right: only "above" is true of the kinds.
    assert relations_between(*scene.kinds) == ["above"]


def test_scene_round_trips_through_json() -> None:
    for scene in SCENES[:50]:
        assert Scene.from_dict(json.loads(json.dumps(scene.to_dict()))) == scene


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"background": "plaid"}, "plaid"),
        ({"things": [{"shape": "circle"}]}, "colour"),
        ({"things": [{**SCENES[0].to_dict()["things"][0], "shape": "blob"}]}, "blob"),
    ],
)
def test_bad_scenes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Scene.from_dict({**SCENES[0].to_dict(), **change})


def _pixels(scene: Scene, size: int = 64) -> NDArray[np.int32]:
    return np.asarray(render(scene, size)).astype(np.int32)


def test_rendering_is_deterministic_and_pure() -> None:
    for scene in SCENES[:20]:
        assert render(scene, 64).tobytes() == render(Scene(scene.background, scene.things), 64).tobytes()
        assert render(scene, 64).mode == "RGB"
    assert render(SCENES[0], 96).size == (96, 96)


@pytest.mark.parametrize("size", [32, 64, 100])
def test_things_are_drawn_where_the_scene_says(size: int) -> None:
    """The pixels that differ from the background lie around the thing's centre, within its radius."""
    for shape, name, texture in itertools.product(SHAPES, SIZES, TEXTURES):
        thing = Thing(shape, "red", name, texture, 320, 640)
        rows, columns = np.nonzero(np.abs(_pixels(Scene("black", (thing,)), size) - 14).max(axis=2) > 40)
        centre = np.array([(columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2])
        assert np.abs(centre - np.array([320, 640]) * size / 1000).max() < 0.2 * RADIUS[name] * size / 1000 + 1
        away = np.hypot(columns + 0.5 - 0.320 * size, rows + 0.5 - 0.640 * size).max()
        assert away <= RADIUS[name] * size / 1000 + 1


def test_looks_can_be_told_apart_at_64_pixels() -> None:
    """Images of any two different looks at the same place differ clearly in a twelfth of the thing's square or more."""
    looks = [
        Thing(shape, colour, size, texture, 500, 500)
        for shape, size, texture in itertools.product(SHAPES, SIZES, TEXTURES)
        for colour in ("red", "yellow")
    ]
    images = [_pixels(Scene("grey", (thing,))) for thing in looks]
    for (one, first), (other, second) in itertools.combinations(zip(looks, images, strict=True), 2):
        area = (2 * min(RADIUS[one.size], RADIUS[other.size]) * 64 / 1000) ** 2
        assert (np.abs(first - second).max(axis=2) > 50).sum() > area / 12, (one, other)


def test_colours_and_backgrounds_are_far_apart() -> None:
    palette = [*COLOUR_RGB.values(), *BACKGROUND_RGB.values()]
    assert set(COLOUR_RGB) == set(COLOURS)
    assert set(BACKGROUND_RGB) == set(BACKGROUNDS)
    for one, other in itertools.combinations(palette, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 60, (one, other)
