"""Hard negatives by rules: each kind by hand, and what the sources promise to training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_caption.data.base import DataError
from rl_caption.data.negatives import (
    EDITS,
    ColumnNegatives,
    RuleNegatives,
    Tagged,
    tag_words,
    word_pool,
)
from rl_caption.data.rows import jsonl
from rl_caption.data.scenes import ScenesData
from rl_caption.data.scenes.negatives import SceneNegatives
from rl_caption.data.scenes.oracle import oracle
from rl_caption.reward_models.batch import sampled_sentences
from rl_caption.reward_models.contrastive import HardNegatives

CAPTIONS = [
    "Two brown dogs run in front of a small boy.",
    "a red ball under an old tree",
    "people near a black cat",
]


def edits(kind: str, caption: str, draws: int = 60) -> set[str | None]:
    """All that a rule makes of a caption, over random draws."""
    own, pool = tag_words(caption), word_pool(CAPTIONS)
    return {
        EDITS[kind](own, pool, np.random.default_rng(seed)) for seed in range(draws)
    }


def test_rules_by_hand() -> None:
    for kind, caption, expected in (
        (
            "replace_object",
            "a cat sleeps",
            {"a boy sleeps", "a ball sleeps", "a tree sleeps"},
        ),
        (
            "replace_attribute",
            "a red ball",
            {"a brown ball", "a small ball", "an old ball", "a black ball"},
        ),
        ("replace_relation", "A dog in front of a tree", {"A dog behind a tree"}),
        ("replace_relation", "a dog left of a cat", {"a dog right of a cat"}),
        ("replace_relation", "a dog sleeps", {None}),
        ("swap_object", "a dog is near an old cat", {"a cat is near an old dog"}),
        ("swap_object", "a tennis ball", {None}),
        (
            "swap_attribute",
            "a red ball near a small tree",
            {"a small ball near a red tree"},
        ),
        ("swap_attribute", "a black and white dog", {None}),
        ("add_attribute", "a red ball", {None}),
        (
            "shuffle_trigrams",
            "a dog runs on the beach.",
            {"a dog runs on the beach", "on the beach a dog runs"},
        ),
    ):
        assert edits(kind, caption) == expected, kind


def test_counts_articles_and_plurals() -> None:
    assert tag_words("") == Tagged((), ())
    assert edits("replace_count", "Two dogs") == {
        f"{number} dogs"
        for number in ("Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    }
    assert edits("replace_count", "one dog") == {None}
    assert edits("replace_object", "three cats sit") == {
        "three dogs sit",
        "three people sit",
    }
    assert "a dog and people run" not in edits("add_object", "a dog runs")
    assert {"a dog and a boy runs", "a dog and people runs"} <= edits(
        "add_object", "a dog runs"
    )


def test_shuffles_keep_the_words() -> None:
    caption = "a brown dog runs on the sandy beach near two boys"
    own = tag_words(caption)
    for kind in [kind for kind in EDITS if kind.startswith("shuffle")]:
        for text in edits(kind, caption):
            assert sorted(str(text).split()) == sorted(own.words)
    kept = [at for at, letter in enumerate(own.classes) if letter not in "NJ"]
    for text in edits("shuffle_nouns_adjectives", caption):
        assert [str(text).split()[at] for at in kept] == [own.words[at] for at in kept]


def test_negatives_are_no_reference_and_a_function_of_the_generator() -> None:
    row: Any = {
        "image_id": "1",
        "references": ["A dog in front of a tree", "a dog behind a  Tree"],
    }
    source = RuleNegatives(CAPTIONS, ["replace_relation", "swap_object", "add_object"])
    found = source(row, row["references"][0], np.random.default_rng(3))
    assert found == source(row, row["references"][0], np.random.default_rng(3))
    assert {kind for kind, _ in found} == {"swap_object", "add_object"}
    texts = HardNegatives(source, 4).of(row, row["references"][0], 5)
    assert len(texts) == 2
    assert HardNegatives(source, 1).of(row, row["references"][0], 5) == texts[:1]
    with pytest.raises(ValueError, match="replace_colour"):
        RuleNegatives(CAPTIONS, ["replace_colour"])


def test_negatives_of_scenes_are_false_and_of_the_kinds_asked_for() -> None:
    row: Any = ScenesData(num_train=3, num_val=0, num_test=0, num_unseen=0).split(
        "train"
    )[1]
    for kind, text in SceneNegatives(["replace_object", "replace_attribute"])(
        row, row["references"][0], np.random.default_rng(0)
    ):
        assert kind in ("replace_object", "replace_attribute")
        assert oracle(text, row["scene"]).precision < 1
    with pytest.raises(DataError, match="image '7'"):
        SceneNegatives()(
            {"image_id": "7", "references": ["a"]}, "a", np.random.default_rng(0)
        )


def test_negatives_and_positives_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    item = {
        "image": "a.png",
        "references": ["a dog", "one dog"],
        "negatives": [["a cat", "a cow"], []],
    }
    file.write_text(json.dumps(item | {"positive_captions": ["one dog", "some dog"]}))
    row = jsonl(file).split("train")[0]
    found = ColumnNegatives()(row, "a dog", np.random.default_rng(0))
    assert sorted(found) == [("data", "a cat"), ("data", "a cow")]
    assert ColumnNegatives()(row, "one dog", np.random.default_rng(0)) == []
    with pytest.raises(DataError, match="'a cat'"):
        ColumnNegatives()(row, "a cat", np.random.default_rng(0))
    file.write_text(json.dumps(item | {"negatives": [["a cat"]]}))
    with pytest.raises(DataError, match="line 1: 'negatives'"):
        jsonl(file)


def test_sentences_are_sampled_in_their_order() -> None:
    caption = "A dog runs. It is brown! Is it fast? Yes."
    sentences = ["A dog runs.", "It is brown!", "Is it fast?", "Yes."]
    drawn = [
        sampled_sentences(caption, 1, 3, np.random.default_rng(seed))
        for seed in range(80)
    ]
    counts = set()
    for text in drawn:
        kept = [sentence for sentence in sentences if sentence in text]
        assert " ".join(kept) == text
        counts.add(len(kept))
    assert counts == {1, 2, 3}
    assert (
        sampled_sentences("one sentence", 2, 9, np.random.default_rng(0))
        == "one sentence"
    )
