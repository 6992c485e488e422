"""Document frequencies out of other packages' pickles, without running what a pickle may contain."""

from __future__ import annotations

import math
import pickle
import struct
from collections import defaultdict
from pathlib import Path
from reprlib import repr  # short, whatever was nested in what
from typing import Any

import numpy as np

from rewards.text.document_frequency import EOS, LARGEST_LOGARITHM, DocumentFrequencies
from rewards.text.ngrams import NGram
from rewards.text.tokenize import TOKENIZER

_UNREADABLE = (
    pickle.UnpicklingError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
    struct.error,
)
"""What unpickling raises on damaged files."""


class _DataType:
    """Stands for ``numpy.dtype``: remembers its code, builds nothing."""

    def __init__(self, code: str = "", *ignored: object) -> None:
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]


def _number(data_type: _DataType, raw: bytes | str) -> float:
    """Stand for ``numpy.core.multiarray.scalar``: one little-endian 64-bit float or integer."""
    form = {"f8": "<d", "i8": "<q"}.get(data_type.code)
    data = raw.encode("latin1") if isinstance(raw, str) else raw
    if form is None or getattr(data_type, "order", "<") != "<" or len(data) != 8:
        raise pickle.UnpicklingError(f"a NumPy scalar of type {data_type.code!r}: expected '<f8' or '<i8'")
    return struct.unpack(form, data)[0]


def _latin1(text: str, encoding: str) -> bytes:
    """Stand for ``codecs.encode``, by which old protocols write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r}: expected 'latin1'")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Any] = {
    ("collections", "defaultdict"): defaultdict,
    ("_codecs", "encode"): _latin1,
    ("numpy", "dtype"): _DataType,
    ("numpy.core.multiarray", "scalar"): _number,
    ("numpy._core.multiarray", "scalar"): _number,
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (dict, float, int, str, tuple)
    },
    ("__builtin__", "unicode"): str,
    ("__builtin__", "long"): int,
}


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, tuples, strings and numbers; refuses the name of anything else before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}; only dict, defaultdict, tuple, str and numbers are admitted"
            )
        return _ADMITTED[module, name]


def load_legacy_pickle(
    path: str | Path, *, tokenizer: str = TOKENIZER, document: str = "image", eos: bool | None = None
) -> DocumentFrequencies:
    """Read a document-frequency pickle with the keys ``document_frequency`` and ``ref_len``.

    Both conventions are understood: ``ref_len`` as the number of images (ruotianluo/self-critical.pytorch and its
    family) and as its logarithm (YehLi/xmodaler). Pickles of Python 2 are read as Latin-1. Nothing that the file
    names is imported or run.

    Args:
        path: the pickle.
        tokenizer: how its words were made; the file does not say. ``ptb`` if they are the toolkit's tokens.
        document: what one document was; the file does not say either.
        eos: whether captions were counted with ``<eos>``; None looks whether the token occurs.

    Raises:
        ValueError: the pickle asks for anything but plain data, or its content is something else.
    """
    try:
        with open(path, "rb") as file:
            content = _PlainUnpickler(file, encoding="latin1").load()
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise ValueError(f"{path} was not read: {error or type(error).__name__}") from error
    if not isinstance(content, dict) or not {"document_frequency", "ref_len"} <= content.keys():
        found = repr(list(content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} holds {found}: expected a dict with 'document_frequency' and 'ref_len'")
    length, stored = content["ref_len"], content["document_frequency"]
    if type(length) not in (int, float) or not 0 < length < math.exp(LARGEST_LOGARITHM):
        raise ValueError(f"{path}: ref_len is {repr(length)}: expected the number of images or its logarithm")
    if not isinstance(stored, dict) or not stored:
        raise ValueError(f"{path}: document_frequency is {repr(stored)}: expected a dict from n-gram to count")
    counts = {_ngram(key, path): _count(key, value, path) for key, value in stored.items()}
    # None that is pickled has under 50 images: a smaller number is a logarithm already.
    log_documents = float(length) if length < LARGEST_LOGARITHM else float(np.log(float(length)))
    try:
        return DocumentFrequencies(
            counts,
            log_documents,
            n=max(len(ngram) for ngram in counts),
            eos=(EOS,) in counts if eos is None else eos,
            tokenizer=tokenizer,
            document=document,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _ngram(key: Any, path: str | Path) -> NGram:
    if not isinstance(key, tuple) or not key or not all(isinstance(word, str) for word in key):
        raise ValueError(f"{path}: n-gram {repr(key)}: expected a tuple of words")
    return tuple(_word(word) for word in key)


def _word(word: str) -> str:
    """Undo Latin-1 where Python 2 had stored UTF-8 bytes."""
    if word.isascii():
        return word
    try:
        return word.encode("latin1").decode()
    except UnicodeError:
        return word


def _count(key: Any, value: Any, path: str | Path) -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise ValueError(f"{path}: n-gram {repr(key)} has the count {repr(value)}: expected a number of at least 0")
    return int(value) if value == int(value) else value
