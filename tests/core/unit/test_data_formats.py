"""Karpathy JSON, JSON lines and long captions: rows, options, and what the errors say."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, load_image
from rl_caption.data.checks import check_data
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
    path.write_text(
        "\n".join(
            line if isinstance(line, str) else json.dumps(line) for line in lines
        ),
        encoding="utf-8",
    )
    return path


def photo(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)


def image_paths(data, split="train"):
    return [Path(str(row["image"])) for row in data.split(split)]


def ids(data, split="train"):
    return [row["image_id"] for row in data.split(split)]


# --- Karpathy JSON ------------------------------------------------------------------------------


def test_rows_carry_ids_paths_and_references_in_file_order(tmp_path):
    first, second = record(7, cocoid=391895), record(5, sentences=[])
    path = write(tmp_path, record(2, "test"), first, second)
    data = karpathy(tmp_path, image_root="images")
    assert data.splits == ("train", "test")
    assert ids(data) == ["391895", "5"]
    references = [row["references"] for row in data.split("train")]
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


def test_restval_counts_as_train_and_max_images_keeps_the_first_rows(tmp_path):
    splits = ("restval", "val", "train", "val")
    write(tmp_path, *(record(number, split) for number, split in enumerate(splits, 1)))
    assert ids(karpathy(tmp_path)) == ["1", "3"]
    data = karpathy(tmp_path, max_images={"train": 1})
    assert (ids(data), ids(data, "val")) == (["1"], ["2", "4"])


def test_wrong_karpathy_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"found \[\]"):
        karpathy(tmp_path)
    write(tmp_path, record(1), name="dataset_a.json")
    path = write(tmp_path, record(1), name="dataset_b.json")
    with pytest.raises(DataError, match=r"dataset_a\.json', 'dataset_b\.json"):
        karpathy(tmp_path)
    with pytest.raises(DataError, match=r"split 'dev'"):
        karpathy(path).split("dev")
    for content in ("[]", '{"images": []}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="dataset_b"):
            karpathy(path)


@pytest.mark.slow
def test_ucm_captions(shared_data):
    folder = shared_data / "ucm_captions"
    if not folder.is_dir():
        pytest.skip(f"no UCM-Captions in {shared_data}")
    data = karpathy(folder, image_root="images", image_extension=".jpg")
    assert all(
        len(row["references"]) == 5 for name in data.splits for row in data.split(name)
    )
    assert data.split("train")[0]["references"][0] == "There is a piece of farmland ."
    assert load_image(data.split("test")[0]["image"]).mode == "RGB"
    report = check_data(data, data.splits, num_workers=2)
    assert not report.problems
    assert dict(report.rows) == {"train": 1680, "val": 210, "test": 210}
    with pytest.raises(DataError, match=r"2100 missing images.*data\.image_extension"):
        check_data(karpathy(folder, image_root="images"), data.splits)


# --- JSON lines ---------------------------------------------------------------------------------


def test_defaults_and_options_of_json_lines(tmp_path):
    first = {"image": "in/a.jpg", "references": ["a dog", "a brown dog"]}
    second = {"image": "b.jpg", "references": [], "split": "test", "image_id": 7}
    second |= {"prompt": "a photo of", "source": "mine"}
    third = {"references": ["a cat"], "long_reference": "A cat. It sleeps."}
    third |= {"positive_captions": ["a tabby"], "positive_images": ["made/c.png"]}
    fourth = {"image": "d.jpg", "references": ["a bird"], "split": "val", "prompt": ""}
    rows = (first, "", second, {"image": "/else/c.jpg", **third}, fourth)
    path = write_lines(tmp_path, *rows)
    data = jsonl(path)
    assert data.splits == ("train", "val", "test")
    assert data.split("val")[0]["prompt"] == "", "none, in place of the model's"
    a, c = data.split("train")
    assert a == first | {"image_id": "in/a.jpg", "image": str(tmp_path / "in/a.jpg")}
    made = {"positive_images": [str(tmp_path / "made/c.png")]}
    assert c == third | made | {"image_id": "/else/c.jpg", "image": "/else/c.jpg"}
    (row,) = data.split("test")
    assert (row["image_id"], row["prompt"]) == ("7", "a photo of")
    elsewhere = image_paths(jsonl(path, image_root="photos"), "test")
    assert elsewhere == [tmp_path / "photos" / "b.jpg"]
    assert len(jsonl(path, max_images={"train": 1}).split("train")) == 1


def test_features_are_found_by_image_id_with_and_without_a_folder(tmp_path):
    rows = [
        {"image": "in/a.jpg", "references": ["a"]},
        {"image": "b.jpg", "image_id": "b", "references": ["b"]},
    ]
    files = [tmp_path / "features" / name for name in ("in/a.jpg.npy", "b.npy")]
    files[0].parent.mkdir(parents=True)
    for file in files:
        np.save(file, np.ones((2, 3), np.float32))
    found = jsonl(
        write_lines(tmp_path, *rows), features_root=tmp_path / "features"
    ).split("train")
    assert [str(row["features"]) for row in found] == [str(file) for file in files]


GOOD = {"image": "a.jpg", "references": ["a"]}


def test_a_wrong_line_is_named(tmp_path):
    for line, message in (
        ({"image": "a.jpg"}, "has no 'references'"),
        (GOOD | {"references": "a"}, "'references' is 'a'"),
        (GOOD | {"positive_image": ["a"]}, "'positive_image'.*'positive_images'"),
        (GOOD | {"splits": "test"}, "key 'splits': .*'split'"),
    ):
        with pytest.raises(DataError, match=rf"photos\.jsonl, line 2.*{message}"):
            jsonl(write_lines(tmp_path, GOOD, line))


def test_wrong_files_of_json_lines_are_named(tmp_path):
    with pytest.raises(DataError, match=r"photos\.jsonl"):
        jsonl(write_lines(tmp_path))
    (tmp_path / "windows.jsonl").write_bytes(
        b'\xef\xbb\xbf{"image": "a.jpg", "references": ["a dog"]}\r\n'
    )
    assert ids(jsonl(tmp_path / "windows.jsonl")) == ["a.jpg"], (
        "a byte order mark is no error"
    )
    path = write_lines(tmp_path, GOOD)
    with pytest.raises(DataError, match=r"1.*a\.jpg.*data\.image_root"):
        check_data(jsonl(path), ["train"])
    photo(tmp_path / "photos" / "a.jpg", 9)
    check_data(jsonl(path, image_root="photos"), ["train"])


# --- long captions ------------------------------------------------------------------------------


def test_the_long_description_is_the_one_reference(tmp_path):
    sizes = {
        "num_train": 4,
        "num_val": 2,
        "num_test": 0,
        "num_unseen": 0,
        "image_size": 32,
        "positives": True,
    }
    short, long = (
        build_data(DataConfig(format="scenes", kwargs=sizes, long_captions=wanted))
        for wanted in (False, True)
    )
    assert long.splits == short.splits
    for row, plain in zip(long.split("train"), short.split("train"), strict=True):
        assert row["references"] == [plain["long_reference"]]
        assert row["short_references"] == plain["references"]
        assert row["positive_captions"] == plain["positive_captions"]
        assert "positive_images" not in row
    path = write_lines(
        tmp_path,
        GOOD | {"long_reference": "A cat. It sits."},
        GOOD | {"image": "b.jpg"},
    )
    rows = build_data(
        DataConfig(format="jsonl", path=str(path), long_captions=True)
    ).split("train")
    assert rows[0]["references"] == ["A cat. It sits."]
    with pytest.raises(DataError, match=r"b.*long_reference"):
        rows[1]
