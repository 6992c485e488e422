"""Files: atomic writes, errors that name the file, and reading of JSON and ``.npz`` arrays that others made."""

import contextlib
import errno
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import struct
import threading
import time
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

UNREADABLE_ARRAY = (
    *(
        OSError,
        ValueError,
        EOFError,
        KeyError,
        TypeError,
        SyntaxError,
        RuntimeError,
        MemoryError,
        OverflowError,
    ),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""What numpy and zipfile raise on a file that is damaged, is not an array, or would have to be unpickled."""
_PARSER = threading.Lock()
"""Held while a header is parsed: in Python 3.11, ``ast.literal_eval`` of several threads at once can raise."""
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
MOST_DIGITS = 300
"""Of a whole number in JSON: one of 309 digits is beyond the largest float."""
_CHECKSUM_BYTES = 16
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_write(path: str | Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open ``path`` for writing such that readers find the old file or the complete new one.

    The block writes to ``.NAME.RANDOM.tmp`` in the same folder, which is made if absent. At its end the file is
    renamed, after an fsync unless ``sync`` is False; on any exception it is removed.

    Raises:
        OSError: it cannot be written; the error names ``path`` and, where the disk is full, the free space.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with write_errors(path, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


class CheckedFiles:
    """Contents by key, as ``folder/<2 digits>/<key><suffix>``: a checksum of key and content, then the content.

    A file that fails the checksum counts as absent. Files are written atomically, so processes may use the same folder;
    a full disk, and ``max_bytes``, end the writing with a warning.

    Args:
        folder: is made.
        content_name: what the contents are called in messages, such as ``embedding``.
        suffix: of the files' names.
        max_bytes: largest size of the folder; None sets no limit. Processes that write at the same time may exceed it.
    """

    def __init__(
        self, folder: Path, content_name: str, suffix: str, max_bytes: int | None = None
    ) -> None:
        self.folder, self.content_name, self.suffix, self.max_bytes = (
            folder,
            content_name,
            suffix,
            max_bytes,
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._stored_bytes: int | None = None
        self._full = False

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{self.suffix}"

    def read(self, key: str) -> bytes | None:
        """The content of a key; None where there is none that can be read."""
        path = self._path(key)
        try:
            stored = read_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning(
                "cached %s %s cannot be read (%s): it is computed again",
                self.content_name,
                path,
                error,
            )
            return None
        checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
        if checksum != _checksum(key, content):
            logger.warning(
                "cached %s %s is damaged or belongs to other content: it is computed again",
                self.content_name,
                path,
            )
            return None
        return content

    def write(self, key: str, content: bytes) -> None:
        """Store the content of a key, if there is room."""
        try:
            if self.max_bytes is not None:
                if self._stored_bytes is None:  # with what killed processes left
                    files = self.folder.rglob(f"*{self.suffix}*")
                    self._stored_bytes = sum(file.lstat().st_size for file in files)
                self._stored_bytes += len(content) + _CHECKSUM_BYTES
                if self._stored_bytes > self.max_bytes:
                    self._stored_bytes -= len(content) + _CHECKSUM_BYTES
                    self._warn(f"they fill its {self.max_bytes / 2**20:.0f} MiB")
                    return
            # Without fsync: a file that a power cut damages fails its checksum and is computed again.
            with atomic_write(self._path(key), sync=False) as file:
                file.write(_checksum(key, content) + content)
        except OSError as error:  # a full disk must not end a training run
            self._warn(str(error))

    def _warn(self, why: str) -> None:
        if not self._full:
            name, folder = self.content_name, self.folder
            logger.warning(
                "%ss cannot be kept in %s (%s): they stay in memory only", name, folder, why
            )
        self._full = True


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + content, digest_size=_CHECKSUM_BYTES).digest()


@contextlib.contextmanager
def write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Context that makes an ``OSError`` name ``path`` if it names no file or ``temporary``; its ``errno`` stays."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += f" ({shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free)"
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


def remove_leftovers(folder: str | Path, older_than: float = 60.0) -> None:
    """Remove the temporary files of ``atomic_write`` that killed processes left in ``folder``, not in its subfolders.

    Files changed less than ``older_than`` seconds ago stay, because a running process may be writing them.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            if _LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another process removes it, too
                    if time.time() - entry.stat().st_mtime > older_than:
                        os.unlink(entry.path)


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a file for reading bytes. Raises ``OSError``, also for a pipe or a device, which might never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(
            errno.EINVAL,
            "it is a pipe, socket or device: name a file, or pipe into /dev/stdin",
            str(path),
        )
    return open(path, "rb")


def read_regular(path: str | Path) -> bytes:
    """The content of a file. Raises as ``open_regular``, also for a file (a sparse one) that is larger than memory."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
                raise MemoryError
            return file.read()
        except MemoryError as error:
            raise OSError(
                errno.ENOMEM, f"its {size:,} bytes do not fit into memory", str(path)
            ) from error


def parse_integer(digits: str) -> int:
    """A whole number of JSON. Raises ``ValueError`` for one of over ``MOST_DIGITS`` digits."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"{digits[:20]}... has {len(digits)} digits: expected a number that a float can hold"
        )
    return int(digits)


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ``ValueError`` for a key that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"the key {next(key for key in keys if keys.count(key) > 1)!r:.80} occurs twice"
        )
    return values


