"""The captioning program: which files it takes, what it prints and writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_caption.captioners.base import Decoding
from rl_caption.cli.caption import find_images, main
from rl_caption.cli.main import main as command
from rl_caption.data.base import DataError
from tests.captioners_for_tests import tiny_captioner, tiny_rows


@pytest.fixture
def model(tmp_path: Path) -> str:
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for row, name in zip(tiny_rows(3), ("b.png", "a.JPG", "more/c.webp"), strict=True):
        row["image"].save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def test_folders_are_searched_and_files_taken_once(photos: Path, tmp_path: Path) -> None:
    found = find_images([str(photos), str(photos / "b.png")])
    assert [str(path.relative_to(photos)) for path in found] == ["a.JPG", "b.png", "more/c.webp"]
    (photos / "more/._c.webp").write_bytes(b"what macOS leaves beside every file")
    assert find_images([str(photos)]) == found
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no image in"):
        find_images([str(tmp_path / "empty")])


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_captions_of_the_captioner_are_printed_and_written(
    model: str, photos: Path, tmp_path: Path, capsys: Any, beams: int
) -> None:
    out = tmp_path / "captions.json"
    assert main(["--model", model, "--beams", str(beams), "--out", str(out), str(photos)]) == 0
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [Path(path).name for path, _ in printed] == ["a.JPG", "b.png", "c.webp"]
    assert [[record["image_id"], record["caption"]] for record in json.loads(out.read_text())] == printed
    # 24 tokens are asked for by default; the model has positions for 16.
    captioner, decoding = tiny_captioner(), Decoding(max_new_tokens=16, num_beams=beams)
    inputs = captioner.preprocess([{"image_id": path, "image": Path(path), "references": []} for path, _ in printed])
    ids = captioner.generate(captioner.policy, inputs, decoding)
    assert captioner.decode(ids.flatten(0, 1)) == [caption for _, caption in printed]


def test_errors_are_one_message(model: str, photos: Path, capsys: Any) -> None:
    (photos / "broken.png").write_bytes(b"no image")
    for name, part in (("lost.png", "does not exist"), ("broken.png", "broken.png")):
        with pytest.raises(SystemExit, match="1"):
            command(["caption", "--model", model, str(photos / name)])
        message = capsys.readouterr().err
        assert part in message
        assert "Traceback" not in message
    for option, value in (("--beams", "0"), ("--max_new_tokens", "1.5")):
        with pytest.raises(SystemExit, match="2"):
            main(["--model", model, option, value, str(photos)])
        message = capsys.readouterr().err
        assert option in message
        assert value in message
