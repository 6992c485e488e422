"""The check of COCO's counts."""

import pytest

from rewards.files import load_json
from rl_caption.cli.main import run_program
from rl_caption.data import prepare_coco
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json
from rl_caption.data.prepare_coco import prepare
from tests.coco_for_tests import write_downloads


@pytest.fixture
def coco(tmp_path, monkeypatch):
    """The folder, complete, and the counts of what is in it."""
    counts = {"train": (10, 50), "val": (4, 20), "test": (4, 20)}
    monkeypatch.setattr(prepare_coco, "COUNTS", counts)
    return write_downloads(tmp_path / "coco")


def test_a_complete_file_is_counted(coco, tmp_path, capsys):
    assert run_program("prepare_coco", ["--folder", str(coco)]) == 0
    assert "test: 4 images, 20 captions" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"empty/dataset_coco\.json(.|\n)*https://cs"):
        prepare(tmp_path / "empty")


def test_counts_that_do_not_agree_are_named_unless_a_part_is_asked_for(coco):
    path = coco / "dataset_coco.json"
    content = load_json(path)
    images = content["images"]
    images[15]["sentences"].pop()
    del images[3]
    write_json(path, content)
    with pytest.raises(DataError) as caught:
        prepare(coco)
    for part in ("'train': (9, 45)", "'test': (4, 19)", "'train': (10, 50)"):
        assert part in str(caught.value)
    assert prepare(coco, subset=True)["train"] == (9, 45)
