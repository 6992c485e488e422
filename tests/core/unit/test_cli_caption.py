"""The captioning program: which files it takes, what it prints and writes, and what it refuses."""

from pathlib import Path

import pytest
import torch

from rewards.files import load_json
from rl_caption.captioners.config import Decoding
from rl_caption.cli.configuration import parse
from rl_caption.config.commands import CaptionConfig
from rl_caption.data.base import DataError
from rl_caption.programs.caption import caption
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


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_captions_of_the_captioner_are_printed_and_written(
    model, photos, tmp_path, capsys, beams
):
    out = tmp_path / "captions.json"
    words = [f"--model={model}", f"--num_beams={beams}", f"--out={out}"]
    (photos / "more/._c.webp").write_bytes(b"what macOS leaves beside every file")
    main([*words, str(photos), str(photos / "b.png")])
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


def test_files_that_cannot_be_captioned_are_named_or_skipped(model, photos, tmp_path):
    out = tmp_path / "captions.json"
    for name in ("broken.png", "cut.jpg"):
        (photos / name).write_bytes(b"no image")
    words = ["--model", model, "--out", str(out), str(photos)]
    with pytest.raises(DataError, match=r"2 of 5 .*broken\.png.*cut\.jpg"):
        main(words)
    assert not out.exists()
    main([*words, "--on_bad", "skip"])
    names = [Path(row["image_id"]).name for row in load_json(out)]
    assert names == ["a.JPG", "b.png", "c.webp"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        main([*words[:-1], str(tmp_path / "empty")])


def test_a_place_that_cannot_be_written_to_is_found_before_captioning(photos, tmp_path):
    out = photos / "b.png" / "captions.json"
    with pytest.raises(OSError, match=r"b\.png"):
        main(["--model", "no/model", "--out", str(out), str(photos)])
