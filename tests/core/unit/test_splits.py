"""Splits of rows: no row of a data set is lost because its split is written in another
way, or in a column.
"""

import pickle

import pytest
from PIL import Image

from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import read_references, write_json, write_json_lines
from rl_caption.data.formats import build_data, rows_of
from tests.core.unit.test_data_published import encoded, sample, tar

SPLITS = ["train", "val", "train", "test", "restval"]


def counts(data):
    return {split: len(data[split]) for split in data}


def json_lines(folder, *splits):
    rows = [
        {"image": f"{number}.png", "references": ["a dog"], "split": split}
        for number, split in enumerate(splits)
    ]
    path = folder / "rows.jsonl"
    write_json_lines(path, rows)
    return DataConfig(format="jsonl", path=str(path))


def karpathy(folder, *splits):
    rows = [
        {
            "filename": "1.jpg",
            "imgid": number,
            "split": split,
            "sentences": [{"raw": "a dog"}],
        }
        for number, split in enumerate(splits)
    ]
    path = folder / "dataset.json"
    write_json(path, {"images": rows})
    return DataConfig(format="karpathy", path=str(path))


def parquet(folder, *splits, named="split", **kwargs):
    datasets = pytest.importorskip("datasets")
    numbers = range(len(splits))
    table = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": encoded(number), "path": None} for number in numbers],
            "references": [[f"caption {number}"] for number in numbers],
            "split": list(splits),
        }
    )
    path = folder / "train.parquet"
    table.cast_column("image", datasets.Image()).to_parquet(path)
    columns = {"image": "image", "references": "references", "split": named}
    return DataConfig(format="hub", path=str(path), columns=columns, kwargs=kwargs)


def shards(folder, *splits, named="json.split"):
    members = {}
    for number, split in enumerate(splits):
        members |= sample(number, f"caption {number}", split=split)
    tar(folder / "photos-0.tar", members)
    columns = {"image": "png", "references": "txt", "split": named}
    return DataConfig(format="hub", path=str(folder), columns=columns)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (parquet, "split"),
        (parquet, "{split}"),
        (shards, "json.split"),
        (shards, "{json[split]}"),
    ],
)
def test_stored_rows_are_in_the_split_that_their_column_names(tmp_path, make, named):
    data = build_data(make(tmp_path, *SPLITS, named=named))
    assert counts(data) == {"train": 3, "val": 1, "test": 1}
    rows = pickle.loads(pickle.dumps(data["train"]))
    captions = [row["references"] for row in rows]
    assert captions == [["caption 0"], ["caption 2"], ["caption 4"]]


def test_splits_that_are_asked_for_go_before_those_of_a_column(tmp_path):
    config = parquet(tmp_path, *SPLITS, splits={"train": "train"})
    assert counts(build_data(config)) == {"train": 5}


FORMATS = pytest.mark.parametrize("make", [json_lines, karpathy, parquet])


@FORMATS
def test_usual_names_are_standard_splits_and_further_names_splits_of_their_own(
    tmp_path, make
):
    others = ["test_unseen", "testA", "val2"]
    splits = ["train", "Train", "validation", "test", "restval", *others]
    data = build_data(make(tmp_path, *splits))
    named = dict.fromkeys(others, 1)
    assert counts(data) == {"train": 3, "val": 1, "test": 1, **named}


@FORMATS
def test_a_misspelt_split_is_an_error(tmp_path, make):
    row = r"(line 2|images\[1\]|row 1): "
    with pytest.raises(DataError, match=f"{row}.*trian"):
        build_data(make(tmp_path, "train", "trian"))


def test_a_misspelt_column_of_a_table_is_an_error(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": ["a.png"], "references": [["a"]], "splits": ["val"]}
    with pytest.raises(DataError, match=r"'train'.*'splits'.*'split'"):
        rows_of(datasets.Dataset.from_dict(rows))


def test_a_table_of_images_alone_is_an_error():
    """Without its image column it has no rows, and would be an empty data set."""
    datasets = pytest.importorskip("datasets")
    photos = [Image.new("RGB", (8, 8))] * 3
    table = datasets.Dataset.from_dict({"image": photos})
    with pytest.raises(DataError, match="no rows"):
        rows_of(table)


def test_references_are_looked_up_by_the_same_names(tmp_path):
    for make in (json_lines, karpathy):
        path = str(make(tmp_path, "Train", "val", "validation", "test").path)
        assert len(read_references(path, "val")) == 2
        assert len(read_references(path, "train")) == 1


def test_an_image_in_memory_is_named_by_its_place():
    row = {"image": Image.new("RGB", (8, 8)), "references": ["a"]}
    assert [one["image_id"] for one in rows_of([row, row])["train"]] == ["0", "1"]
    assert rows_of({"val": [row]})["val"][0]["image_id"] == "val/0"
