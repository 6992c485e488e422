"""Long descriptions as captions."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError


def scenes(long_captions: bool) -> DataConfig:
    sizes = {"num_train": 4, "num_val": 2, "num_test": 0, "num_unseen": 0, "image_size": 32}
    return DataConfig(format="scenes", kwargs=sizes, long_captions=long_captions)


def test_the_long_description_is_the_one_reference() -> None:
    short, long = build_data(scenes(False)), build_data(scenes(True))
    assert long.splits == short.splits
    for row, plain in zip(long.split("train"), short.split("train"), strict=True):
        assert row["references"] == [plain["long_reference"]]
        assert row["short_references"] == plain["references"]
        assert row["image_id"] == plain["image_id"]
    rows = pickle.loads(pickle.dumps(long.split("val")))
    assert [row["references"] for row in rows[:2]] == [[row["long_reference"]] for row in short.split("val")]
    assert rows[-1]["image_id"] == short.split("val")[1]["image_id"]


def test_a_row_without_a_long_description_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        '{"image": "a.png", "references": ["a cat"], "split": "train", "long_reference": "A cat. It sits."}\n'
        '{"image": "b.png", "references": ["a dog"], "split": "train"}\n'
    )
    rows = build_data(DataConfig(format="jsonl", path=str(tmp_path / "data.jsonl"), long_captions=True)).split("train")
    assert rows[0]["references"] == ["A cat. It sits."]
    with pytest.raises(DataError, match=r"train 'b.*' has no long_reference, which data\.long_captions"):
        rows[1]
