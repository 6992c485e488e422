"""A data format from outside: a class in a file of one's own, and its name in the configuration
(docs/data.md).
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from PIL import Image

from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, Row
from rl_caption.runtime.errors import ConfigError, section_errors
from rl_caption.runtime.options import Range
from tests.training_for_tests import checked_run, lines, xe_config

NAME = "tests.core.extensions.test_data_format:CsvCaptions"


class CsvCaptions:
    """Captions in a CSV file with the columns ``image`` and ``caption``, one caption a line.

    Args:
        path: the file.
        image_root: the folder of the images; None is that of the file.
        val_every: each so many-th image is in ``val``, the others are in ``train``.
    """

    def __init__(
        self,
        path: str,
        image_root: str | None = None,
        val_every: Annotated[int, Range(min=2, max=1000)] = 5,
    ) -> None:
        captions: dict[str, list[str]] = {}
        with open(path, encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if not line.get("image"):
                    raise DataError(
                        f"{path}: {line} has no image: expected the columns image and caption"
                    )
                captions.setdefault(line["image"], []).append(line["caption"])
        root, found = Path(image_root or Path(path).parent), list(captions.items())
        rows: list[Row] = [
            {"image_id": name, "image": root / name, "references": texts} for name, texts in found
        ]
        self.rows = {
            "train": [row for number, row in enumerate(rows, start=1) if number % val_every],
            "val": rows[val_every - 1 :: val_every],
        }

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.rows)

    def split(self, name: str) -> Sequence[Row]:
        return self.rows[name]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Eight images of one colour, each with two captions."""
    (tmp_path / "images").mkdir()
    text = ["image,caption"]
    for number, colour in enumerate(
        ("red", "green", "blue", "white", "black", "yellow", "purple", "orange")
    ):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"images/{number}.png")
        text += [f"{number}.png,a {colour} image", f'{number}.png,"{colour}, all over"']
    (tmp_path / "captions.csv").write_text("\n".join(text))
    options = {"path": str(tmp_path / "captions.csv"), "image_root": str(tmp_path / "images")}
    return {"target": NAME, **options, "kwargs": {"val_every": 4}}


def test_a_run_trains_with_it(data: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sizes = {"train.max_steps": 1, "train.batch_size": 6, "train.micro_batch_size": 3}
    ended = checked_run(xe_config(folder, data=data, **sizes), folder)
    assert "data: no problems in 8 rows (train 6, val 2)" in ended.output
    assert [line["step"] for line in lines(folder) if "loss/total" in line] == [1]


def test_long_captions_are_those_of_any_format(data: dict[str, Any]) -> None:
    rows = build_data(DataConfig(**data, long_captions=True)).split("val")
    with pytest.raises(DataError, match=r"val '3\.png'.*long_reference"):
        rows[0]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"target": "karpathy"}, "data.target is 'karpathy': expected package.module:Name"),
        (
            {"target": "tests.core.extensions.test_data_format:NAME"},
            "has no class or function 'NAME'",
        ),
        ({"kwargs": {"val_evry": 3}}, "data.kwargs.val_evry is"),
        ({"kwargs": {"val_every": 2000}}, "data.kwargs.val_every is 2000: expected at most 1000"),
        ({"flatten": True}, "data.flatten is"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    data: dict[str, Any], changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError) as refused, section_errors("data"):
        DataConfig(**data | changes)
    assert part in str(refused.value)


def test_what_only_its_making_can_find_is_refused_too(data: dict[str, Any]) -> None:
    config = DataConfig(**data)
    with pytest.raises(ConfigError, match=f"data.path is not set: data.target {NAME} needs it"):
        build_data(replace(config, path=None))
    Path(data["path"]).write_text("picture,caption\na.png,a dog")
    with pytest.raises(DataError, match=r"captions\.csv.*a\.png"):
        build_data(config)
