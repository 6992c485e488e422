"""Files: atomic writes, a cache of checked files, and reading of JSON."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rewards.base import naming

UNREADABLE_ARRAY = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of NumPy for a file that is damaged or holds no array."""
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_CHECKSUM_BYTES = 16
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_write(path: str | Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open ``path`` for writing such that readers find the old file or the complete new one.

    The block writes to ``.NAME.RANDOM.tmp`` in the same folder, which is made if
    absent. At its end the file is renamed, after an fsync unless ``sync`` is False; on
    any exception it is removed.

    Raises:
        OSError: it cannot be written; the error names ``path`` and, where the disk is
            full, the free space.
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
    """Contents by key, as ``folder/<2 digits>/<key>.emb``: a checksum of key and
    content, then the content.

    A file that fails the checksum counts as absent. Files are written atomically, so
    processes may use the same folder, which is made; a full disk ends the writing with
    a warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._full = False

    def read(self, key: str) -> bytes | None:
        """The content of a key; None where there is none that can be read."""
        path = self.folder / key[:2] / f"{key}.emb"
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("cached %s cannot be read: %s", path, error)
            return None
        content = stored[_CHECKSUM_BYTES:]
        if stored[:_CHECKSUM_BYTES] != _checksum(key, content):
            logger.warning("cached %s is damaged, or of other content", path)
            return None
        return content

    def write(self, key: str, content: bytes) -> None:
        """Store the content of a key, if there is room."""
        path = self.folder / key[:2] / f"{key}.emb"
        try:
            # Without fsync: a file that a power cut damages fails its checksum and is computed
            # again.
            with atomic_write(path, sync=False) as file:
                file.write(_checksum(key, content) + content)
        except OSError as error:  # a full disk must not end a training run
            if not self._full:
                logger.warning("kept in memory only, not in %s: %s", self.folder, error)
            self._full = True


def _checksum(key: str, content: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + content, digest_size=_CHECKSUM_BYTES).digest()


@contextlib.contextmanager
def write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Context that makes an ``OSError`` name ``path`` if it names no file or
    ``temporary``; its ``errno`` stays.
    """
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
    """Remove the temporary files of ``atomic_write`` that killed processes left in
    ``folder``, not in its subfolders.

    Files changed less than ``older_than`` seconds ago stay, because a running process
    may be writing them.
    """
    for file in Path(folder).glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            age = time.time() - file.lstat().st_mtime
            if age > older_than and file.is_file() and _LEFTOVER.fullmatch(file.name):
                file.unlink()


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (``object_pairs_hook``). Raises ``ValueError`` for a key that
    is there twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} occurs twice")
    return values


def load_json(path: str | Path) -> Any:
    """Read a JSON file. Raises ``OSError``, or ``ValueError`` that begins with the file's name."""
    with naming(f"{path} is not JSON", (ValueError,)):
        return json.loads(Path(path).read_bytes(), object_pairs_hook=unique_keys)
