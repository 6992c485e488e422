"""What the sources of hard negatives promise to training."""

import numpy as np
import pytest

from rl_caption.data.base import DataError
from rl_caption.data.files import write_json_lines
from rl_caption.data.negatives import ColumnNegatives
from rl_caption.data.rows import jsonl
from rl_caption.data.scenes import ScenesData
from rl_caption.data.scenes.negatives import NEGATIVE_KINDS, SceneNegatives
from rl_caption.reward_models.batch import sampled_sentences
from rl_caption.reward_models.contrastive import HardNegatives


def test_negatives_are_a_function_of_the_generator():
    texts = ["a cat", "a cow", "a pig"]
    row = {"image_id": "1", "references": ["a dog"], "negatives": [texts]}
    source = ColumnNegatives()
    drawn = HardNegatives(source, 4).of(row, "a dog", 5)
    assert sorted(drawn) == texts
    assert drawn == HardNegatives(source, 4).of(row, "a dog", 5)
    assert HardNegatives(source, 1).of(row, "a dog", 5) == drawn[:1]


def test_negatives_of_scenes_are_all_in_another_order():
    row = ScenesData(num_train=3, num_val=0, num_test=0, num_unseen=0)["train"][1]
    caption, negatives = row["references"][0], SceneNegatives()
    drawn = [negatives(row, caption, np.random.default_rng(seed)) for seed in range(9)]
    kinds = [kind for kind in NEGATIVE_KINDS if kind in dict(drawn[0])]
    assert len(kinds) > 3
    assert all(sorted(dict(found)) == sorted(kinds) for found in drawn)
    assert len({tuple(dict(found)) for found in drawn}) > 1


def test_negatives_and_positives_of_the_data(tmp_path):
    file = tmp_path / "rows.jsonl"
    item = {
        "image": "a.png",
        "references": ["a dog", "one dog"],
        "negatives": [["a cat", "a cow"], []],
    }
    write_json_lines(file, [item | {"positive_captions": ["one dog", "some dog"]}])
    row = jsonl(file)["train"][0]
    found = ColumnNegatives()(row, "a dog", np.random.default_rng(0))
    assert sorted(found) == [("data", "a cat"), ("data", "a cow")]
    assert ColumnNegatives()(row, "one dog", np.random.default_rng(0)) == []
    with pytest.raises(DataError, match="'a cat'"):
        ColumnNegatives()(row, "a cat", np.random.default_rng(0))


def test_sentences_are_sampled_in_their_order():
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
