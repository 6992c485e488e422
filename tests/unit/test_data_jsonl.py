"""JSON lines: rows, defaults, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data
from rl_caption.data.jsonl import JsonLinesData


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "photos.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_defaults_and_options(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"image": "in/a.jpg", "references": ["a dog", "a brown dog"]},
        "",
        {"image": "b.jpg", "references": [], "split": "test", "image_id": 7, "prompt": "a photo of", "source": "mine"},
        {
            "image": str(tmp_path / "else" / "c.jpg"),
            "references": ["a cat"],
            "long_reference": "A cat. It sleeps.",
            "positive_captions": ["a tabby"],
            "positive_images": ["made/c.png"],
        },
    )
    data = JsonLinesData(path)
    assert data.splits == ("train", "test")
    first, third = data.split("train")
    assert first == {
        "image_id": "in/a.jpg",
        "image": str(tmp_path / "in/a.jpg"),
        "references": ["a dog", "a brown dog"],
    }
    assert third["image"] == str(tmp_path / "else" / "c.jpg")
    assert third["long_reference"] == "A cat. It sleeps."
    assert third["positive_captions"] == ["a tabby"]
    assert third["positive_images"] == [str(tmp_path / "made/c.png")]
    (second,) = data.split("test")
    assert (second["image_id"], second["prompt"], second["references"]) == ("7", "a photo of", [])
    relative = JsonLinesData(path, image_root="photos").split("test")[0]
    assert relative["image"] == str(tmp_path / "photos" / "b.jpg")


def test_features_are_found_by_image_id_with_and_without_a_folder(tmp_path: Path) -> None:
    rows = [{"image": "in/a.jpg", "references": ["a"]}, {"image": "b.jpg", "image_id": "b", "references": ["b"]}]
    path = write(tmp_path, *rows)
    (tmp_path / "features" / "in").mkdir(parents=True)
    np.save(tmp_path / "features" / "in" / "a.jpg.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "features" / "b.npy", np.ones((2, 3), np.float32))
    found = JsonLinesData(path, features_root=tmp_path / "features").split("train")
    assert [str(row["features"]) for row in found] == [
        str(tmp_path / "features" / "in/a.jpg.npy"),
        str(tmp_path / "features" / "b.npy"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'image': 1}", "is not JSON"),
        ("[1]", "not a JSON object"),
        ({"references": ["a"]}, "'image' is None"),
        ({"image": "a.jpg", "references": "a dog"}, "'references' is 'a dog', expected a list of strings"),
        ({"image": "a.jpg", "references": [1]}, r"'references' is \[1\]"),
        ({"image": "a.jpg"}, "'references' is None"),
        ({"image": "a.jpg", "references": ["a"], "split": 3}, "'split' is 3"),
        ({"image": "a.jpg", "references": ["a"], "image_id": True}, "'image_id' is True"),
        ({"image": "a.jpg", "references": ["a"], "prompt": ""}, "'prompt' is ''"),
        ({"image": "a.jpg", "references": ["a"], "positive_images": "b.jpg"}, "'positive_images' is 'b.jpg', expected"),
        ({"image": "a.jpg", "references": ["a"], "positive_captions": ["b", ""]}, "'positive_captions' is .'b', ''., "),
        ({"image": "a.jpg", "references": ["a"], "positive_image": ["a"]}, "did you mean 'positive_images'"),
        ({"image": "a.jpg", "references": ["a"], "splits": "test"}, "unknown key 'splits': did you mean 'split'"),
        ({"image": "a.jpg", "reference": ["a"]}, "unknown key 'reference': did you mean 'references'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path, {"image": "ok.jpg", "references": ["fine"]}, line)
    with pytest.raises(DataError, match=message) as caught:
        JsonLinesData(path)
    assert f"{path}, line 2" in str(caught.value)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a file"):
        JsonLinesData(tmp_path)
    with pytest.raises(DataError, match="no images"):
        JsonLinesData(write(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"image": "\xe9.jpg", "references": ["a"]}')
    with pytest.raises(DataError, match=r"latin\.jsonl, line 1 is not JSON.*utf-8"):
        JsonLinesData(tmp_path / "latin.jsonl")


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"image": "a.jpg", "references": ["a dog"]}\r\n')
    assert JsonLinesData(path).split("train")[0]["image_id"] == "a.jpg"


def test_max_images_and_unknown_split(tmp_path: Path) -> None:
    data = JsonLinesData(
        write(tmp_path, *({"image": f"{n}.jpg", "references": ["a"]} for n in range(4))), max_images={"train": 3}
    )
    assert len(data.split("train")) == 3
    with pytest.raises(DataError, match="no split 'val'"):
        data.split("val")


def test_missing_images_name_image_root(tmp_path: Path) -> None:
    path = write(tmp_path, {"image": "a.jpg", "references": ["a dog"]})
    with pytest.raises(DataError, match=r"1 missing images: train .*a\.jpg.*set data\.image_root"):
        check_data(JsonLinesData(path), ["train"])
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "photos" / "a.jpg")
    assert check_data(JsonLinesData(path, image_root="photos"), ["train"]).ok
