"""From the downloads of COCO to the folder that the configurations read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rl_caption.data import prepare_coco
from rl_caption.data.base import DataError
from rl_caption.data.files import read_references
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.prepare_coco import prepare
from tests.coco_for_tests import captions_of, write_downloads, write_features, write_photos

COUNTS = prepare_coco.IMAGES, prepare_coco.CAPTIONS


@pytest.fixture(autouse=True)
def tiny_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_coco, "IMAGES", {"train": 10, "val": 4, "test": 4})
    monkeypatch.setattr(prepare_coco, "CAPTIONS", {"train": 50, "val": 20, "test": 20})


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    return write_downloads(tmp_path / "downloads")


def change(downloads: Path, edit: Callable[[Any], Any]) -> None:
    path = downloads / "dataset_coco.json"
    content = json.loads(path.read_text())
    edit(content["images"])
    path.write_text(json.dumps(content))


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.iterdir()}


def test_everything_at_once_and_a_second_time_nothing(
    downloads: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "coco"
    images, features = write_photos(tmp_path / "photos"), write_features(tmp_path / "regions", 8)
    options: dict[str, Any] = {
        "images": images,
        "features": features,
        "features_kwargs": {"dim": 8},
    }
    summary = prepare(out, downloads, **options)
    assert summary["images"] == {"train": 10, "val": 4, "test": 4}
    assert summary["captions"] == {"train": 50, "val": 20, "test": 20}

    data = KarpathyData(out, "images", features_root=out / "features")
    row = data.split("train")[9]
    assert (row["image_id"], row["references"]) == ("109", captions_of(9))
    assert row["size"] == (32, 24), "of the official annotations"
    assert Path(str(row["image"])).is_file()
    assert row["features"].load(8).shape[1] == 8

    references = read_references(out / "dataset_coco.json", "test")
    assert references == {str(100 + number): captions_of(number) for number in range(14, 18)}

    (tmp_path / "cli").mkdir()
    downloads.rename(tmp_path / "cli" / "downloads")
    assert prepare_coco.main(["--out", str(tmp_path / "cli")]) == 0
    assert "test: 4 images, 20 captions" in capsys.readouterr().out
    downloads = tmp_path / "cli" / "downloads"

    before = stamps(out)
    assert prepare(out, downloads, **options) == summary
    assert prepare(out, downloads, features_kwargs={"dim": 8}) == summary, (
        "what is there is checked"
    )
    assert stamps(out) == before


def test_what_is_missing_is_named_with_where_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, tmp_path / "downloads")
    assert "dataset_coco.json, from https://cs.stanford.edu/" in str(caught.value)
    assert "captions_train2014.json, from http://images.coco" in str(caught.value)
    write_downloads(tmp_path / "downloads")
    (tmp_path / "downloads/annotations/captions_val2014.json").unlink()
    with pytest.raises(
        DataError, match=r"captions_val2014\.json, from .*\n.*--without_annotations"
    ) as caught:
        prepare(tmp_path / "coco", tmp_path / "downloads")
    assert "train2014" not in str(caught.value)
    prepare(tmp_path / "coco", tmp_path / "downloads", annotations=False)


def test_counts_captions_and_files_that_do_not_agree_are_reported_together(
    downloads: Path, tmp_path: Path
) -> None:
    def damage(images: Any) -> None:
        images[0]["sentences"][1]["raw"] = "a mouse"
        images[9]["filename"] = "COCO_val2014_000000000110.jpg"
        images[12]["filepath"] = "train2014"
        images[15]["sentences"].pop()
        images[16]["cocoid"] = 999
        del images[3]

    change(downloads, damage)
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / "coco", downloads)
    for part in (
        "3 wrong counts: train has 9 images, expected 10; train has 45 captions, expected 50; test "
        "has 19 captions",
        "images that the official annotations do not have: cocoid 999",
        "2 images whose captions differ: cocoid 100 (COCO_train2014_000000000100.jpg): ['a "
        "mouse'], officially ['A",
        "cocoid 115 (COCO_val2014_000000000115.jpg): [], officially ['a small bird']",
        "2 annotated images that the file does not have",
        "2 images whose files have other names",
        "cocoid 109: val2014/COCO_val2014_000000000110.jpg, officially "
        "val2014/COCO_val2014_000000000109.jpg",
        "cocoid 112: train2014/COCO_val2014_000000000112.jpg, officially "
        "val2014/COCO_val2014_000000000112.jpg",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "coco").exists()


def test_a_part_of_coco_is_taken_where_that_is_said_and_the_download_never_overwritten(
    downloads, tmp_path
):
    change(downloads, lambda images: images.pop(3))
    with pytest.raises(DataError, match=r"COCO.*--subset"):
        prepare(tmp_path / "coco", downloads)
    assert prepare(tmp_path / "coco", downloads, subset=True)["images"] == {
        "train": 9,
        "val": 4,
        "test": 4,
    }
    before = (downloads / "dataset_coco.json").read_bytes()
    with pytest.raises(DataError, match=r"downloads/dataset_coco\.json"):
        prepare(downloads, downloads)
    assert (downloads / "dataset_coco.json").read_bytes() == before


def test_missing_images_and_wrong_features_are_counted_and_named_together(
    downloads: Path, tmp_path: Path
) -> None:
    out, photos, features = (
        tmp_path / "coco",
        write_photos(tmp_path / "p"),
        write_features(tmp_path / "f", 8),
    )
    (photos / "val2014/COCO_val2014_000000000110.jpg").unlink()
    np.savez(features / "105.npz", features=np.ones((3, 9), np.float32))
    (features / "106.npz").unlink()
    with pytest.raises(
        DataError, match=r"1 of 18.*'.*val2014_000000000110\.jpg': No such"
    ) as caught:
        prepare(out, downloads, photos, features, {"dim": 8})
    for part in (
        "2 missing or unusable features",
        "image '105' (",
        "is [3, 9], expected [regions, 8]",
        "image '106'",
    ):
        assert part in str(caught.value)
    assert (out / "dataset_coco.json").is_file(), "the captions were right"
    with pytest.raises(DataError, match="features exists"):
        prepare(out, downloads, features=photos)


def test_values_of_features_are_read_unless_it_is_to_be_fast(
    downloads: Path, tmp_path: Path
) -> None:
    with h5py.File(
        tmp_path / "coco_detections.hdf5", "w"
    ) as file:  # which takes the name that configurations read
        for number in range(18):
            file[f"{100 + number}_features"] = np.full(
                (3, 8), np.inf if number == 5 else 1, np.float32
            )
    options: dict[str, Any] = {
        "features": tmp_path / "coco_detections.hdf5",
        "features_kwargs": {"dim": 8},
    }
    prepare(tmp_path / "coco", downloads, **options, fast=True)
    data = KarpathyData(tmp_path / "coco", "images", features_root=tmp_path / "coco/features")
    assert data.split("test")[0]["features"].load(8).shape == (3, 8)
    with pytest.raises(DataError, match=r"1.*image '105'.*features\[0, 0\]"):
        prepare(tmp_path / "coco", downloads, **options)


def test_the_counts_are_those_of_the_official_files() -> None:
    assert sum(COUNTS[0].values()) == 82_783 + 40_504, "images of train2014 and of val2014"
    assert sum(COUNTS[1].values()) == 414_113 + 202_654, "their captions"
    assert [*COUNTS[0].values(), *COUNTS[1].values()] == [
        113_287,
        5_000,
        5_000,
        566_747,
        25_010,
        25_010,
    ]
