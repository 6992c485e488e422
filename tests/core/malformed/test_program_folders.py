"""Damaged folders of the programs: runs under ``share``, parts, features, ratings: one error that names the file."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rewards.model_files import read_object
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.encode_features import read_record
from rl_caption.data.features import as_image_features
from rl_caption.data.prepare_features import convert_tsv
from rl_caption.data.unpaired import CaptionTargets
from rl_caption.lab.concreteness import _ratings
from rl_caption.lab.config import RecaptionConfig, RecaptionerConfig
from rl_caption.lab.curate import curate
from rl_caption.lab.recaption import recaption
from rl_caption.runtime.errors import EXPECTED
from tests.core.malformed.test_data_files import DAMAGE, check_outcome, damaged
from tests.core.unit.test_prepare_features import features, line
from tests.lab.unit.test_curation import options, write
from tests.training_for_tests import DATA

pytestmark = pytest.mark.slow

HUGE = 10**400
OTHER = [
    None,
    True,
    3,
    -1.5,
    float("nan"),
    float("inf"),
    HUGE,
    "",
    "text",
    "a\nb",
    [],
    [1],
    [None],
    ["a"],
    {},
    {"a": 1},
]
OTHER += [{"a": {"b": [1]}}, [[[]]], {"": None}, [[1, "x"]], [{}]]


class Describing:
    """A caption of each image."""

    signature = "describing"

    def __call__(self, rows: Any) -> list[str]:
        return [f"a long text of {row['image_id']}" for row in rows]


LINES = [
    "",
    "null",
    "[]",
    "{}",
    "7",
    '{"references": 7, "long_reference": "x"}',
    '{"references": ["x"]}',
    "{",
    "\0",
    "9" * 5000,
]
LINES += [
    '{"references": ["x"], "long_reference": null}',
    "[" * 10_000,
    '{"references": ["x"], "references": ["y"]}',
]


def test_damaged_parts_of_recaption(tmp_path: Path) -> None:
    asked = RecaptionerConfig(f"{__name__}:Describing")
    config = RecaptionConfig(DataConfig(**DATA), recaptioner=asked, out=str(tmp_path), part_rows=20)
    recaption(config)
    part, settings = tmp_path / "parts/000000.jsonl", tmp_path / "parts.json"
    whole, made_by = part.read_bytes(), settings.read_bytes()
    for text in LINES:
        part.write_bytes(b"\n".join([*whole.splitlines()[:-1], text.encode()]))
        with pytest.raises(EXPECTED, match=part.name):
            recaption(config)
    for seed, damage in DAMAGE:
        part.write_bytes(damaged(whole, damage, seed))
        check_outcome(lambda: recaption(config), part.name)
    part.write_bytes(whole)
    for text in (*LINES, "[7]"):
        settings.write_text(text)
        with pytest.raises(
            EXPECTED, match=tmp_path.name if text == "{}" or "references" in text else settings.name
        ):
            recaption(config)
    for seed, damage in DAMAGE:
        settings.write_bytes(damaged(made_by, damage, seed))
        check_outcome(lambda: recaption(config), str(tmp_path))


def test_damaged_parts_of_curate(tmp_path: Path) -> None:
    config = options(write(tmp_path, "jsonl"), tmp_path / "out")
    curate(config)
    part = tmp_path / "out/parts/000001.npz"
    whole = part.read_bytes()
    with np.load(part) as stored:
        arrays = dict(stored)
    for seed, damage in [*DAMAGE, *((seed, "flip") for seed in range(100, 120))]:
        part.write_bytes(damaged(whole, damage, seed))
        check_outcome(lambda: curate(config), part.name)
    for name, array in arrays.items():
        wrong = [
            array[:-1],
            array[None],
            array.astype(np.float64),
            array.astype(str),
            np.array(None),
            np.zeros(0),
        ]
        for other in (None, *wrong):
            np.savez(
                part,
                **{key: own for key, own in (arrays | {name: other}).items() if own is not None},
            )
            with pytest.raises(DataError, match=part.name):
                curate(config)
    np.save(part.open("wb"), np.zeros(3))
    with pytest.raises(DataError, match=part.name):
        curate(config)


def test_attributes_of_hdf5_that_are_no_objects(tmp_path: Path) -> None:
    for number, value in enumerate(
        ("[]", "7", "null", "{", "", "[" * 10_000, 7, 1.5, np.zeros(3), b"\xff", np.void(b"x"))
    ):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file.attrs["encoder"] = value
        with pytest.raises(DataError, match=path.name):
            read_record(path)


@pytest.mark.parametrize("digits", ["9" * 309, "9" * 400, "-" + "9" * 400, "9" * 5000])
def test_numbers_that_no_float_can_hold(tmp_path: Path, digits: str) -> None:
    file = tmp_path / "file.jsonl"
    for key, read in (("target", CaptionTargets), ("rating", _ratings)):
        file.write_text(
            f'{{"caption": "a dog", "{key}": 1}}\n{{"caption": "a cat", "{key}": {digits}}}\n'
        )
        with pytest.raises(DataError, match=r"file\.jsonl, line 2"):
            read(file)
    file.write_text(f'{{"hidden_size": {digits}}}')
    with pytest.raises(ValueError, match=r"file\.jsonl"):
        read_object(file)
    file.write_text(f'{{"caption": "a dog", "rating": {10**30}}}\n')
    assert _ratings(file) == {"a dog": 1e30}


def test_a_cut_line_of_a_tsv_before_the_whole_one(tmp_path: Path) -> None:
    bad, other = line(6, "bottom-up")[:-9], line(7, "bottom-up")[:-9]
    whole = [line(5, "bottom-up"), bad, line(6, "bottom-up")]
    (tmp_path / "a.tsv").write_text("\n".join(whole))
    assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out") == (2, 0)
    np.testing.assert_array_equal(
        as_image_features(tmp_path / "out/6.npz", "6").load(8), features(6)
    )
    (tmp_path / "a.tsv").write_text("\n".join([*whole, other, bad]))
    with pytest.raises(DataError, match=r"a\.tsv, line 4, image '7'"):
        convert_tsv([tmp_path / "a.tsv"], tmp_path / "out")
