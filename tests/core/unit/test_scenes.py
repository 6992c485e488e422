"""The generated world: scenes and their geometry, images, splits, and hard negatives."""

import hashlib
import itertools
import re
from collections import Counter

import numpy as np
import pytest

from rl_caption.data.base import load_image
from rl_caption.data.scenes import ScenesData, hard_negatives, oracle
from rl_caption.data.scenes.language import long_reference, references
from rl_caption.data.scenes.module import belongs, content_key
from rl_caption.data.scenes.negatives import NEGATIVE_KINDS
from rl_caption.data.scenes.oracle import tokens
from rl_caption.data.scenes.render import SceneImage
from rl_caption.data.scenes.world import (
    RADIUS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    Thing,
    make_scene,
    moves,
)

SCENES = [make_scene(seed) for seed in range(400)]
DATA = ScenesData(num_train=200, num_val=60, num_test=60, num_unseen=60)


def digest(values):
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def test_scenes_and_captions_stay_what_they_were():
    """Pins the world itself: results recorded with one version must be about the scenes
    of the next.
    """
    assert digest(SCENES) == "689a5c1ff0da6b38"
    rows = [[*DATA[split][:20]] for split in DATA]
    assert digest(rows) == "03bb8d859a404b0a"
    others = [
        hard_negatives(scene, caption, seed)
        for seed, scene in enumerate(SCENES[:20])
        for caption in references(scene, seed)
    ]
    assert digest(others) == "c0f778bd8a1e0fc4"


def test_moved_things_keep_off_the_edges_and_their_offsets():
    for scene in SCENES[:40]:
        ways = moves(scene)
        assert scene in ways
        assert len(set(ways)) == len(ways)
        for moved in ways:
            steps = set()
            for new, old in zip(moved.things, scene.things, strict=True):
                steps.add((new.x - old.x, new.y - old.y))
                for at in (new.x, new.y):
                    assert RADIUS[new.size] < at < 1000 - RADIUS[new.size]
            assert len(steps) == 1
    alone = Scene("white", (Thing("circle", "red", "small", "plain", 500, 500),))
    assert len(moves(alone)) == 49, "the grid has 7 x 7 points"


# images


@pytest.mark.parametrize("size", [32, 100])
def test_things_are_drawn_where_the_scene_says(size):
    """The pixels that differ from the background lie around the thing's centre, within its radius."""
    for shape, name, texture in itertools.product(SHAPES, SIZES, TEXTURES):
        thing = Thing(shape, "red", name, texture, 320, 640)
        image = SceneImage(Scene("black", (thing,)), size).render()
        difference = np.abs(np.asarray(image).astype(int) - 14)
        rows, columns = np.nonzero(difference.max(axis=2) > 40)
        radius = RADIUS[name] * size / 1000
        for pixels, at in ((columns, 0.320), (rows, 0.640)):
            centre = (pixels.min() + pixels.max() + 1) / 2
            assert abs(centre - at * size) < 0.2 * radius + 1
        away = np.hypot(columns + 0.5 - 0.320 * size, rows + 0.5 - 0.640 * size)
        assert away.max() <= radius + 1


# splits


def test_rows_do_not_depend_on_order_or_size_or_what_was_done_to_them():
    row = DATA["train"][123]
    assert row["image_id"] == "train-000123"
    assert (load_image(row["image"]).size, len(row["references"])) == ((64, 64), 5)
    again = ScenesData(num_train=10, num_val=5, num_test=5, num_unseen=5)
    again["train"][0]["references"].clear()
    for split in DATA:
        for index in (4, 0, 3):
            assert again[split][index] == DATA[split][index]
    assert ScenesData(seed=1)["train"][0] != DATA["train"][0]
    rows = ScenesData(num_train=10**9)["train"]  # made when looked at
    assert (len(rows), rows[-1]["image_id"]) == (10**9, f"train-{10**9 - 1}")


def test_positives_are_true_of_the_scene_and_of_its_captions_and_stay_in_the_split():
    positives = ScenesData(
        num_train=100, num_val=10, num_test=0, num_unseen=10, positives=True
    )
    elsewhere = 0
    for split in ("train", "val", "test_unseen"):
        for row, plain in zip(positives[split], DATA[split], strict=False):
            scene, captions = row["scene"], row["positive_captions"]
            assert plain == {key: row[key] for key in plain}
            assert len(set(captions) - set(row["references"])) == 5
            assert all(oracle(caption, scene).precision == 1 for caption in captions)
            assert len(row["positive_images"]) == 5
            for image, caption in zip(
                row["positive_images"], row["references"], strict=True
            ):
                assert oracle(caption, image.scene) == oracle(caption, scene)
                assert oracle(row["long_reference"], image.scene) == (1, 1, 1, 0)
                assert belongs(image.scene, split)
                elsewhere += image.scene != scene
    assert elsewhere > 500, "crowded scenes alone stay where they are"


def test_splits_share_no_scene_whatever_the_seed():
    other = ScenesData(num_train=200, num_val=60, num_test=60, num_unseen=60, seed=1)
    splits = {}
    for data in (DATA, other):
        for split in data:
            for row in data[split]:
                key = content_key(row["scene"])
                assert splits.setdefault(key, split) == split


# hard negatives


def test_every_negative_is_false_and_every_kind_occurs():
    seen = Counter()
    for seed, scene in enumerate(SCENES[:60]):
        for caption in [*references(scene, seed), long_reference(scene, seed)]:
            found = hard_negatives(scene, caption, seed)
            seen.update(kind for kind, _ in found)
            for kind, text in found:
                score = oracle(text, scene)
                if kind == "word_order":
                    words = sorted(tokens(text.replace(".", "")))
                    assert words == sorted(re.sub("[.,]", "", caption.lower()).split())
                    assert score.unparsed > 0 or score.f1 < oracle(caption, scene).f1
                    continue
                assert (score.precision < 1, score.unparsed) == (True, 0), text
                for word, following in re.findall(r"\b(an?) (\w+)", text.lower()):
                    assert (word == "an") == (following in ("orange", "object")), text
    assert set(seen) == set(NEGATIVE_KINDS)
