"""The generated world: scenes and their geometry, images, splits, and hard negatives."""

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from rl_caption.data.base import load_image
from rl_caption.data.scenes import (
    NEGATIVE_KINDS,
    ScenesData,
    hard_negatives,
    oracle,
)
from rl_caption.data.scenes.language import long_reference, references
from rl_caption.data.scenes.module import belongs, content_key
from rl_caption.data.scenes.oracle import tokens
from rl_caption.data.scenes.render import render
from rl_caption.data.scenes.world import (
    COLOURS,
    RADIUS,
    SEEN_PAIRS,
    SHAPES,
    SIZES,
    TEXTURES,
    UNSEEN_PAIRS,
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
    """Pins the world itself: results recorded with one version must be about the scenes of the
    next.
    """
    scenes = hashlib.sha256(
        json.dumps([asdict(scene) for scene in SCENES]).encode()
    ).hexdigest()
    assert scenes[:16] == "3878db858f4df9da"
    assert (
        digest([[*DATA.split(split)[:20]] for split in DATA.splits])
        == "03bb8d859a404b0a"
    )
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
            steps = {
                (new.x - old.x, new.y - old.y)
                for new, old in zip(moved.things, scene.things, strict=True)
            }
            assert len(steps) == 1
            assert all(
                RADIUS[t.size] < min(t.x, t.y, 1000 - t.x, 1000 - t.y)
                for t in moved.things
            )
    alone = Scene("white", (Thing("circle", "red", "small", "plain", 500, 500),))
    assert len(moves(alone)) == 49, "the grid has 7 x 7 points"


# images


def _pixels(scene, size=64):
    return np.asarray(render(scene, size)).astype(np.int32)


@pytest.mark.parametrize("size", [32, 100])
def test_things_are_drawn_where_the_scene_says(size):
    """The pixels that differ from the background lie around the thing's centre, within its radius."""
    for shape, name, texture in itertools.product(SHAPES, SIZES, TEXTURES):
        thing = Thing(shape, "red", name, texture, 320, 640)
        rows, columns = np.nonzero(
            np.abs(_pixels(Scene("black", (thing,)), size) - 14).max(axis=2) > 40
        )
        centre = np.array(
            [(columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2]
        )
        assert (
            np.abs(centre - np.array([320, 640]) * size / 1000).max()
            < 0.2 * RADIUS[name] * size / 1000 + 1
        )
        away = np.hypot(columns + 0.5 - 0.320 * size, rows + 0.5 - 0.640 * size).max()
        assert away <= RADIUS[name] * size / 1000 + 1


# splits


def _pairs(split):
    return {
        (thing.colour, thing.shape)
        for row in DATA.split(split)
        for thing in row["scene"].things
    }


def test_rows_do_not_depend_on_order_or_size_or_what_was_done_to_them():
    row = DATA.split("train")[123]
    assert row["image_id"] == "train-000123"
    assert (load_image(row["image"]).size, len(row["references"])) == ((64, 64), 5)
    again = ScenesData(num_train=10, num_val=5, num_test=5, num_unseen=5)
    again.split("train")[0]["references"].clear()
    for split in DATA.splits:
        for index in (4, 0, 3):
            assert again.split(split)[index] == DATA.split(split)[index]
    assert ScenesData(seed=1).split("train")[0] != DATA.split("train")[0]
    rows = ScenesData(num_train=10**9).split("train")  # made when looked at
    assert (len(rows), rows[-1]["image_id"]) == (10**9, f"train-{10**9 - 1}")


def test_positives_are_true_of_the_scene_and_of_its_captions_and_stay_in_the_split():
    with_positives = ScenesData(
        num_train=100, num_val=10, num_test=0, num_unseen=10, positives=True
    )
    elsewhere = 0
    for split in ("train", "val", "test_unseen"):
        for row, plain in zip(
            with_positives.split(split), DATA.split(split), strict=False
        ):
            assert plain == {
                key: value
                for key, value in row.items()
                if not key.startswith("positive")
            }
            captions, images = row["positive_captions"], row["positive_images"]
            assert len(set(captions) - set(row["references"])) == len(images) == 5
            assert all(
                oracle(caption, row["scene"]).precision == 1 for caption in captions
            )
            for image, caption in zip(images, row["references"], strict=True):
                assert oracle(caption, image.scene) == oracle(caption, row["scene"])
                assert oracle(row["long_reference"], image.scene) == (1, 1, 1, 0)
                assert belongs(image.scene, split)
                elsewhere += image.scene != row["scene"]
    assert elsewhere > 500, "crowded scenes alone stay where they are"


def test_splits_share_no_scene_whatever_the_seed():
    seen = {}
    for seed in (0, 1):
        data = (
            ScenesData(num_train=200, num_val=60, num_test=60, num_unseen=60, seed=seed)
            if seed
            else DATA
        )
        for split in data.splits:
            for row in data.split(split):
                assert (
                    seen.setdefault(content_key(row["scene"]), (split, seed))[0]
                    == split
                )


def test_unseen_pairs_are_unseen():
    assert len(SEEN_PAIRS) == 56
    for split in ("train", "val", "test"):
        assert not _pairs(split) & set(UNSEEN_PAIRS)
    for row in DATA.split("test_unseen"):
        assert any(
            (thing.colour, thing.shape) in UNSEEN_PAIRS for thing in row["scene"].things
        )
    assert _pairs("test_unseen") >= set(UNSEEN_PAIRS)
    for position, values in enumerate((COLOURS, SHAPES)):
        assert {pair[position] for pair in _pairs("train")} == set(values)
        assert sorted(pair[position] for pair in UNSEEN_PAIRS) == sorted(values)


# hard negatives


def test_every_negative_is_false_and_every_kind_occurs():
    seen = Counter()
    for seed, scene in enumerate(SCENES[:60]):
        for caption in [*references(scene, seed), long_reference(scene, seed)]:
            found = hard_negatives(scene, caption, seed)
            assert [kind for kind, _ in found] == [
                kind for kind in NEGATIVE_KINDS if kind in dict(found)
            ]
            for kind, text in found:
                score = oracle(text, scene)
                seen[kind] += 1
                assert text != caption
                if kind == "word_order":
                    assert sorted(tokens(text.replace(".", ""))) == sorted(
                        t for t in tokens(caption) if t not in ".,"
                    )
                    assert score.unparsed > 0 or score.f1 < oracle(caption, scene).f1
                    continue
                assert (score.precision < 1, score.unparsed) == (True, 0), text
                for word, following in itertools.pairwise(tokens(text)):
                    if word in ("a", "an"):
                        assert word == (
                            "an" if following in ("orange", "object") else "a"
                        ), text
    assert set(seen) == set(NEGATIVE_KINDS)
