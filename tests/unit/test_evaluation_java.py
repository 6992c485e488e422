"""Java programs that hang, crash or are not there become clear errors and leave no process."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from rl_caption.evaluation.java import Java, JavaDialogue, JavaError, find_java, run_java

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")


@pytest.fixture
def stand_in(tmp_path: Path):
    """Write a shell script named ``java`` and return it as a runtime."""

    def write(script: str) -> Java:
        path = tmp_path / "java"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return Java(str(path), "0")

    return write


def is_running(pid: int) -> bool:
    """Whether the process exists; a zombie counts as running, because nobody has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_java_on_path_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match="'java' is not on PATH"):
        find_java()


def test_version_is_read(monkeypatch: pytest.MonkeyPatch, stand_in) -> None:
    java = stand_in("""echo 'openjdk version "21.0.3" 2024-04-16' >&2""")
    monkeypatch.setenv("PATH", str(Path(java.path).parent), prepend=os.pathsep)
    assert find_java() == Java(java.path, "21.0.3")


def test_placeholder_java_counts_as_none(monkeypatch: pytest.MonkeyPatch, stand_in) -> None:
    java = stand_in("echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    monkeypatch.setenv("PATH", str(Path(java.path).parent), prepend=os.pathsep)
    with pytest.raises(JavaError, match=r"ended with 1: Unable to locate a Java Runtime"):
        find_java()


def test_run_names_status_and_last_words(stand_in) -> None:
    java = stand_in("echo 'Out of memory' >&2; exit 3")
    with pytest.raises(JavaError, match=r"the program ended with status 3: Out of memory"):
        run_java(java, [], name="the program", timeout=30)


def test_run_that_takes_too_long_is_ended(stand_in) -> None:
    java = stand_in("exec sleep 60")
    with pytest.raises(JavaError, match=r"the program was not done after 0\.2 s"):
        run_java(java, [], name="the program", timeout=0.2)


def test_run_passes_text_and_arguments(stand_in) -> None:
    java = stand_in('shift; echo "$@"; cat')
    assert run_java(java, ["-jar", "x"], text="café", name="the program", timeout=30) == "-jar x\ncafé"


def test_dialogue_answers_and_leaves_no_process(stand_in) -> None:
    java = stand_in('while read line; do echo "got $line"; done')
    with JavaDialogue(java, [], name="the program", timeout=30) as program:
        pid = program._process.pid
        program.write("one")
        assert program.read() == "got one"
        program.write("two")
        assert program.read() == "got two"
        assert is_running(pid)
    assert not is_running(pid)


def test_dialogue_leaves_no_process_after_an_error(stand_in) -> None:
    java = stand_in("exec sleep 60")
    dialogue = JavaDialogue(java, [], name="the program", timeout=30)
    with pytest.raises(KeyboardInterrupt), dialogue:
        raise KeyboardInterrupt
    assert not is_running(dialogue._process.pid)


def test_silent_dialogue_is_ended(stand_in) -> None:
    java = stand_in("exec sleep 60")
    with JavaDialogue(java, [], name="the program", timeout=0.2) as program:
        with pytest.raises(JavaError, match=r"the program was not done after 0\.2 s and was ended"):
            program.read()
        assert not is_running(program._process.pid)


def test_crashed_dialogue_tells_why(stand_in) -> None:
    java = stand_in("read line; echo 'Exception in thread main' >&2; exit 1")
    with JavaDialogue(java, [], name="the program", timeout=30) as program:
        program.write("one")
        with pytest.raises(JavaError, match=r"stopped answering \(status 1\): Exception in thread main"):
            program.read()


def test_writing_to_a_crashed_dialogue_tells_why(stand_in) -> None:
    java = stand_in("exit 7")
    with JavaDialogue(java, [], name="the program", timeout=30) as program:
        while program._process.poll() is None:
            time.sleep(0.01)
        with pytest.raises(JavaError, match=r"stopped answering \(status 7\): it printed no reason"):
            program.write("one")
