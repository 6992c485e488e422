"""Damaged files of human judgements: one message that names the file, whatever is wrong; never another exception."""

import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from rl_caption.data.base import DataError
from rl_caption.lab.meta_evaluation.sets import SETS, load
from tests.judgement_sets_for_tests import BUILDERS, OTHER_FORMS, parquet

pytestmark = pytest.mark.slow

LONG, DEEP = "9" * 5_000, "[" * 100_000 + "]" * 100_000
OTHER = [
    "null",
    "true",
    "-1",
    "2.5",
    "NaN",
    '""',
    '"text"',
    r'"a\u0000b"',
    "[]",
    '[["a"]]',
    '{"a": 1}',
    "",
    '"',
]
OTHER += ["more\t,;", LONG, f"-{LONG}", "[" * 100_000, "x" * 140_000, "1e999", "²", "-inf"]
"""Values of other types than expected, in JSON and in tables."""
FORMS = [*BUILDERS.items(), *OTHER_FORMS]
LABELS = [f"{name}-{build.__name__}" for name, build in FORMS]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read(name: str, folder: Path) -> DataError | None:
    """What reading the set and all of it raises."""
    try:
        load(name, folder, partial=True)
    except DataError as error:
        return error
    return None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    # What a file system leaves of a block that was never written.
    "nul_block": lambda content: (
        content[: len(content) // 2] + bytes(64) + content[len(content) // 2 :]
    ),
    "nested": lambda content: DEEP.encode(),
    "not_utf8": lambda content: b"\xff\xfe\x81" + content,
}


@pytest.mark.parametrize(("name", "build"), FORMS, ids=LABELS)
def test_every_file_that_is_destroyed_is_named(tmp_path, name, build):
    build(tmp_path)
    assert read(name, tmp_path) is None, "undamaged"
    for path, (damage, damage_to) in product(files(tmp_path), DAMAGES.items()):
        original = path.read_bytes()
        if damage == "not_utf8" and path.suffix == ".csv" and name == "composite":
            continue  # spreadsheets save it in Latin-1
        path.write_bytes(damage_to(original))
        error = read(name, tmp_path)
        # Of both sets of Flickr8k, files lie there that the set does not read.
        is_read = (
            path.name not in ("CrowdFlowerAnnotations.txt", "ExpertAnnotations.txt")
            or error is not None
        )
        assert not is_read or path.name in str(error), damage
        path.write_bytes(original)


def damaged(path: Path, content: bytes, numbers: random.Random) -> bytes:
    """The file cut off, or one of its values replaced by another."""
    if path.suffix == ".mat" or numbers.random() < 0.2:
        # Cut off only: SciPy's reader may crash on MATLAB files with other bytes in them.
        return content[: numbers.randrange(len(content))]
    if path.suffix == ".pkl":
        at = numbers.randrange(len(content))
        return content[:at] + bytes([numbers.randrange(256)]) + content[at + 1 :]
    text = content.decode()
    json_value, field = r'"[^"]*"|-?[\d.]+|true|false|\[[^][]*\]', r"[^\t;,\n]+|[\t;,\n]"
    place = numbers.choice(
        list(re.finditer(json_value if path.suffix.startswith(".json") else field, text))
    )
    return (text[: place.start()] + numbers.choice(OTHER) + text[place.end() :]).encode()


@pytest.mark.parametrize(("name", "build"), FORMS, ids=LABELS)
def test_damage_somewhere_is_an_error_with_the_file_or_no_matter(tmp_path, name, build):
    numbers = random.Random(f"{name} {build.__name__}")
    build(tmp_path)
    contents = {path: path.read_bytes() for path in files(tmp_path)}
    for _ in range(30):
        path = numbers.choice(list(contents))
        path.write_bytes(damaged(path, contents[path], numbers))
        error = read(name, tmp_path)
        assert error is None or path.name in str(error) or name in str(error)
        assert error is None or len(str(error)) < 1_000, "values are shortened"
        path.write_bytes(contents[path])


def test_damaged_parquet_files_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    random_numbers = random.Random(0)
    row = {
        "mt": "a dog",
        "refs": ["dogs"],
        "human_score": 0.5,
        "file_name": "x.jpg",
        "image": {"bytes": b"x"},
    }
    parquet(tmp_path / "data" / "test-0.parquet", [row] * 3)
    (path,) = files(tmp_path)
    original = path.read_bytes()
    for _ in range(30):
        content = bytearray(original)
        for _ in range(random_numbers.choice([0, 1, 20])):
            content[random_numbers.randrange(len(content))] = random_numbers.randrange(256)
        path.write_bytes(
            content[: random_numbers.choice([len(content), random_numbers.randrange(len(content))])]
        )
        error = read("nebula", tmp_path)
        assert error is None or path.name in str(error) or "nebula" in str(error)


def test_every_set_is_among_the_damaged_ones() -> None:
    assert set(BUILDERS) | {"longcap_arena"} == set(SETS), "Parquet files have a test of their own"
