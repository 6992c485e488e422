"""The captioning program: which files it takes, what it prints and writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

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
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no image in"):
        find_images([str(tmp_path / "empty")])


@pytest.mark.parametrize("beams", ["1", "3"])
def test_captions_are_printed_and_written(model: str, photos: Path, tmp_path: Path, capsys: Any, beams: str) -> None:
    out = tmp_path / "captions.json"
    assert main(["--model", model, "--beams", beams, "--out", str(out), str(photos)]) == 0
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [Path(path).name for path, _ in printed] == ["a.JPG", "b.png", "c.webp"]
    assert [[record["image_id"], record["caption"]] for record in json.loads(out.read_text())] == printed


def test_the_caption_is_that_of_the_captioner(model: str, tmp_path: Path, capsys: Any) -> None:
    """Decoded by hand, token by token."""
    import torch

    captioner, rows = tiny_captioner(), tiny_rows(1)
    rows[0]["image"].save(tmp_path / "photo.png")
    inputs, tokens = captioner.preprocess(rows), [captioner.bos_token_id]
    with torch.no_grad():
        while len(tokens) <= 16 and tokens[-1] != captioner.eos_token_id:
            logits = captioner.policy(**inputs, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
            logits[list(captioner.forbidden)] = -torch.inf
            tokens.append(int(logits.argmax()))
    # 24 tokens are asked for by default; the model has positions for 16.
    assert main(["--model", model, str(tmp_path / "photo.png")]) == 0
    caption = capsys.readouterr().out.strip().split("\t")[1]
    assert [caption] == captioner.decode(torch.tensor([tokens[1:]]))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "nowhere", "PHOTOS"], "'nowhere' is not a saved captioner"),
        (["--model", "MODEL", "PHOTOS/lost.png"], "does not exist"),
        (["--model", "MODEL", "PHOTOS/broken.png"], "broken.png"),
    ],
)
def test_errors_are_one_message(model: str, photos: Path, arguments: list[str], part: str, capsys: Any) -> None:
    (photos / "broken.png").write_bytes(b"no image")
    words = [word.replace("PHOTOS", str(photos)).replace("MODEL", model) for word in arguments]
    with pytest.raises(SystemExit) as ended:
        command(["caption", *words])
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert part in message
    assert "Traceback" not in message


@pytest.mark.parametrize("option", ["--beams", "--max_new_tokens"])
@pytest.mark.parametrize("value", ["0", "100000", "1.5"])
def test_numbers_out_of_range_are_refused(option: str, value: str, model: str, photos: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", model, option, value, str(photos)])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert option in message
    assert value in message
