"""The items of long lists in a JSON file, one at a time: a caption file of COCO as Python objects takes gigabytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rl_caption.data.base import DataError
from rl_caption.data.plain_files import DECODER

_SPACE = " \t\r\n"


def stream_lists(path: str | Path, keys: Collection[str]) -> Iterator[tuple[str, int, Any]]:
    """Yield (key, index, item) of the lists under the given top-level keys, in the order of the file.

    The file's text is held in memory, but of its objects only one item. The main process shows a progress bar on a
    terminal where it takes long.

    Raises:
        DataError: the file cannot be read, is not a JSON object, or lacks one of the lists, or has it twice. What is
            wrong behind an item is found after it was yielded.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    found = set()
    try:
        with tqdm(
            total=len(text),
            desc=Path(path).name,
            unit="B",
            unit_scale=True,
            leave=False,
            delay=2,
            disable=os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty(),
        ) as bar:
            for key, index, item, end in _walk(text, keys):
                if index < 0 and key in found:
                    raise ValueError(f"there are two lists {key!r}")
                found.add(key)
                if end - bar.n > 2**20:
                    bar.update(end - bar.n)
                if index >= 0:
                    yield key, index, item
    except (ValueError, IndexError, RecursionError) as error:  # IndexError: the text ends too early
        raise DataError(f"{path} is not a JSON object, or is cut off: {error}") from error
    absent = sorted(set(keys) - found)
    if absent:
        raise DataError(f"{path} has no list {' and no list '.join(map(repr, absent))}: expected another kind of file")


def _walk(text: str, keys: Collection[str]) -> Iterator[tuple[str, int, Any, int]]:
    """Yield (key, index, item, position behind it), and (key, -1, None, position) where a list begins."""
    decode = DECODER.raw_decode
    at = _skip(text, 0, "{")
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError(f'expected " at character {at}')
        key, at = decode(text, at)
        at = _skip(text, _skip(text, at), ":")
        if key in keys and text[at] == "[":
            at = _skip(text, at, "[")
            yield key, -1, None, at
            index = 0
            while text[at] != "]":
                item, at = decode(text, at)
                yield key, index, item, at
                index, at = index + 1, _next(text, at, "]")
            at = _skip(text, at, "]")
        else:
            _, at = decode(text, at)
        at = _next(text, at, "}")
    if text[at + 1 :].strip(_SPACE):
        raise ValueError(f"there is more behind the object, at character {at + 1}")


def _next(text: str, at: int, last: str) -> int:
    """The position of the next item, or of ``last``, the bracket that ends them."""
    at = _skip(text, at)
    if text[at] == last:
        return at
    at = _skip(text, at, ",")
    if text[at] == last:
        raise ValueError(f"expected another item at character {at}")
    return at


def _skip(text: str, at: int, expected: str = "") -> int:
    """The position of the next thing: behind white space, then behind ``expected`` and white space."""
    while text[at] in _SPACE:
        at += 1
    if not expected:
        return at
    if text[at] != expected:
        raise ValueError(f"expected {expected} at character {at}")
    return _skip(text, at + 1)
