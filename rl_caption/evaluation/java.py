"""Java programs as subprocesses that always end: found first, timed, killed on every way out, no files left behind.

The caption toolkit's tokenizer, METEOR and SPICE are Java programs. Evaluation may use them; training never does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

_PROBE_SECONDS = 20.0


class JavaError(RuntimeError):
    """There is no usable Java runtime, or a Java program failed or took too long. The message is the reason."""


@dataclass(frozen=True)
class Java:
    """A Java runtime that answered ``java -version``."""

    path: str
    """Absolute path of the program."""
    version: str
    """Such as ``17.0.15``."""


def find_java() -> Java:
    """Return the ``java`` of PATH, after it has told its version.

    Raises:
        JavaError: there is none, or it does not run (macOS has a placeholder that only prints where to get Java).
    """
    path = shutil.which("java")
    if path is None:
        raise JavaError("no Java runtime: 'java' is not on PATH")
    return Java(path, _version(path))


@functools.cache
def _version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "-version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"no Java runtime: {path} -version failed: {error}") from error
    output = (done.stderr or done.stdout).decode(errors="replace").strip()
    if done.returncode != 0 or not output:
        raise JavaError(f"no Java runtime: {path} -version ended with {done.returncode}: {output[:200]}")
    first = output.splitlines()[0]
    return first.split('"')[1] if first.count('"') >= 2 else first


def run_java(
    java: Java, arguments: Sequence[str], *, text: str = "", cwd: str | None = None, name: str, timeout: float
) -> str:
    """Run a Java program to its end and return its standard output.

    Args:
        java: the runtime.
        arguments: everything after ``java``.
        text: standard input, sent as UTF-8.
        cwd: working folder.
        name: what messages call the program.
        timeout: seconds until it is killed.

    Raises:
        JavaError: it did not start, took longer than ``timeout``, or ended with another status than 0.
    """
    command = [java.path, "-Dfile.encoding=UTF-8", *arguments]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise JavaError(f"{name} did not start: {error}") from error
    try:
        output, errors = process.communicate(text.encode("utf-8", "replace"), timeout)
    except subprocess.TimeoutExpired as error:
        raise JavaError(f"{name} was not done after {timeout:g} s and was ended") from error
    finally:
        _end(process)
    if process.returncode != 0:
        raise JavaError(f"{name} ended with status {process.returncode}: {_tail(errors)}")
    return output.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and whatever it started, wait for it, and close its pipes."""
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # bytes meant for a process that is gone
                stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    else:
        process.kill()


class JavaDialogue:
    """A Java program that answers lines with lines. Use as a context manager: the process is gone afterwards.

    Standard error goes to an unnamed temporary file, so that a talkative program cannot block on a full pipe. If
    this process is killed, the program reads the end of its input and ends by itself.
    """

    def __init__(
        self, java: Java, arguments: Sequence[str], *, cwd: str | None = None, name: str, timeout: float
    ) -> None:
        self._command = [java.path, "-Dfile.encoding=UTF-8", *arguments]
        self._cwd = cwd
        self._name = name
        self._timeout = timeout
        self._expired = threading.Event()

    def __enter__(self) -> JavaDialogue:
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._cwd,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise JavaError(f"{self._name} did not start: {error}") from error
        self._timer = threading.Timer(self._timeout, self._expire)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        _end(self._process)
        self._errors.close()

    def _expire(self) -> None:
        self._expired.set()
        _kill(self._process)

    def write(self, line: str) -> None:
        """Send one line.

        Raises:
            JavaError: the program has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode("utf-8", "replace") + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def read(self) -> str:
        """Return the next line of output.

        Raises:
            JavaError: the program has ended, or its time was over.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._ended()
        return line.decode("utf-8", "replace").strip()

    def _ended(self) -> JavaError:
        _kill(self._process)
        status = self._process.wait()
        if self._expired.is_set():
            return JavaError(f"{self._name} was not done after {self._timeout:g} s and was ended")
        self._errors.seek(0)
        return JavaError(f"{self._name} stopped answering (status {status}): {_tail(self._errors.read())}")


def _tail(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])[:400] or "it printed no reason"
