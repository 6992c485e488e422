"""Images without captions and captions without images: splits, ids, what is held out, errors."""

import pytest

from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data
from rl_caption.data.formats import rows_of
from rl_caption.data.published import captions as caption_rows
from rl_caption.data.published import images as image_rows
from tests.clip_for_tests import noise_image


def images(folder, *names):
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        noise_image(seed, (8, 8)).save(folder / name)
    return folder


def written(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def captions(data, split):
    return [caption for row in data[split] for caption in row["references"]]


def ids(data, split):
    return [row["image_id"] for row in data[split]]


def test_folders_are_splits_and_paths_are_ids(tmp_path):
    names = ("train/n2/b.JPEG", "train/n1/a.png", "Validation/c.png")
    root = images(tmp_path / "data", *names)
    written(root / "train/n1/list.txt", "no image")
    elsewhere = images(tmp_path / "more", "d.png")
    (root / "train/n3").symlink_to(elsewhere)
    data = build_data(DataConfig(format="images", path=str(root)))
    assert [*data] == ["train", "val"]
    assert ids(data, "train") == ["train/n1/a.png", "train/n2/b.JPEG", "train/n3/d.png"]
    (row,) = data["val"]
    assert row["image_id"] == "Validation/c.png"
    assert row["image"] == str(root / "Validation/c.png")
    assert row["references"] == []
    check_data(data, [*data], needs=["image"])
    with pytest.raises(DataError, match=r"3.*image 'train/n1/a\.png'"):
        check_data(data, ["train"])


def test_without_a_folder_val_the_same_images_are_held_out_whatever_else_is_there(
    tmp_path,
):
    def read():
        return rows_of(image_rows(root, val_fraction=0.25), checked=True)

    root = images(tmp_path / "data", *[f"n{i % 3}/{i}.png" for i in range(40)])
    before = read()
    held_out, kept = set(ids(before, "val")), set(ids(before, "train"))
    assert 3 <= len(held_out) <= 20
    assert len(held_out | kept) == 40
    images(root, *[f"n9/{i}.png" for i in range(20)])
    after = read()
    assert held_out < set(ids(after, "val"))
    assert kept < set(ids(after, "train"))


def test_a_line_is_a_caption_and_equal_ones_are_held_out_together(tmp_path):
    numbers = [*map(str, range(60))]
    lines = ["\ufeffa dog ", "", "ein Höhlenbär", *numbers, *numbers]
    path = written(tmp_path / "captions.txt", *lines)
    data = rows_of(caption_rows(path, val_fraction=0.2), checked=True)
    train, val = captions(data, "train"), captions(data, "val")
    assert len(train + val) == 122
    assert not set(train) & set(val)
    texts = dict(zip(ids(data, "train"), train, strict=True))
    texts |= dict(zip(ids(data, "val"), val, strict=True))
    assert texts["captions.txt:1"] == "a dog"
    assert texts["captions.txt:3"] == "ein Höhlenbär"
    check_data(data, [*data], needs=["text"])
    with pytest.raises(DataError, match=r"image 'captions\.txt:\d+'"):
        check_data(data, [*data])


def test_files_are_splits_and_a_column_is_the_caption(tmp_path):
    written(tmp_path / "train.tsv", "a dog\thttp://a", "two cats\thttp://b")
    written(tmp_path / "validation.tsv", "red\thttp://c")
    written(tmp_path / "notes.md", "else")
    config = DataConfig(format="captions", path=str(tmp_path), kwargs={"column": 0})
    data = build_data(config)
    assert captions(data, "train") == ["a dog", "two cats"]
    assert captions(data, "val") == ["red"]
    second = rows_of(caption_rows(tmp_path, column=1), checked=True)
    assert captions(second, "val") == ["http://c"]


def test_a_wrong_file_of_captions_is_named(tmp_path):
    for content, message in (
        (b"a dog\thttp://a\n", r"line 1 has 2 columns, .*kwargs\.column is None"),
        (b"a dog\nc\xe9ll\n", r"utf-8"),
    ):
        (tmp_path / "c.tsv").write_bytes(content)
        with pytest.raises(DataError, match=r"c\.tsv.*" + message):
            rows_of(caption_rows(tmp_path / "c.tsv"), checked=True)
