"""A data format from outside: a function in a file of one's own, or rows in memory, and
its name in the configuration (docs/data.md).
"""

import csv
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from PIL import Image
from pydantic import Field

from rewards.files import load_json
from rl_caption.cli.configuration import parse
from rl_caption.cli.main import run_program
from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig, XeConfig
from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data
from rl_caption.data.files import write_json
from rl_caption.runtime.errors import ConfigError
from tests.training_for_tests import xe_config

NAME = "tests.core.extensions.test_data_format:csv_captions"
ROWS = None
"""Rows in memory, which a configuration names."""


def csv_captions(
    path: str,
    image_root: str | None = None,
    val_every: Annotated[int, Field(ge=2, le=1000)] = 5,
) -> Iterator[dict[str, Any]]:
    """Captions in a CSV file with the columns ``image`` and ``caption``, one caption a line.

    Args:
        path: the file.
        image_root: the folder of the images; None is that of the file.
        val_every: each so many-th image is in ``val``, the others are in ``train``.
    """
    captions = {}
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            captions.setdefault(line.get("image", ""), []).append(line["caption"])
    root = Path(image_root or Path(path).parent)
    for number, (name, texts) in enumerate(captions.items(), start=1):
        split = "train" if number % val_every else "val"
        row = {"image_id": name, "references": texts, "split": split}
        yield row | ({"image": root / name} if name else {"image": None})


def memory(folder: Path, name: str) -> Any:
    """Eight rows with their photos: in lists by split, or in one list."""
    rows = list(csv_captions(str(folder / "captions.csv"), str(folder / "images"), 4))
    for row in rows:
        row["image"] = (
            Image.open(row["image"]) if name == "lists" else str(row["image"])
        )
    if name == "list":
        return rows
    splits = {"train": [], "val": []}
    for row in rows:
        splits[row.pop("split")].append(row)
    return splits


def run_in_process(program: str, config: dict[str, Any], folder: Path) -> None:
    write_json(folder / "config.yaml", config)
    run_program(program, ["--config", str(folder / "config.yaml")])


@pytest.fixture
def data(tmp_path) -> dict[str, Any]:
    """Eight images of one colour, each with two captions."""
    (tmp_path / "images").mkdir()
    text = ["image,caption"]
    for number, colour in enumerate(
        ("red", "green", "blue", "white", "black", "yellow", "purple", "orange")
    ):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"images/{number}.png")
        text += [f"{number}.png,a {colour} image", f'{number}.png,"{colour}, all over"']
    (tmp_path / "captions.csv").write_text("\n".join(text))
    options = {
        "path": str(tmp_path / "captions.csv"),
        "image_root": str(tmp_path / "images"),
    }
    return {"target": NAME, **options, "kwargs": {"val_every": 4}}


@pytest.mark.parametrize("kind", ["lists", "list"])
def test_rows_in_memory_are_the_data_of_any_program(data, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sys.modules[__name__], "ROWS", memory(tmp_path, kind))
    made = {"target": f"{__name__}:ROWS", "path": "of no use"}
    rows = build_data(DataConfig(**made))
    assert {split: len(found) for split, found in rows.items()} == {
        "train": 6,
        "val": 2,
    }
    assert rows["val"][0]["references"] == ["a white image", "white, all over"]
    pickle.loads(pickle.dumps(rows))
    check_data(rows, ["train", "val"])
    sizes = {"train.max_steps": 1, "train.batch_size": 6, "train.micro_batch_size": 3}
    run_in_process("xe", xe_config(tmp_path / "run", data=made, **sizes), tmp_path)
    exported = str(tmp_path / "run/export/best")
    evaluation = {"data": made, "model": exported, "split": "val", "metrics": ["rouge"]}
    evaluation |= {"out": str(tmp_path / "scores"), "tokenizer": "python"}
    run_in_process("evaluate", evaluation, tmp_path)
    assert len(load_json(tmp_path / "scores/predictions.json")) == 2


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"target": "karpathy"},
            "data.target is 'karpathy': expected package.module:Name",
        ),
        ({"kwargs": {"val_evry": 3}}, "got an unexpected keyword argument 'val_evry'"),
        (
            {"kwargs": {"val_every": 2000}},
            "data.kwargs.val_every is 2000: expected at most 1000",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(data, changes, part):
    with pytest.raises(ConfigError) as refused:
        parse(XeConfig, [f"--data={json.dumps(data | changes)}"], "xe")
    assert part in str(refused.value)


def test_what_only_its_making_can_find_is_refused_too(data):
    config = DataConfig(**data)
    with pytest.raises(ConfigError, match=r"data: .*'path'"):
        build_data(config.replace(path=None))
    Path(data["path"]).write_text("picture,caption\na.png,a dog")
    with pytest.raises(DataError, match=r"captions\.csv, row 0, 'image' is None"):
        build_data(config)
