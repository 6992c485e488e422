"""Checks before training: every kind of problem, its count, its first offenders, and
what is left without it.
"""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_caption.config.schema import DataConfig
from rl_caption.data import checks
from rl_caption.data.base import DataError, Splits
from rl_caption.data.checks import ImageFile, check_data, verify
from rl_caption.data.formats import build_data


def dataset(**rows):
    """A dataset in memory."""
    return Splits(rows, "memory")


def photo(path, seed):
    """Write a JPEG of noise that is unlike that of any other seed."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def row(image_id, image):
    return {"image_id": image_id, "image": image, "references": ["a dog"]}


def good_rows(folder, first, count):
    numbers = range(first, first + count)
    return [
        row(str(number), photo(folder / f"{number}.jpg", number)) for number in numbers
    ]


def ids(data, split):
    return [item["image_id"] for item in data[split]]


def found(report):
    return {kind: len(offenders) for kind, offenders in report.problems.items()}


def both(data):
    """Check that ``fail`` raises the report that ``skip`` returns, and return it."""
    report = check_data(data, [*data], on_bad="skip")
    with pytest.raises(DataError) as caught:
        check_data(data, [*data], on_bad="fail")
    assert str(report) == str(caught.value)
    return report


def test_missing_corrupt_and_truncated_files(tmp_path):
    data = dataset(train=good_rows(tmp_path, 0, 10), extra=good_rows(tmp_path, 10, 2))
    for number in (1, 2, 3, 4):
        (tmp_path / f"{number}.jpg").unlink()
    (tmp_path / "5.jpg").write_bytes(b"this is not an image")
    whole = (tmp_path / "6.jpg").read_bytes()
    (tmp_path / "6.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "7.jpg").write_bytes(b"")
    report = both(data)
    assert found(report) == {"missing images": 4, "unreadable images": 3}
    assert "6.jpg'" in report.problems["unreadable images"][1]
    assert "3.jpg': No such file or directory, and 1 more" in str(report)
    good = check_data(data, ["train"], on_bad="skip").good_rows_of(data)
    kept = pickle.loads(pickle.dumps(good))
    assert ids(kept, "train") == ["0", "8", "9"]
    assert ids(kept, "extra") == ["10", "11"]
    existing = check_data(data, ["train"], "skip", check_pixels=False)
    assert found(existing) == {"missing images": 4}, "only existence"
    lost = dataset(val=[row("9", tmp_path / "nothing.jpg")])
    with pytest.raises(DataError):
        check_data(lost, ["val"], on_bad="skip")


def test_empty_captions_and_images_without_references(tmp_path):
    rows = good_rows(tmp_path, 0, 4)
    rows[1]["references"] = ["a dog", "", "a cat", " , .\n"]
    rows[1]["negatives"] = [["no dog"], ["?"], ["no cat"], ["!"]]
    rows[1]["positive_images"] = ["0.png", "1.png"]
    rows[2]["references"] = []
    rows[3]["references"] = [" ...", "--"]
    data = dataset(train=rows)
    report = both(data)
    assert found(report) == {"empty captions": 4, "images without references": 2}
    assert report.problems["empty captions"][1] == "train image '1', caption 4"
    first, second = report.good_rows_of(data)["train"]
    assert (first["image_id"], first["references"]) == ("0", ["a dog"])
    assert (second["image_id"], second["references"]) == ("1", ["a dog", "a cat"])
    assert second["negatives"] == [["no dog"], ["no cat"]]
    assert second["positive_images"] == ["0.png"]
    assert len(rows[1]["references"]) == 4, "the dataset itself must not change"


def test_of_duplicate_ids_the_first_good_row_stays(tmp_path):
    rows = good_rows(tmp_path, 0, 2)
    rows += [row("1", photo(tmp_path / f"{name}.jpg", name)) for name in (8, 9)]
    (tmp_path / "1.jpg").unlink()
    data = dataset(train=rows)
    report = both(data)
    assert found(report) == {"missing images": 1, "duplicate image ids in a split": 2}
    kept = report.good_rows_of(data)["train"]
    assert [Path(str(item["image"])).name for item in kept] == ["0.jpg", "8.jpg"]


def test_the_same_file_in_two_splits_stays_in_the_evaluation_split(tmp_path):
    train, val = good_rows(tmp_path, 0, 4), good_rows(tmp_path, 4, 2)
    test = good_rows(tmp_path, 6, 2)
    (tmp_path / "sub").mkdir()
    val.append(row("val copy", tmp_path / "sub" / ".." / "1.jpg"))
    test.append(row("test copy", tmp_path / "1.jpg"))
    test.append(row("from val", tmp_path / "4.jpg"))
    # A bad row takes nothing from train.
    test.append(row("0", tmp_path / "0.jpg") | {"references": []})
    data = dataset(train=train, val=val, test=test)
    report = both(data)
    assert found(report) == {
        "images without references": 1,
        "image ids in two splits": 1,
        "image files in two splits": 3,
    }, "files, and not once more as equal images"
    clean = report.good_rows_of(data)
    assert ids(clean, "train") == ["0", "2", "3"]
    assert ids(clean, "val") == ["5"]
    assert ids(clean, "test") == ["6", "7", "test copy", "from val"]
    assert not check_data(clean, [*clean]).problems


def test_equal_images_under_other_names_formats_and_in_memory_leak(tmp_path):
    train, test = good_rows(tmp_path, 0, 3), good_rows(tmp_path, 3, 1)
    with Image.open(tmp_path / "2.jpg") as image:
        image.save(tmp_path / "copy.png")
    test.append(row("copy", tmp_path / "copy.png"))
    train.append(row("red", Image.new("RGB", (4, 4), "red")))
    test.append(row("also red", Image.new("RGB", (4, 4), "red")))
    data = dataset(test=test, train=train)
    report = both(data)
    assert found(report) == {"equal images in two splits": 2}
    clean = report.good_rows_of(data)
    assert ids(clean, "train") == ["0", "1"]
    assert ids(clean, "test") == ["3", "copy", "also red"]


def test_images_of_training_in_a_split_that_is_not_used_are_named(tmp_path):
    train, val = good_rows(tmp_path, 0, 5), good_rows(tmp_path, 5, 2)
    test = good_rows(tmp_path, 7, 3)
    (tmp_path / "copy.jpg").write_bytes((tmp_path / "2.jpg").read_bytes())
    (tmp_path / "linked.jpg").symlink_to(tmp_path / "5.jpg")
    for image_id in ("1", "copy", "linked", "lost"):  # test itself is not checked
        test.append(row(f"{image_id} again", tmp_path / f"{image_id}.jpg"))
    test.append(row("3", photo(tmp_path / "other.jpg", 50)))
    data = dataset(train=train, val=val, test=test)
    report = check_data(data, ["train", "val"], on_bad="skip")
    expected = {checks.LEAKED_IDS: 1, checks.LEAKED_FILES: 1, checks.LEAKED_CONTENT: 2}
    assert found(report) == expected
    assert "'3' in train and test" in str(report)
    assert [*report.kept["train"]] == [0, 4]
    assert [*report.kept["val"]] == [1]


def test_rows_of_other_splits_that_this_training_could_not_use_are_passed_over(
    tmp_path,
):
    lines = []
    for number, split in enumerate(("train", "test")):
        image = str(photo(tmp_path / f"{number}.jpg", number))
        lines.append({"image": image, "references": ["a dog"], "split": split})
    lines[0]["long_reference"] = "a long dog"
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    config = DataConfig(format="jsonl", path=str(path), long_captions=True)
    check_data(build_data(config), ["train"])


def test_features_are_checked_and_images_need_not_be_there(tmp_path):
    np.savez(tmp_path / "0.npz", features=np.ones((3, 4), np.float32))
    np.save(tmp_path / "1.npy", np.ones(3, np.float32))
    rows = [row(str(number), tmp_path / f"{number}.jpg") for number in range(3)]
    for item, name in zip(rows, ("0.npz", "1.npy", "2.npz"), strict=True):
        item["features"] = str(tmp_path / name)
    data = dataset(train=rows)
    report = check_data(data, ["train"], on_bad="skip", check_images=False)
    assert found(report) == {"missing or unusable features": 2}
    wrong, missing = report.problems[checks.BAD_FEATURES]
    assert "1.npy): the shape is [3]" in wrong
    assert "No such file" in missing
    assert ids(report.good_rows_of(data), "train") == ["0"]
    with pytest.raises(DataError, match="3 missing images"):
        check_data(data, ["train"])


def test_cache_skips_what_is_known_and_sees_what_changed(tmp_path, monkeypatch):
    names = [tmp_path / f"{number}.jpg" for number in range(3)]
    files = [ImageFile(str(photo(path, seed))) for seed, path in enumerate(names)]
    cache = tmp_path / "run" / "images.json"
    first = verify(files, cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "check", None)
        assert verify(files, cache=cache) == first
    names[0].unlink()
    names[1].write_bytes(b"damaged")
    photo(names[2], 9)
    missing, damaged, other = verify(files, cache=cache).values()
    assert missing.missing
    assert damaged.error
    assert other.error is None
    assert other != first[files[2]]


def test_references_that_cost_scores_by_their_form_are_warned_of_and_used(tmp_path):
    rows = good_rows(tmp_path, 0, 2)
    rows[0]["references"] = ["a dog <eos>", "un cafe\u0301"]
    rows[1]["references"] = ["un café"]
    report = check_data(dataset(train=rows), ["train"])
    special, form = report.warnings
    assert "reference of train image '0': 'a dog <eos>'" in special
    assert "'un cafe\u0301'" in form
    assert special in str(report)
    assert not report.problems
