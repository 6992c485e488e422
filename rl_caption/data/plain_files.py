"""JSON and YAML from files that anything may have happened to: what is wrong is one error with the file and the key."""

from __future__ import annotations

import json
import reprlib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_caption.data.base import DataError

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def shown(value: Any) -> str:
    """``repr`` of a value for a message: short, whatever is nested in it."""
    return _REPR.repr(value)[:120]


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_unique)
"""Refuses a key that an object has twice: which of its values was meant is not known."""


def parse_json(content: bytes | str, where: str | Path, error: type[Exception] = DataError) -> Any:
    """The value of JSON text.

    Raises:
        error: it is not JSON, not UTF-8, nested too deeply, or has a key twice; the message begins with ``where``.
    """
    try:
        return json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:  # ValueError: also not UTF-8, and numbers of thousands of digits
        raise error(f"{where} is not JSON: {problem}") from problem


def read_json(file: Path, error: type[Exception], kind: Any = dict) -> Any:
    """The value in a JSON file, of type ``kind`` (see ``check_type``).

    Raises:
        error: it is not; the message names the file and the key.
        OSError: the file cannot be read.
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


def read_log(file: Path, error: type[Exception]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line of ``metrics.jsonl`` or ``samples.jsonl`` stands, for messages, and its object with a ``step``.

    A last line without its end, which a kill leaves, is passed over.

    Raises:
        error: another line that is none.
        OSError: the file cannot be read.
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


class _Line(typing.TypedDict):
    step: int


def check_type(value: Any, kind: Any, where: str, error: type[Exception]) -> None:
    """See to it that a plain value has a type: ``int``, ``dict[str, list[float]]``, ``str | None``, a TypedDict, ...

    A truth value is no number, a whole number is a ``float``, a list is a ``tuple`` of its length, and a TypedDict may
    have further keys.

    Raises:
        error: it has not; the message begins with ``where`` and names the key.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if typing.is_typeddict(kind):
        check_type(value, dict, where, error)
        for key, inner in typing.get_type_hints(kind).items():
            if key in value:
                check_type(value[key], inner, f"{where}, {key!r}", error)
            elif key in kind.__required_keys__:
                raise error(f"{where} has no {key!r}")
    elif origin in (typing.Union, types.UnionType):
        best = next((part for part in parts if _is_a(value, part)), None)
        if best is None:
            raise error(f"{where} is {shown(value)}: expected {' or '.join(map(_named, parts))}")
        check_type(value, best, where, error)
    elif not _is_a(value, kind) or (origin is tuple and len(value) != len(parts)):
        raise error(f"{where} is {shown(value)}: expected {_named(kind)}")
    elif origin is dict:
        for key, inner in value.items():
            check_type(key, parts[0], f"{where}, key", error)
            check_type(inner, parts[1], f"{where}, {key!r}", error)
    elif origin in (list, tuple):
        for index, inner in enumerate(value):
            check_type(inner, parts[index] if origin is tuple else parts[0], f"{where}, [{index}]", error)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether ``value`` is a ``kind`` by itself, whatever is in it."""
    outer: Any = dict if typing.is_typeddict(kind) else typing.get_origin(kind) or kind
    if outer is Any or isinstance(value, bool):
        return outer in (Any, bool)
    wider: dict[Any, Any] = {float: int | float, tuple: list}
    return isinstance(value, wider.get(outer, outer))


def _named(kind: Any) -> str:
    names = {dict: "keys and values", list: "a list", tuple: "a list", str: "text", int: "a whole number"}
    names |= {float: "a number", bool: "true or false", types.NoneType: "null"}
    return names[dict if typing.is_typeddict(kind) else typing.get_origin(kind) or kind]


def check_text(text: str, where: str) -> str:
    """``text`` itself.

    Raises:
        DataError: it has a zero byte or half of a surrogate pair, with which it can be no file's name and not be
            written; the message begins with ``where``.
    """
    if "\0" in text or (not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)):
        raise DataError(f"{where} is {shown(text)}: expected text without zero bytes and lone surrogates")
    return text