def load_json(path: str | Path, pairs: Callable[[Sequence[tuple[str, Any]]], Any] = dict) -> Any:
    """Read a JSON file; ``pairs`` makes its objects, such as ``unique_keys``.

    Raises:
        OSError: as ``open_regular``.
        ValueError: the file, which the message names, is not JSON, is nested too deeply, or has too long a number.
    """
    content = read_regular(path)
    try:
        return json.loads(content, object_pairs_hook=pairs, parse_int=parse_integer)
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON: its brackets are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def check_expansion(expanded: int, stored: int) -> None:
    """Raise ``ValueError`` if ``stored`` compressed bytes expand to over 64 MiB and over 100 times their size."""
    if expanded > max(1 << 26, 100 * stored):
        raise ValueError(
            f"{stored} bytes would expand to {expanded:.4g}, more than 100 times as many"
        )


@contextlib.contextmanager
def member(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open the array ``name`` of an ``.npz`` archive: yields the file and its uncompressed size in bytes.

    Raises one of ``UNREADABLE_ARRAY`` if there is no such array, or if it would expand too much (``check_expansion``).
    """
    info = archive.getinfo(f"{name}.npy")
    check_expansion(info.file_size, info.compress_size)
    with archive.open(info) as file:
        yield file, info.file_size  # type: ignore[misc]


def array_header(file: BinaryIO, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and dtype from the header of an array in NumPy's format; ``file`` has ``size`` bytes in all.

    Raises one of ``UNREADABLE_ARRAY`` if there is no such header, or if the file is too short for the array.
    """
    shape, _, dtype = _header(file, size)
    return shape, dtype


def _header(file: BinaryIO, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is in Fortran's order, and dtype of an array; see ``array_header``."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    with _PARSER:
        shape, fortran, dtype = read(file)
    needed = file.tell() + math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed > size:
        raise ValueError(
            f"cut off: the shape {list(shape)} of {dtype} takes {needed} bytes, but there are {size}"
        )
    return shape, fortran, dtype


def read_array(file: BinaryIO, size: int) -> NDArray[Any]:
    """Read an array in NumPy's format from ``file`` of ``size`` bytes; never unpickles. Raises as ``array_header``."""
    shape, fortran, dtype = _header(file, size)
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled")
    values = np.frombuffer(
        bytearray(file.read(math.prod(shape) * dtype.itemsize)), dtype, math.prod(shape)
    )
    return values.reshape(shape, order="F" if fortran else "C")
