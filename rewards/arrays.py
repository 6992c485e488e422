"""Reading NumPy files that may be damaged or hostile: an array's header is checked before memory is allocated."""

from __future__ import annotations

import contextlib
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

UNREADABLE_ARRAY = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    TypeError,
    SyntaxError,
    RuntimeError,
    MemoryError,
    OverflowError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy and zipfile raise on a file that is damaged, is not an array, or would have to be unpickled."""
_RATIO, _ALWAYS = 100, 1 << 26


def check_expansion(expanded: int, stored: int) -> None:
    """Refuse what was made to take memory: over 64 MiB, and over 100 times the bytes that are stored for it.

    Raises:
        ValueError: it does.
    """
    if expanded > max(_ALWAYS, _RATIO * stored):
        raise ValueError(f"{stored} bytes would expand to {expanded:.4g}, more than {_RATIO} times as many")


@contextlib.contextmanager
def member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open the array ``name`` of an ``.npz``, with its size in bytes.

    Raises:
        ValueError, or another of ``UNREADABLE_ARRAY``: there is no such array, or it expands beyond reason.
    """
    info = archive.getinfo(f"{name}.npy")
    check_expansion(info.file_size, info.compress_size)
    with archive.open(info) as file:
        yield file, info.file_size  # type: ignore[misc]


def array_header(file: BinaryIO, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array that starts where ``file``, of ``size`` bytes, stands.

    Raises:
        ValueError, or another of ``UNREADABLE_ARRAY``: it is none, or the file is too short for it.
    """
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    needed = file.tell() + math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed > size:
        raise ValueError(f"cut off: the shape {list(shape)} of {dtype} takes {needed} bytes, there are {size}")
    return shape, dtype


def read_array(file: BinaryIO, size: int) -> NDArray[Any]:
    """The array that ``file``, of ``size`` bytes, begins with. Nothing is unpickled. Raises as ``array_header``."""
    array_header(file, size)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)  # type: ignore[no-any-return]
