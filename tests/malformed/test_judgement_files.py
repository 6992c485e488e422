"""Damaged files of human judgements: one message that names the file, whatever is wrong; never another exception."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_caption.data.base import DataError
from rl_caption.meta_evaluation.sets import SETS, load
from tests.judgement_sets_for_tests import BUILDERS, OTHER_FORMS, parquet

LONG, DEEP = "9" * 5_000, "[" * 100_000 + "]" * 100_000
OTHER = [None, True, -1, 2.5, float("nan"), "", "text", "a\0b", [], [1], [["a"]], {}, {"a": 1}]
"""Values of other types than expected, or of none."""
FORMS = [*BUILDERS.items(), *OTHER_FORMS]
LABELS = [f"{name}-{build.__name__}" for name, build in FORMS]


def nebula_parquet(folder: Path) -> None:
    row = {"mt": "a dog", "refs": ["dogs"], "human_score": 0.5, "file_name": "x.jpg", "image": {"bytes": b"x"}}
    parquet(folder / "data" / "test-0.parquet", [row] * 3)


def written(folder: Path, build: Callable[[Path], None]) -> list[Path]:
    """The files of a set, made anew."""
    build(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read(name: str, folder: Path) -> DataError | None:
    """What reading the set and all of it raises."""
    try:
        load(name, folder, partial=True)
    except DataError as error:
        return error
    return None


def as_text(path: Path) -> str | None:
    return None if path.suffix in (".mat", ".parquet") else path.read_text()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def nul_block(path: Path) -> None:
    """What a file system leaves of a block that was never written."""
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(64) + content[middle:])


def not_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x81" + path.read_bytes())


def nested(path: Path) -> None:
    path.write_text(DEEP)


@pytest.mark.parametrize("damage", [empty, nul_block, nested, not_utf8], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(("name", "build"), FORMS, ids=LABELS)
def test_every_file_that_is_destroyed_is_named(
    tmp_path: Path, name: str, build: Callable[[Path], None], damage: Callable[[Path], None]
) -> None:
    missed = []
    for path in written(tmp_path, build):
        original = path.read_bytes()
        if damage is not_utf8 and path.suffix == ".csv" and name == "composite":
            continue  # spreadsheets save it in Latin-1
        damage(path)
        error = read(name, tmp_path)
        if error is None or path.name not in str(error):
            missed.append((path.name, error))
        path.write_bytes(original)
    # Of both sets of Flickr8k and of COCO's captions, files lie there that the set does not read.
    assert [(file, error) for file, error in missed if error is not None] == []
    assert {file for file, _ in missed} <= {"CrowdFlowerAnnotations.txt", "ExpertAnnotations.txt"}


def leaves(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in JSON content, the whole of it first."""
    yield where
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from leaves(value, (*where, key))


def replaced(content: Any, where: tuple[Any, ...], value: Any) -> Any:
    if not where:
        return value
    made = copy.deepcopy(content)
    owner = made
    for key in where[:-1]:
        owner = owner[key]
    owner[where[-1]] = value
    return made


def damaged_json(text: str, lines: bool, random_numbers: random.Random) -> str:
    """One value of another type, a number of 5,000 digits, or the text cut off."""
    if random_numbers.random() < 0.2:
        return text[: random_numbers.randrange(1, len(text) - 1)]
    own = text.splitlines() if lines else [text]
    row = random_numbers.randrange(len(own))
    content = json.loads(own[row])
    where = random_numbers.choice(list(leaves(content)))
    value = random_numbers.choice([*OTHER, "LONG", "-LONG", "DEEP"])
    own[row] = json.dumps(replaced(content, where, value))
    for mark, digits in (("-LONG", f"-{LONG}"), ("LONG", LONG), ("DEEP", "[" * 100_000)):
        own[row] = own[row].replace(f'"{mark}"', digits)
    return "\n".join(own)


def damaged_table(text: str, separator: str, random_numbers: random.Random) -> str:
    """A field more, less or other, a line cut off, or an open quotation mark."""
    rows = [line.split(separator) for line in text.splitlines()]
    row = random_numbers.choice(rows)
    place = random_numbers.randrange(len(row))
    kind = random_numbers.randrange(5)
    if kind == 0:
        del row[place:]
    elif kind == 1:
        row += ["more"]
    elif kind == 2:
        row[place] = random_numbers.choice(["", LONG, "nan", "-inf", "[" * 5_000, "²", '"', "x" * 140_000, "1e999"])
    elif kind == 3:
        return text[: random_numbers.randrange(1, len(text) - 1)]
    else:
        rows[0], rows[-1] = rows[-1], rows[0]
    return "\n".join(separator.join(fields) for fields in rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "build"), FORMS, ids=LABELS)
def test_damage_somewhere_is_an_error_with_the_file_or_no_matter(
    tmp_path: Path, name: str, build: Callable[[Path], None], seed: int
) -> None:
    random_numbers = random.Random(f"{name} {build.__name__} {seed}")
    path = random_numbers.choice(written(tmp_path, build))
    text = as_text(path)
    for _ in range(15):
        if text is None:
            # Cut off only: SciPy's reader may crash on MATLAB files with other bytes in them.
            original = path.read_bytes()
            path.write_bytes(original[: random_numbers.randrange(len(original))])
        elif path.suffix in (".json", ".jsonl"):
            path.write_text(damaged_json(text, path.suffix == ".jsonl", random_numbers))
        else:
            separator = "\t" if path.suffix in (".txt", ".token") else ";" if name == "composite" else ","
            path.write_text(damaged_table(text, separator, random_numbers))
        error = read(name, tmp_path)
        assert error is None or path.name in str(error) or name in str(error)
        assert error is None or len(str(error)) < 1_000, "values are shortened"
        if text is None:
            path.write_bytes(original)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_parquet_files_are_named(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("pyarrow")
    random_numbers = random.Random(seed)
    (path,) = written(tmp_path, nebula_parquet)
    original = path.read_bytes()
    for _ in range(10):
        content = bytearray(original)
        for _ in range(random_numbers.choice([0, 1, 20])):
            content[random_numbers.randrange(len(content))] = random_numbers.randrange(256)
        path.write_bytes(content[: random_numbers.choice([len(content), random_numbers.randrange(len(content))])])
        error = read("nebula", tmp_path)
        assert error is None or path.name in str(error) or "nebula" in str(error)


def test_every_set_is_among_the_damaged_ones_and_is_read_undamaged(tmp_path: Path) -> None:
    assert set(BUILDERS) == set(SETS)
    for number, (name, build) in enumerate(FORMS):
        (tmp_path / str(number)).mkdir()
        build(tmp_path / str(number))
        assert read(name, tmp_path / str(number)) is None, name
