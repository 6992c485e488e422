"""The generated world as a dataset, its images in memory, and its export to files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from rewards.images import Renderable
from rl_caption.data.base import DataError, load_image
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.scenes import ScenesData, oracle
from rl_caption.data.scenes.__main__ import main
from rl_caption.data.scenes.module import belongs, content_key, export
from rl_caption.data.scenes.render import SceneImage, _Cache
from rl_caption.data.scenes.world import COLOURS, RADIUS, SHAPES, UNSEEN_PAIRS, Scene, Thing, make_scene, moves

DATA = ScenesData(num_train=400, num_val=80, num_test=80, num_unseen=80)


def _pairs(split: str) -> set[tuple[str, str]]:
    return {(thing.colour, thing.shape) for row in DATA.split(split) for thing in row["scene"].things}


def test_rows_have_what_the_seam_asks() -> None:
    assert DATA.splits == ("train", "val", "test", "test_unseen")
    row = DATA.split("train")[123]
    assert row["image_id"] == "train-000123"
    assert isinstance(row["image"], SceneImage)
    assert isinstance(row["image"], Renderable)
    assert len(row["references"]) == 5
    assert oracle(row["long_reference"], row["scene"]) == (1, 1, 1, 0)
    assert load_image(row["image"]).size == (64, 64)
    assert [len(DATA.split(split)) for split in DATA.splits] == [400, 80, 80, 80]
    assert len({row["image_id"] for split in DATA.splits for row in DATA.split(split)}) == 640


def test_rows_do_not_depend_on_order_or_size() -> None:
    again = ScenesData(num_train=10, num_val=5, num_test=5, num_unseen=5)
    for split in DATA.splits:
        for index in (4, 0, 3):
            assert again.split(split)[index] == DATA.split(split)[index]
    assert ScenesData(seed=1).split("train")[0] != DATA.split("train")[0]


def test_rows_are_made_when_looked_at() -> None:
    """A split of a billion rows costs nothing until rows are read."""
    rows = ScenesData(num_train=10**9).split("train")
    assert len(rows) == 10**9
    assert rows[-1]["image_id"] == f"train-{10**9 - 1}"
    assert [row["image_id"] for row in rows[2:4]] == ["train-000002", "train-000003"]
    with pytest.raises(IndexError):
        rows[10**9]


def test_positives_are_true_of_the_scene_and_of_its_captions_and_stay_in_the_split() -> None:
    with_positives = ScenesData(num_train=200, num_val=20, num_test=0, num_unseen=20, positives=True)
    elsewhere = 0
    for split in ("train", "val", "test_unseen"):
        for row, plain in zip(with_positives.split(split), DATA.split(split), strict=False):
            assert plain == {key: value for key, value in row.items() if not key.startswith("positive")}
            captions, images = row["positive_captions"], row["positive_images"]
            assert len(set(captions) - set(row["references"])) == len(images) == 5
            assert all(oracle(caption, row["scene"]).precision == 1 for caption in captions)
            for image, caption in zip(images, row["references"], strict=True):
                assert isinstance(image, SceneImage)
                assert oracle(caption, image.scene) == oracle(caption, row["scene"])
                assert oracle(row["long_reference"], image.scene) == (1, 1, 1, 0)
                assert belongs(image.scene, split)
                assert Scene.from_dict(image.scene.to_dict()) == image.scene
                elsewhere += image.scene != row["scene"]
    assert elsewhere > 1000, "crowded scenes alone stay where they are"
    with pytest.raises(DataError, match="captions_per_image=11, positives=True: expected 1 to 10"):
        ScenesData(captions_per_image=11, positives=True)


def test_moved_things_keep_off_the_edges_and_their_offsets() -> None:
    for seed in range(40):
        scene = make_scene(seed)
        ways = moves(scene)
        assert scene in ways
        assert len(set(ways)) == len(ways)
        for moved in ways:
            steps = {(new.x - old.x, new.y - old.y) for new, old in zip(moved.things, scene.things, strict=True)}
            assert len(steps) == 1
            assert all(RADIUS[t.size] < min(t.x, t.y, 1000 - t.x, 1000 - t.y) for t in moved.things)
    alone = Scene("white", (Thing("circle", "red", "small", "plain", 500, 500),))
    assert len(moves(alone)) == 49, "the grid has 7 x 7 points"


def test_changing_a_row_does_not_change_the_data() -> None:
    rows = ScenesData(num_train=2).split("train")
    rows[0]["references"].clear()
    assert len(rows[0]["references"]) == 5


def test_splits_share_no_scene_whatever_the_seed() -> None:
    seen: dict[str, tuple[str, int]] = {}
    for seed in (0, 1):
        data = ScenesData(num_train=400, num_val=100, num_test=100, num_unseen=100, seed=seed)
        for split in data.splits:
            for row in data.split(split):
                key = content_key(row["scene"])
                assert seen.setdefault(key, (split, seed))[0] == split


def test_unseen_pairs_are_unseen() -> None:
    for split in ("train", "val", "test"):
        assert not _pairs(split) & set(UNSEEN_PAIRS)
    for row in DATA.split("test_unseen"):
        assert any((thing.colour, thing.shape) in UNSEEN_PAIRS for thing in row["scene"].things)
    assert _pairs("test_unseen") >= set(UNSEEN_PAIRS)
    assert {colour for colour, _ in _pairs("train")} == set(COLOURS)
    assert {shape for _, shape in _pairs("train")} == set(SHAPES)


def test_data_and_images_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(DATA))
    assert copy.split("val")[7] == DATA.split("val")[7]
    image = DATA.split("val")[7]["image"]
    assert isinstance(image, SceneImage)
    assert pickle.loads(pickle.dumps(image)) == image
    assert len(pickle.dumps(image)) < 2000


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"num_train": -1}, "num_train=-1"),
        ({"num_unseen": -5}, "num_unseen=-5"),
        ({"image_size": 4}, "image_size=4"),
        ({"captions_per_image": 0}, "captions_per_image=0"),
    ],
)
def test_bad_parameters_are_named(parameters: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ScenesData(**parameters)


def test_unknown_split_is_named() -> None:
    with pytest.raises(DataError, match="test2"):
        DATA.split("test2")


def test_images_are_kept_within_bounds() -> None:
    cache = _Cache(max_bytes=3 * 64 * 64 * 3)
    images = [SceneImage(make_scene(seed)) for seed in range(5)]
    first = cache.pixels(images[0])
    assert cache.pixels(images[0]) is first
    for image in images:
        cache.pixels(image)
    assert cache.bytes == 3 * 64 * 64 * 3
    assert cache.pixels(images[0]) is not first
    assert (cache.pixels(images[0]) == first).all()


def test_drawing_on_an_image_does_not_change_the_next() -> None:
    image = SceneImage(make_scene(0))
    drawn = image.render()
    before = drawn.tobytes()
    drawn.putpixel((0, 0), (1, 2, 3))
    assert image.render().tobytes() == before


def test_export_is_read_as_karpathy(tmp_path: Path) -> None:
    data = ScenesData(num_train=6, num_val=2, num_test=2, num_unseen=3)
    path = export(tmp_path / "scenes", data)
    first = path.read_bytes()
    assert export(tmp_path / "scenes", data).read_bytes() == first
    written = KarpathyData(path)
    assert set(written.splits) == set(data.splits)
    for split in data.splits:
        rows = written.split(split)
        assert [row["references"] for row in rows] == [row["references"] for row in data.split(split)]
        for row, made in zip(rows, data.split(split), strict=True):
            assert load_image(row["image"]).tobytes() == load_image(made["image"]).tobytes()
    entries = json.loads(first)["images"]
    assert [entry["split"] for entry in entries] == ["train"] * 6 + ["val"] * 2 + ["test"] * 2 + ["test_unseen"] * 3
    assert Scene.from_dict(entries[0]["scene"]) == data.split("train")[0]["scene"]
    assert len({sentence["sentid"] for entry in entries for sentence in entry["sentences"]}) == 13 * 5


def test_command_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num_train", "3", "--num_val", "1", "--num_test", "1", "--num_unseen", "0"]
    assert main(["--out", str(tmp_path / "out"), *sizes]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "out" / "dataset.json") in printed
    assert "3 train, 1 val, 1 test, 0 test_unseen" in printed
    assert len(list((tmp_path / "out" / "images").glob("*.png"))) == 5


def test_command_names_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["--out", str(tmp_path / "file"), "--num_train", "1"]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
