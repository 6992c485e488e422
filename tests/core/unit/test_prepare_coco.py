"""From the downloads of COCO to the folder that the configurations read."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rewards.files import load_json
from rl_caption.cli.main import run_program
from rl_caption.data import prepare_coco
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json
from rl_caption.data.prepare_coco import prepare
from rl_caption.data.rows import karpathy
from tests.coco_for_tests import (
    captions_of,
    write_downloads,
    write_features,
    write_photos,
)


@pytest.fixture(autouse=True)
def tiny_counts(monkeypatch):
    monkeypatch.setattr(prepare_coco, "IMAGES", {"train": 10, "val": 4, "test": 4})
    monkeypatch.setattr(prepare_coco, "CAPTIONS", {"train": 50, "val": 20, "test": 20})


@pytest.fixture
def downloads(tmp_path):
    return write_downloads(tmp_path / "downloads")


def change(downloads, edit):
    path = downloads / "dataset_coco.json"
    content = load_json(path)
    edit(content["images"])
    write_json(path, content)


def test_everything_at_once_and_a_second_time_nothing(downloads, tmp_path, capsys):
    out = tmp_path / "coco"
    options = {"images": write_photos(tmp_path / "photos")}
    options["features"] = write_features(tmp_path / "regions", 8)
    options["features_kwargs"] = {"dim": 8}
    summary = prepare(out, downloads, **options)
    assert summary["images"] == {"train": 10, "val": 4, "test": 4}
    assert summary["captions"] == {"train": 50, "val": 20, "test": 20}

    data = karpathy(out, "images", features_root=out / "features")
    row = data.split("train")[9]
    assert (row["image_id"], row["references"]) == ("109", captions_of(9))
    assert Path(str(row["image"])).is_file()
    assert row["features"].load(8).shape[1] == 8

    shutil.copytree(downloads, tmp_path / "cli" / "downloads")
    assert run_program("prepare_coco", ["--out", str(tmp_path / "cli")]) == 0
    assert "test: 4 images, 20 captions" in capsys.readouterr().out

    assert prepare(out, downloads, features_kwargs={"dim": 8}) == summary, (
        "what is there is checked"
    )


def test_what_is_missing_is_named_with_where_to_get_it(downloads, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"empty: dataset_coco\.json.*\n.*\n.*https://cs\.stanford"
    ):
        prepare(tmp_path / "coco", tmp_path / "empty")


def test_counts_and_captions_that_do_not_agree_are_reported_together(
    downloads, tmp_path
):
    def damage(images):
        images[15]["sentences"].pop()
        images[16]["cocoid"] = 999
        del images[3]

    change(downloads, damage)
    with pytest.raises(DataError) as caught:
        prepare(tmp_path / "coco", downloads)
    for part in ("'train': 9", "'train': 45", "'test': 19", "'train': 50"):
        assert part in str(caught.value)
    assert prepare(tmp_path / "coco", write_downloads(tmp_path / "downloads"))


def test_missing_images_and_wrong_features_are_counted_and_named(downloads, tmp_path):
    photos, features = write_photos(tmp_path / "p"), write_features(tmp_path / "f", 8)
    (photos / "val2014/COCO_val2014_000000000110.jpg").unlink()
    np.savez(features / "105.npz", features=np.ones((3, 9), np.float32))
    (features / "106.npz").unlink()
    with pytest.raises(
        DataError, match=r"1 of 18.*'.*val2014_000000000110\.jpg': No such"
    ):
        prepare(tmp_path / "coco", downloads, photos)
    with pytest.raises(
        DataError, match=r"2 missing or unusable features.*'105'.*\[3, 9\].*'106'"
    ):
        prepare(
            tmp_path / "other", downloads, features=features, features_kwargs={"dim": 8}
        )


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
