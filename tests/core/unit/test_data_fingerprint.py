"""Whether data are those that a program began with: each thing that may change, and a
copy of the folder.
"""

import os
import shutil

import pytest

from rewards.videos import VideoFrame
from rl_caption.data.features import features_of
from rl_caption.data.fingerprint import changes, fingerprint


def rows_in(folder):
    """Two rows of images, features, generated images and a video, whose files are made
    where they are missing.
    """
    (folder / "clip").mkdir(exist_ok=True, parents=True)
    names = ["a.png", "b.png", "a.npy", "b.npy", "p.png", "clip/0.png", "clip/1.png"]
    for name in names:
        if not (folder / name).exists():
            (folder / name).write_bytes(name.encode())
    first = {"image_id": "a", "image": folder / "a.png", "references": ["a dog"]}
    first["positive_images"] = [folder / "p.png"]
    second = {"image_id": "b", "image": str(folder / "b.png"), "prompt": "on"}
    second["references"] = ["a cat", "two cats"]
    for row in (first, second):
        row["features"] = features_of(row, folder)
    frames = [VideoFrame(str(folder / "clip"), index, 2) for index in range(2)]
    clip = {"image_id": "clip", "image": frames, "references": []}
    return [first, second, clip]


def difference(folder, change):
    """Names of what differs after a change of rows or files."""
    before = fingerprint({"train": rows_in(folder)})
    rows = rows_in(folder)
    change(rows)
    data, times = changes(before, fingerprint({"train": rows}))
    return [line.split(":")[0] for line in data], [line.split(":")[0] for line in times]


def write_beside(rows, name):
    """Change a file of the folder of the images."""
    (rows[0]["image"].parent / name).write_bytes(b"other content")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda rows: rows[0].update(image_id="c"), "train ids"),
        (lambda rows: rows[1]["references"].append("x"), "train texts"),
        (lambda rows: rows[1].update(prompt="off"), "train texts"),
        (lambda rows: rows[0].update(negatives=[["x"]]), "train texts"),
        (lambda rows: rows[0].update(target=0.5), "train texts"),
        (lambda rows: write_beside(rows, "a.png"), "train files"),
        (lambda rows: write_beside(rows, "b.npy"), "train files"),
        (lambda rows: write_beside(rows, "p.png"), "train files"),
        (lambda rows: write_beside(rows, "clip/2.png"), "train files"),
        (lambda rows: rows[0]["image"].unlink(), "train files"),
        (list.reverse, "train ids"),
        (list.pop, "train ids"),
    ],
)
def test_each_change_of_the_data_is_named(tmp_path, change, name):
    assert difference(tmp_path / "data", lambda rows: None) == ([], [])
    assert name in difference(tmp_path / "data", change)[0]


def test_new_times_alone_are_told_apart_and_a_folder_may_move(tmp_path):
    folder = tmp_path / "data"
    touched = difference(folder, lambda rows: os.utime(folder / "a.png", (1, 1)))
    assert touched == ([], ["train times"])
    before = fingerprint({"train": rows_in(folder)})
    shutil.copytree(folder, tmp_path / "copy")  # which keeps times
    copied = fingerprint({"train": rows_in(tmp_path / "copy")})
    assert changes(before, copied) == ([], [])
