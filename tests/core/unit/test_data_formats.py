"""Karpathy JSON, JSON lines and long captions: rows, options, and what the errors say."""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json
from rl_caption.data.formats import build_data
from rl_caption.data.rows import jsonl, karpathy


def record(number, split="train", **changes):
    absent = {"raw": None} if number % 2 else {}
    sentences = [
        {"raw": f"A photo of thing {number} ."},
        {"tokens": ["thing", str(number)], **absent},
    ]
    return {
        "filename": f"{number}.jpg",
        "imgid": number,
        "split": split,
        "sentences": sentences,
        **changes,
    }


def write(folder, *records, name="dataset.json"):
    write_json(folder / name, {"images": records, "dataset": "tiny"})
    return folder / name


def write_lines(folder, *lines):
    path = folder / "photos.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def image_paths(data, split="train"):
    return [Path(str(row["image"])) for row in data[split]]


def ids(data, split="train"):
    return [row["image_id"] for row in data[split]]


# --- Karpathy JSON ------------------------------------------------------------------------------


def test_rows_carry_ids_paths_and_references_in_file_order(tmp_path):
    first, second = record(7, cocoid=391895), record(5, "restval", sentences=[])
    path = write(tmp_path, record(2, "test"), first, second)
    data = karpathy(tmp_path, image_root="images")
    assert [*data] == ["train", "test"]
    assert ids(data) == ["391895", "5"]
    references = [row["references"] for row in data["train"]]
    assert references == [["A photo of thing 7 .", "thing 7"], []]
    images = tmp_path / "images"
    assert image_paths(data) == [images / "7.jpg", images / "5.jpg"]
    photos = image_paths(karpathy(path, image_root="/photos"), "test")
    assert photos == [Path("/photos/2.jpg")]
    write(tmp_path, record(1, filepath="val2014", filename="a.b.tif"))
    for options, place in (
        ({}, "val2014/a.b.tif"),
        ({"flatten": True}, "a.b.tif"),
        ({"image_extension": ".jpg"}, "val2014/a.b.jpg"),
    ):
        assert image_paths(karpathy(tmp_path, **options)) == [tmp_path / place]


def test_wrong_karpathy_files_are_named(tmp_path):
    write(tmp_path, record(1), name="dataset_a.json")
    path = write(tmp_path, record(1), name="dataset_b.json")
    with pytest.raises(DataError, match=r"one dataset\*\.json"):
        karpathy(tmp_path)
    with pytest.raises(DataError, match=r"split 'dev'"):
        karpathy(path)["dev"]
    for content in ("[]", '{"images": []}', '{"images": [{"filename": "a.jpg"}]}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="dataset_b"):
            karpathy(path)


# --- JSON lines ---------------------------------------------------------------------------------


def test_defaults_and_options_of_json_lines(tmp_path):
    first = {"image": "in/a.jpg", "references": ["a dog", "a brown dog"]}
    second = {"image": "b.jpg", "references": [], "split": "test", "image_id": 7}
    second |= {"prompt": "", "source": "mine"}
    third = {"references": ["a cat"], "long_reference": "A cat. It sleeps."}
    third |= {"positive_captions": ["a tabby"], "positive_images": ["made/c.png"]}
    path = write_lines(tmp_path, first, "", second, {"image": "/else/c.jpg", **third})
    data = jsonl(path)
    assert [*data] == ["train", "test"]
    a, c = data["train"]
    assert a == first | {"image_id": "in/a.jpg", "image": str(tmp_path / "in/a.jpg")}
    made = {"positive_images": [str(tmp_path / "made/c.png")]}
    assert c == third | made | {"image_id": "/else/c.jpg", "image": "/else/c.jpg"}
    (row,) = data["test"]
    assert row["image_id"] == "7"
    assert row["prompt"] == "", "none, in place of the model's"
    elsewhere = image_paths(jsonl(path, image_root="photos"), "test")
    assert elsewhere == [tmp_path / "photos" / "b.jpg"]


def test_features_are_found_by_image_id_with_and_without_a_folder(tmp_path):
    rows = [
        {"image": "in/a.jpg", "references": ["a"]},
        {"image": "b.jpg", "image_id": "b", "references": ["b"]},
    ]
    features = tmp_path / "features"
    (features / "in").mkdir(parents=True)
    for name, size in (("in/a.jpg.npy", 2), ("b.npy", 3)):
        np.save(features / name, np.ones((size, 3), np.float32))
    path = write_lines(tmp_path, *rows)
    config = DataConfig(format="jsonl", path=str(path), features_root=str(features))
    found = build_data(config)["train"]
    assert [len(row["features"].load()) for row in found] == [2, 3]


GOOD = {"image": "a.jpg", "references": ["a"]}


def test_a_wrong_line_is_named(tmp_path):
    for line, message in (
        ({"image": "a.jpg"}, "'references' is not set"),
        (GOOD | {"references": "a"}, "'references' is 'a'"),
        (GOOD | {"negatives": []}, "'negatives'"),
        (GOOD | {"splits": "test"}, "key 'splits': .*'split'"),
    ):
        with pytest.raises(DataError, match=rf"photos\.jsonl, line 2.*{message}"):
            jsonl(write_lines(tmp_path, GOOD, line))


def test_a_file_of_json_lines_may_begin_with_a_mark(tmp_path):
    content = b'\xef\xbb\xbf{"image": "a.jpg", "references": ["a dog"]}\r\n'
    (tmp_path / "windows.jsonl").write_bytes(content)
    assert ids(jsonl(tmp_path / "windows.jsonl")) == ["a.jpg"]


# --- long captions ------------------------------------------------------------------------------


def test_the_long_description_is_the_one_reference(tmp_path):
    sizes = {"num_train": 4, "num_val": 2, "num_test": 0, "num_unseen": 0}
    sizes |= {"image_size": 32, "positives": True}
    config = DataConfig(format="scenes", kwargs=sizes)
    short = build_data(config)
    long = build_data(config.replace(long_captions=True))
    assert [*long] == [*short]
    for row, plain in zip(long["train"], short["train"], strict=True):
        assert row["references"] == [plain["long_reference"]]
        assert row["short_references"] == plain["references"]
        assert row["positive_captions"] == plain["positive_captions"]
        assert "positive_images" not in row
    path = write_lines(tmp_path, GOOD)
    config = DataConfig(format="jsonl", path=str(path), long_captions=True)
    with pytest.raises(DataError, match=r"a\.jpg.*long_reference"):
        build_data(config)["train"][0]
