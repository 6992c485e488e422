"""The captioning program: which files it takes, what it prints and writes, and what it refuses."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from rewards.files import load_json
from rl_caption.captioners.config import Decoding
from rl_caption.cli.caption import caption, find_images
from rl_caption.cli.configuration import parse
from rl_caption.config.commands import CaptionConfig
from rl_caption.data.base import DataError
from tests.captioners_for_tests import tiny_captioner, tiny_rows


def main(words):
    return caption(parse(CaptionConfig, words, "caption"))


@pytest.fixture
def model(tmp_path):
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for row, name in zip(tiny_rows(3), ("b.png", "a.JPG", "more/c.webp"), strict=True):
        row["image"].save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def test_folders_are_searched_and_files_taken_once(photos, tmp_path):
    found = find_images([str(photos), str(photos / "b.png")])
    assert [str(path.relative_to(photos)) for path in found] == [
        "a.JPG",
        "b.png",
        "more/c.webp",
    ]
    (photos / "more/._c.webp").write_bytes(b"what macOS leaves beside every file")
    assert find_images([str(photos)]) == found
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty'\].*\.png"):
        find_images([str(tmp_path / "empty")])


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_captions_of_the_captioner_are_printed_and_written(
    model, photos, tmp_path, capsys, beams
):
    out = tmp_path / "captions.json"
    words = [f"--model={model}", f"--num_beams={beams}", f"--out={out}"]
    assert main([*words, str(photos)]) == 0
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [Path(path).name for path, _ in printed] == ["a.JPG", "b.png", "c.webp"]
    assert [
        [record["image_id"], record["caption"]] for record in load_json(out)
    ] == printed
    # 24 tokens are asked for by default; the model has positions for 16.
    captioner, decoding = tiny_captioner(), Decoding(max_new_tokens=16, num_beams=beams)
    inputs = captioner.preprocess(
        [
            {"image_id": path, "image": Path(path), "references": []}
            for path, _ in printed
        ]
    )
    ids = captioner.generate(captioner.policy, inputs, decoding)
    assert captioner.decode(ids.flatten(0, 1)) == [caption for _, caption in printed]


def test_all_files_that_cannot_be_captioned_are_named_at_once_or_skipped(
    model, photos, tmp_path, capsys
):
    out = tmp_path / "captions.json"
    names = [b"broken.png", b"cut.jpg", b"caf\xe9.png"]
    for name in names[:2]:
        (photos / os.fsdecode(name)).write_bytes(b"no image")
    shutil.copy(photos / "b.png", os.path.join(os.fsencode(photos), names[2]))
    arguments = ["--model", model, "--out", str(out), str(photos)]
    with pytest.raises(DataError, match="3 of 6 images") as raised:
        main(arguments)
    assert all(repr(os.fsdecode(name))[1:-1] in str(raised.value) for name in names)
    assert not out.exists()
    assert main([*arguments, "--on_bad", "skip"]) == 0
    assert {Path(row["image_id"]).name for row in load_json(out)} == {
        "a.JPG",
        "b.png",
        "c.webp",
    }
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert all(repr(os.fsdecode(name))[1:-1] in printed.err for name in names)
    with pytest.raises(DataError, match="1 of 1"):
        main([*arguments[:-1], str(photos / "broken.png"), "--on_bad", "skip"])


def test_a_place_that_cannot_be_written_to_is_found_before_captioning(photos, tmp_path):
    out = photos / "b.png" / "captions.json"
    with pytest.raises(OSError, match=r"b\.png"):
        main(["--model", "no/model", "--out", str(out), str(photos)])
