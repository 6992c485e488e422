"""Files that are written whole or not at all, and errors of writing that say which file and how much space is left."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_LEFTOVER_SECONDS = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def atomic_write(path: str | Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open ``path`` for writing such that readers find the old file or the whole new one, never a part.

    What is written goes to ``.NAME.RANDOM.tmp`` in the same folder, which is made if absent. At the end of the block
    that is flushed to the disk and renamed; on any exception it is removed. ``remove_leftovers`` removes those of
    processes that were killed.

    Args:
        path: the file.
        sync: wait until the disk has it. False where a file that a power cut damages is noticed and made again.

    Raises:
        OSError: it cannot be written; the error names ``path`` and, where the disk is full, what is free.
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


@contextlib.contextmanager
def write_errors(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Inside, an ``OSError`` that names no file, or ``temporary``, becomes one of the same kind that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(temporary)):
            raise
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            reason += f" ({shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free)"
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


def remove_leftovers(folder: str | Path) -> None:
    """Remove what ``atomic_write`` left in ``folder`` when its process was killed; files of the last minute stay.

    Folders in it are not looked into. A folder that is not there has none.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            if _LEFTOVER.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another process removes them, too
                    if time.time() - entry.stat().st_mtime > _LEFTOVER_SECONDS:
                        os.unlink(entry.path)
