"""The check of COCO's folder: counts, images, features."""

import numpy as np
import pytest

from rewards.files import load_json
from rl_caption.cli.main import run_program
from rl_caption.data import prepare_coco
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json
from rl_caption.data.prepare_coco import prepare
from tests.coco_for_tests import write_downloads, write_features, write_photos


@pytest.fixture
def coco(tmp_path, monkeypatch):
    """The folder, complete, and the counts of what is in it."""
    images = {"train": 10, "val": 4, "test": 4}
    monkeypatch.setattr(prepare_coco, "IMAGES", images)
    captions = {"train": 50, "val": 20, "test": 20}
    monkeypatch.setattr(prepare_coco, "CAPTIONS", captions)
    folder = write_downloads(tmp_path / "coco")
    write_photos(folder / "images")
    features = write_features(tmp_path / "regions", 8)
    (folder / "features").symlink_to(features)
    return folder


def change(coco, edit):
    path = coco / "dataset_coco.json"
    content = load_json(path)
    edit(content["images"])
    write_json(path, content)


def test_a_complete_folder_is_counted(coco, capsys):
    counts = prepare(coco, {"dim": 8})
    assert counts["images"] == {"train": 10, "val": 4, "test": 4}
    assert counts["captions"] == {"train": 50, "val": 20, "test": 20}
    assert run_program("prepare_coco", ["--folder", str(coco)]) == 0
    assert "test: 4 images, 20 captions" in capsys.readouterr().out


def test_counts_that_do_not_agree_are_named_unless_a_part_is_asked_for(coco):
    def damage(images):
        images[15]["sentences"].pop()
        del images[3]

    change(coco, damage)
    with pytest.raises(DataError) as caught:
        prepare(coco)
    for part in ("'train': 9", "'train': 45", "'test': 19", "'train': 50"):
        assert part in str(caught.value)
    assert prepare(coco, subset=True)["images"]["train"] == 9


def test_missing_files_and_wrong_features_are_counted_and_named(coco, tmp_path):
    np.savez(coco / "features/105.npz", features=np.ones((3, 9), np.float32))
    (coco / "features/106.npz").unlink()
    message = r"2 missing or unusable features.*'105'.*\[3, 9\].*'106'"
    with pytest.raises(DataError, match=message):
        prepare(coco, {"dim": 8})
    (coco / "images/val2014/COCO_val2014_000000000110.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 18.*'.*val2014_000000000110\.jpg'"):
        prepare(coco)
    with pytest.raises(DataError, match=r"empty/dataset_coco\.json(.|\n)*https://cs"):
        prepare(tmp_path / "empty")
