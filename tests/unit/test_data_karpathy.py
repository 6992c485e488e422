"""Karpathy JSON: rows, options, and what the errors say."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_caption.data.base import DataError, load_image
from rl_caption.data.checks import check_data
from rl_caption.data.karpathy import KarpathyData


def record(number: int, split: str = "train", **changes: Any) -> dict[str, Any]:
    sentences = [{"raw": f"A photo of thing {number} ."}, {"tokens": ["thing", str(number)]}]
    return {"filename": f"{number}.jpg", "imgid": number, "split": split, "sentences": sentences, **changes}


def write(folder: Path, records: list[Any], name: str = "dataset.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"images": records, "dataset": "tiny"}), encoding="utf-8")
    return path


def photo(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)


def test_rows_carry_ids_paths_and_references_in_file_order(tmp_path: Path) -> None:
    write(tmp_path, [record(2, "test"), record(7, cocoid=391895), record(5)])
    data = KarpathyData(tmp_path, image_root="images")
    assert data.splits == ("train", "test")
    first, second = data.split("train")
    assert (first["image_id"], second["image_id"]) == ("391895", "5")
    assert first["references"] == ["A photo of thing 7 .", "thing 7"]
    assert Path(str(first["image"])) == tmp_path / "images" / "7.jpg"
    assert "features" not in first


def test_path_may_be_the_file_and_image_root_absolute(tmp_path: Path) -> None:
    path = write(tmp_path / "annotations", [record(1)], name="coco.json")
    data = KarpathyData(path, image_root=tmp_path / "photos")
    assert Path(str(data.split("train")[0]["image"])) == tmp_path / "photos" / "1.jpg"


def test_filepath_is_a_folder_unless_flatten(tmp_path: Path) -> None:
    write(tmp_path, [record(1, filepath="val2014")])
    assert Path(str(KarpathyData(tmp_path).split("train")[0]["image"])) == tmp_path / "val2014" / "1.jpg"
    assert Path(str(KarpathyData(tmp_path, flatten=True).split("train")[0]["image"])) == tmp_path / "1.jpg"


def test_image_extension_replaces_the_extension_only(tmp_path: Path) -> None:
    write(tmp_path, [record(1, filename="a.b.tif")])
    data = KarpathyData(tmp_path, image_extension=".jpg")
    assert Path(str(data.split("train")[0]["image"])).name == "a.b.jpg"
    with pytest.raises(DataError, match=r"image_extension is 'jpg'.*such as \.jpg"):
        KarpathyData(tmp_path, image_extension="jpg")


def test_restval_counts_as_train_unless_told_otherwise(tmp_path: Path) -> None:
    write(tmp_path, [record(1, "restval"), record(2, "val"), record(3, "train")])
    assert [row["image_id"] for row in KarpathyData(tmp_path).split("train")] == ["1", "3"]
    apart = KarpathyData(tmp_path, restval_as_train=False)
    assert apart.splits == ("train", "restval", "val")
    assert [row["image_id"] for row in apart.split("restval")] == ["1"]


def test_max_images_keeps_the_first_rows_of_a_split(tmp_path: Path) -> None:
    write(tmp_path, [record(number) for number in range(5)] + [record(9, "val")])
    data = KarpathyData(tmp_path, max_images={"train": 2})
    assert [row["image_id"] for row in data.split("train")] == ["0", "1"]
    assert len(data.split("val")) == 1
    with pytest.raises(DataError, match="'dev'"):
        KarpathyData(tmp_path, max_images={"dev": 2})
    with pytest.raises(DataError, match=r"max_images\.val is 0"):
        KarpathyData(tmp_path, max_images={"val": 0})


def test_features_root_adds_the_path_of_each_feature_file(tmp_path: Path) -> None:
    write(tmp_path, [record(1), record(2), record(3)])
    features = tmp_path / "features"
    features.mkdir()
    (features / "1.npz").touch()
    (features / "2.npy").touch()
    rows = KarpathyData(tmp_path, features_root=features).split("train")
    assert [Path(str(row["features"])).name for row in rows] == ["1.npz", "2.npy", "3.npz"]
    with pytest.raises(DataError, match="features_root"):
        KarpathyData(tmp_path, features_root=tmp_path / "nothing")


def test_an_image_without_sentences_has_no_references(tmp_path: Path) -> None:
    write(tmp_path, [record(1, sentences=[])])
    assert KarpathyData(tmp_path).split("train")[0]["references"] == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"split": None}, r"images\[1\]: 'split' is None"),
        ({"filename": ""}, r"images\[1\]: 'filename' is ''"),
        ({"imgid": None}, r"images\[1\]: no 'cocoid' and no 'imgid'"),
        ({"cocoid": 1.5}, r"images\[1\]: 'cocoid' is 1\.5"),
        ({"filepath": 3}, r"images\[1\]: 'filepath' is 3"),
        ({"sentences": "a dog"}, r"images\[1\]: 'sentences' is 'a dog'"),
        ({"sentences": [{"raw": "fine"}, {"raw": 3}]}, r"images\[1\], sentences\[1\]"),
        ({"sentences": ["a dog"]}, r"images\[1\], sentences\[0\]"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, broken: dict[str, Any], message: str) -> None:
    path = write(tmp_path, [record(1), record(2, **broken)])
    with pytest.raises(DataError, match=message) as caught:
        KarpathyData(tmp_path)
    assert str(path) in str(caught.value)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        KarpathyData(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"exactly one dataset\*\.json, found none"):
        KarpathyData(tmp_path)
    write(tmp_path, [record(1)], "dataset_a.json")
    write(tmp_path, [record(1)], "dataset_b.json")
    with pytest.raises(DataError, match=r"found dataset_a\.json, dataset_b\.json"):
        KarpathyData(tmp_path)
    for content, message in [("[]", "list 'images'"), ("{", "not JSON"), ('{"images": []}', "no images")]:
        (tmp_path / "dataset_a.json").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            KarpathyData(tmp_path / "dataset_a.json")
    with pytest.raises(DataError, match=r"no split 'dev'.*it has train"):
        KarpathyData(tmp_path / "dataset_b.json").split("dev")


def test_damage_is_named_before_records_that_it_spoils(tmp_path: Path) -> None:
    path = write(tmp_path, [record(1), record(2)])
    whole = path.read_text(encoding="utf-8")
    for damaged in (whole[:-20], whole.replace('"sentences"', '], "sentences"', 1), whole + "}"):
        path.write_text(damaged, encoding="utf-8")
        with pytest.raises(DataError, match=r"dataset.*\.json is not JSON: .* line 1 column \d+"):
            KarpathyData(tmp_path)


def test_other_encodings_of_json_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, [record(1), record(2)])
    expected = KarpathyData(tmp_path).split("train")
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-16")
    assert KarpathyData(tmp_path).split("train") == expected


def test_tokens_are_not_kept_in_memory(tmp_path: Path) -> None:
    sentences = [
        {"raw": "a dog runs", "tokens": [f"{word} of {caption}" for word in range(40)]} for caption in range(5)
    ]
    path = write(tmp_path, [record(number, sentences=sentences) for number in range(200)])
    peaks = []
    for read in (lambda: KarpathyData(tmp_path), lambda: json.loads(path.read_bytes())):
        tracemalloc.start()
        read()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < peaks[1] / 2


def explanation(data: KarpathyData) -> str:
    """What the check of the whole dataset says about missing images."""
    with pytest.raises(DataError) as caught:
        check_data(data, data.splits)
    return next(line for line in str(caught.value).splitlines() if "missing images" in line)


def test_missing_images_name_count_first_three_and_the_extension(tmp_path: Path) -> None:
    write(tmp_path, [record(number, filename=f"{number}.tif") for number in range(1, 6)])
    for number in range(1, 6):
        photo(tmp_path / "images" / f"{number}.jpg", number * 40)
    line = explanation(KarpathyData(tmp_path, image_root="images"))
    assert line.startswith("  - 5 missing images: ")
    assert [f"{number}.tif" in line for number in range(1, 6)] == [True, True, True, False, False]
    assert f"found {Path('images/1.jpg')}: set data.image_extension: .jpg (finds 5 of 5 images)" in line
    assert check_data(KarpathyData(tmp_path, "images", image_extension=".jpg"), ["train"]).ok


@pytest.mark.parametrize(
    ("place", "options", "expected"),
    [
        ("images/1.jpg", {}, "data.image_root: images and data.flatten: true"),
        ("images/train/1.jpg", {}, "set data.image_root: images (finds"),
        ("1.jpg", {}, "set data.flatten: true (finds"),
        ("train/1.jpg", {"flatten": True}, "set data.flatten: false (finds"),
        ("train/1.jpg", {"image_extension": ".png"}, "set data.image_extension: null (finds"),
        ("train/1.jpg", {"image_root": "nothing"}, "set data.image_root: . (finds"),
        ("images/1.png", {}, "data.image_root: images and data.image_extension: .png and data.flatten: true"),
        ("elsewhere/deep/1.jpg", {}, "complete the images"),
        ("elsewhere/deep/1.jpg", {"image_root": "nothing"}, "is not a folder: set data.image_root"),
    ],
)
def test_missing_images_name_the_option_that_finds_them(
    tmp_path: Path, place: str, options: dict[str, Any], expected: str
) -> None:
    write(tmp_path, [record(1, filepath="train")])
    photo(tmp_path / place, 90)
    assert expected in explanation(KarpathyData(tmp_path, **options))


def test_no_option_is_named_that_would_lose_more_than_it_finds(tmp_path: Path) -> None:
    write(tmp_path, [record(number) for number in range(1, 4)])
    photo(tmp_path / "1.jpg", 50)
    photo(tmp_path / "2.jpg", 100)
    photo(tmp_path / "3.png", 150)
    line = explanation(KarpathyData(tmp_path))
    assert "1 missing images" in line
    assert "set data" not in line


def test_ucm_captions(shared_data: Path) -> None:
    folder = shared_data / "ucm_captions"
    if not folder.is_dir():
        pytest.skip(f"no UCM-Captions in {shared_data}")
    data = KarpathyData(folder, image_root="images", image_extension=".jpg")
    assert {name: len(data.split(name)) for name in data.splits} == {"train": 1680, "val": 210, "test": 210}
    assert all(len(row["references"]) == 5 for name in data.splits for row in data.split(name))
    assert data.split("train")[0]["references"][0] == "There is a piece of farmland ."
    assert load_image(data.split("test")[0]["image"]).mode == "RGB"
    report = check_data(data, data.splits, num_workers=2)
    assert report.ok
    assert dict(report.rows) == {"train": 1680, "val": 210, "test": 210}
    assert "set data.image_extension: .jpg (finds 2100 of 2100 images)" in explanation(
        KarpathyData(folder, image_root="images")
    )
