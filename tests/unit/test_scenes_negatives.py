"""Hard negatives of generated captions: each false, each of its kind."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from rl_caption.data.scenes import NEGATIVE_KINDS, claims, hard_negatives, oracle
from rl_caption.data.scenes.language import long_reference, references
from rl_caption.data.scenes.oracle import tokens
from rl_caption.data.scenes.world import Scene, Thing, make_scene

SCENE = Scene(
    "grey",
    (
        Thing("circle", "red", "large", "striped", 220, 230),
        Thing("star", "blue", "small", "plain", 200, 800),
        Thing("star", "blue", "small", "plain", 640, 790),
    ),
)


def test_every_negative_is_false_and_every_kind_occurs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        scene = make_scene(seed)
        for caption in [*references(scene, seed), long_reference(scene, seed)]:
            found = hard_negatives(scene, caption, seed)
            assert [kind for kind, _ in found] == [kind for kind in NEGATIVE_KINDS if kind in dict(found)]
            for kind, text in found:
                score = oracle(text, scene)
                assert text != caption
                if kind == "word_order":
                    assert sorted(tokens(text.replace(".", ""))) == sorted(t for t in tokens(caption) if t not in ".,")
                    assert score.unparsed > 0 or score.f1 < oracle(caption, scene).f1
                else:
                    assert score.precision < 1
                    assert score.unparsed == 0, text
                seen[kind] += 1
    assert set(seen) == set(NEGATIVE_KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_kinds_change_what_they_name(seed: int) -> None:
    caption = "A large red circle is above two small blue stars on a grey background."
    found = dict(hard_negatives(SCENE, caption, seed))
    assert set(found) == set(NEGATIVE_KINDS)
    assert found["swap_object"] == "A large red star is above two small blue circles on a grey background."
    assert found["swap_relation"] == "Two small blue stars are above a large red circle on a grey background."
    assert found["swap_count"] == "Two large red circles are above a small blue star on a grey background."
    assert found["swap_attribute"] in (
        "A large blue circle is above two small red stars on a grey background.",
        "A small red circle is above two large blue stars on a grey background.",
    )
    for kind, wrong in {
        "replace_background": "background",
        "replace_relation": "relation",
        "replace_count": "count",
    }.items():
        assert [claim.kind for claim in claims(found[kind], SCENE) if not claim.true] == [wrong]
    assert "shape" in {claim.kind for claim in claims(found["replace_object"], SCENE) if not claim.true} or (
        "star" not in found["replace_object"] or "circle" not in found["replace_object"]
    )
    assert {claim.kind for claim in claims(found["replace_attribute"], SCENE) if not claim.true} <= {
        "colour",
        "size",
        "texture",
    }


def test_kinds_appear_only_where_they_apply() -> None:
    found = dict(hard_negatives(SCENE, "A red circle.", 0))
    assert set(found) == {"replace_object", "replace_attribute", "replace_count", "word_order"}
    assert hard_negatives(SCENE, "", 0) == []


def test_articles_agree() -> None:
    for seed in range(80):
        scene = make_scene(seed)
        for caption in references(scene, seed):
            for kind, text in hard_negatives(scene, caption, seed):
                if kind != "word_order":
                    words = tokens(text)
                    for word, following in itertools.pairwise(words):
                        if word in ("a", "an"):
                            assert word == ("an" if following in ("orange", "object") else "a"), text


def test_negatives_are_pure() -> None:
    caption = "a red circle above two blue stars"
    assert hard_negatives(SCENE, caption, 3) == hard_negatives(SCENE, caption, 3)
    assert any(hard_negatives(SCENE, caption, 3) != hard_negatives(SCENE, caption, seed) for seed in range(4, 8))
