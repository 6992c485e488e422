"""Curation: measures by hand, selection, runs that go on where they were stopped, kept
rows that training reads.
"""

import json
import os
from pathlib import Path

import pytest
from pandas import DataFrame
from PIL import Image

from rl_caption.config.schema import DataConfig
from rl_caption.data.checks import check_data
from rl_caption.data.rows import jsonl
from rl_caption.lab.config import CurateConfig, Selection
from rl_caption.lab.curate import MEASURES, curate, select_captions
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from tests.interruptions_for_tests import interrupted


class Length:
    """A score without references: the characters of a caption; counts its captions."""

    __name__ = signature = "length"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1000.0)
    scored = 0

    def __call__(self, prompts, completions, **columns):
        Length.scored += len(completions)
        assert len(columns["image"]) == len(columns["image_id"]) == len(completions)
        return list(map(float, map(len, completions)))


ROWS = [
    ("a.png", ["a dog runs on the beach", "A Dog"], "train"),
    ("b.png", ["the red ball near a small tree is nice"], "train"),
    ("a.png", ["a dog runs on the beach"], "train"),
    ("c.png", ["x"], "test"),
    ("b.png", ["two cats sleep on a green sofa in the evening"], "train"),
]


def write(folder):
    items = [
        {"image": image, "references": captions, "split": split}
        for image, captions, split in ROWS
    ]
    (folder / "photos").mkdir()
    for name in "abc":
        Image.new("RGB", (8, 8)).save(folder / f"photos/{name}.png")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, items)) + "\n\n")
    return folder / "rows.jsonl"


def options(path, out, **changed):
    data = DataConfig(
        format="jsonl",
        path=str(path),
        image_root=str(path.parent / "photos"),
    )
    scores = {"length": JudgeConfig(target=f"{__name__}:Length")}
    return CurateConfig(
        data=data, out=str(out), **{"scores": scores, "part_rows": 2} | changed
    )


def kept(out):
    data = jsonl(out / "kept.jsonl")
    rows = [row for name in data for row in data[name]]
    return [(Path(row["image"]).name, row["references"]) for row in rows]


def test_rules_duplicates_and_scores_in_their_order(tmp_path):
    """Dropped: "A Dog" (2 words), the second of the pair, the shortest of the three
    left, and one of 45 characters.
    """
    path, out = write(tmp_path), tmp_path / "out"
    rules = {"words": [3, None], "characters": [None, 99]}
    best = Selection(score="length", top=2)
    select = [best, Selection(score="length", min=23, max=38)]
    config = options(path, out, rules=rules, duplicates="pair", select=select)
    table = curate(config)
    assert kept(out) == [("b.png", ROWS[1][1]), ("c.png", ["x"])]
    check_data(jsonl(out / "kept.jsonl"), ["train", "test"], check_pixels=False)
    dropped = [line.split("|")[2].strip() for line in table.splitlines()[2:9]]
    assert "".join(dropped) == "0010111"
    other = dict(reversed(rules.items()))  # counts captions for other rules
    with pytest.raises(ConfigError, match="rules was"):
        curate(config.replace(rules=other))


def test_a_stopped_run_goes_on_and_workers_share_the_parts(tmp_path):
    path, out = write(tmp_path), tmp_path / "out"
    whole = curate(options(path, tmp_path / "whole"))
    with interrupted(Length, "__call__", after=1):
        curate(options(path, out))
    Length.scored = 0
    assert "1 parts made, 0 were there" in curate(options(path, out, worker="1/2"))
    assert Length.scored == 2  # of the second pair of rows
    assert curate(options(path, out)).splitlines()[:-1] == whole.splitlines()[:-1]
    assert Length.scored == 2
    os.utime(path.parent / "photos/a.png", (1, 1))
    curate(
        options(
            path,
            out,
            select=[Selection(score="length", bottom=0.5)],
        )
    )
    assert Length.scored == 2
    assert kept(out) == [
        ("a.png", ["a dog runs on the beach", "A Dog"]),
        ("c.png", ["x"]),
    ]
    with pytest.raises(ConfigError, match="rules was"):
        curate(
            options(
                path,
                out,
                rules={"words": [1, 2]},
            )
        )
    path.write_text(path.read_text().replace("beach", "coast"))
    with pytest.raises(ConfigError, match="train texts"):
        curate(options(path, out))


def test_what_goes_with_a_dropped_caption_is_dropped_with_it(tmp_path):
    item = {
        "image": "a.png",
        "references": ["dog", "a red dog"],
        "negatives": [["cat"], ["a blue dog"]],
        "positive_images": ["0.png", "1.png"],
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(item))
    data = DataConfig(format="jsonl", path=str(tmp_path / "in.jsonl"))
    curate(
        CurateConfig(
            data=data,
            rules={"words": [2, None]},
            out=str(tmp_path / "out"),
        )
    )
    (row,) = jsonl(tmp_path / "out/kept.jsonl")["train"]
    assert (row["references"], row["negatives"]) == (["a red dog"], [["a blue dog"]])
    assert row["positive_images"] == [str(tmp_path / "1.png")], (
        "not relative to another folder"
    )


def test_wrong_settings_are_named(tmp_path):
    path = write(tmp_path)
    select = [Selection(score="clip", top=1)]
    with pytest.raises(ConfigError, match=r"select.*'clip'"):
        curate(options(path, tmp_path / "out", select=select))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("measure", "caption", "expected"),
    [
        ("characters", "a dog.", 6),
        ("words", "A dog, running.", 3),
        ("actions", "a man is riding a horse", 1),
        ("actions", "a nice morning", 0),
        ("complexity", "a brown dog runs in the grass", 3),
    ],
)
def test_measures_by_hand(measure, caption, expected):
    assert MEASURES[measure](caption) == expected


def test_selection_by_hand():
    def chosen(scores, **step):
        table = DataFrame({"x": scores})
        return list(select_captions(Selection(score="x", **step), table).index)

    scores = [1.0, 3, 3, 2]
    assert chosen(scores, top=1) == [1]
    assert chosen(scores, top=0.5) == [1, 2]
    assert chosen(scores, top=9) == [0, 1, 2, 3]
    assert chosen(scores, bottom=2) == [0, 3]
    assert len(chosen([1.0] * 100, top=0.29)) == 29
    assert len(chosen([1.0] * 3, top=0.9)) == 2, "rounded down"
