"""JSON and YAML of unknown origin: whatever is wrong is one error that names the file and the key."""

import hashlib
import json
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_caption.data.base import DataError
from rl_caption.options import check_type as check_type
from rl_caption.options import shown as shown


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} is there twice")
    return made


def _without_tokens(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = _unique(pairs)
    return {key: value for key, value in made.items() if key != "tokens"} if made.get("raw") is not None else made


def parse_json(
    content: bytes | str, where: str | Path, error: type[Exception] = DataError, drop_tokens: bool = False
) -> Any:
    """The value of JSON text in UTF-8, UTF-16 or UTF-32. Messages begin with ``where``.

    ``drop_tokens`` leaves out ``tokens`` beside ``raw``: most of the memory of Karpathy JSON (0.9 GB of COCO). Raises
    ``error`` where it is not JSON, nested too deeply, or an object has a key twice.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_tokens if drop_tokens else _unique)
    except RecursionError as problem:
        raise error(f"{where} cannot be read as JSON: its brackets are nested too deeply") from problem
    except ValueError as problem:  # also not UTF-8, and numbers of thousands of digits
        raise error(f"{where} is not JSON: {problem}") from problem


def json_lines(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield number, ``FILE, line N`` and value of each line of JSON, less empty ones; only a line feed ends a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield number, where, parse_json(line, where)


def json_object(content: bytes | str, where: str) -> dict[str, Any]:
    """The object that JSON text is. Raises ``DataError`` where it is none."""
    value: dict[str, Any] = parse_json(content, where)
    check_type(value, dict, where, DataError)
    return value


def read_json(file: Path, error: type[Exception], kind: Any = dict) -> Any:
    """The value in a JSON file, of type ``kind`` (see ``check_type``).

    Raises ``error``, which names the file and the key, where it is not; ``OSError`` where the file cannot be read.
    """
    content = parse_json(file.read_bytes(), file, error)
    check_type(content, kind, str(file), error)
    return content


def read_yaml(file: Path, error: type[Exception], kind: Any = dict) -> Any:
    """The value in a YAML file, of type ``kind``. Raises as ``read_json``."""
    try:
        content = yaml.safe_load(file.read_bytes())
        json.dumps(content, default=str)  # refuses what contains itself
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as problem:
        raise error(f"{file} is not YAML: {problem}") from problem
    check_type(content, kind, str(file), error)
    return content


class _Line(typing.TypedDict):
    step: int


def read_log(file: Path, error: type[Exception]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``FILE, line N`` and the object of every line of ``metrics.jsonl`` or ``samples.jsonl``; each has ``step``.

    A last line that is cut off, which a kill leaves, is passed over. Raises as ``read_json``.
    """
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        where = f"{file}, line {number}"
        if line.strip():
            try:
                record = parse_json(line, where, error)
            except error:
                if number == len(lines):
                    return
                raise
            check_type(record, _Line, where, error)
            yield where, record


def single_spaced(text: str) -> str:
    """The text with single spaces, and none around it."""
    return " ".join(text.split())


def hashed(text: str) -> int:
    """A number in 0 .. 2^64 - 1 that only the text decides, the same on every platform."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_unicode(text: str) -> bool:
    r"""Whether text can be written: JSON's ``"\ud800"`` is half of a character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def check_text(text: str, where: str) -> str:
    """``text`` itself; ``DataError`` where it has a zero byte or half of a surrogate pair.

    With these it can be no file's name and not be written.
    """
    if "\0" in text or not is_unicode(text):
        raise DataError(f"{where} is {shown(text)}: expected text without zero bytes and lone surrogates")
    return text
