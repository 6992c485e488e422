"""What may stand where a file of judgements, ratings or parts is expected: one error that names the file."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from rl_caption.lab.concreteness import _captions, _ratings
from rl_caption.lab.meta_evaluation.sets.base import json_lines, json_object, json_rows, table_rows
from rl_caption.lab.meta_evaluation.sets.videos import _load_pickle
from tests.core.malformed.test_places_of_files import (
    Reader,
    check_contents,
    check_places,
    limits,
    text_of,
)

RATED = '{"caption": "a dog", "rating": 3}\n{"caption": "a cat", "rating": 4}\n'
READERS: dict[str, Reader] = {
    "object": ("data.json", text_of({"a": 1}), lambda path: json_object(path).values),
    "rows": (
        "data.json",
        text_of([{"a": 1}]),
        lambda path: [row.values for row in json_rows(path)],
    ),
    "lines": (
        "data.jsonl",
        text_of('{"a": 1}\n{"a": 2}\n'),
        lambda path: [row.values for row in json_lines(path)],
    ),
    "table": (
        "data.csv",
        text_of("a,b\n1,2\n"),
        lambda path: [row.values for row in table_rows(path, ["a"])],
    ),
    "array": (
        "data.pkl",
        lambda path: path.write_bytes(pickle.dumps(np.arange(3))),
        lambda path: _load_pickle(path).size,
    ),
    "captions": ("data.txt", text_of("a dog\na cat\n"), _captions),
    "ratings": ("data.jsonl", text_of(RATED), _ratings),
}


@pytest.mark.parametrize("name", READERS)
def test_places_and_contents_of_a_file(tmp_path: Path, name: str) -> None:
    file, write, read = READERS[name]
    path = tmp_path / file
    write(path)
    with limits():
        read(path)
    check_contents(path, read, name)
    check_places(path, read, optional=False)
