"""Java programs that hang, crash or are not there become clear errors and leave no process."""

from __future__ import annotations

import os
import stat
import subprocess
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


def is_gone(pid: int) -> bool:
    """Whether a process that is not ours ends; it was sent SIGKILL, and someone else waits for it."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


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


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")
def test_what_a_wrapper_started_is_ended_too(stand_in, tmp_path: Path) -> None:
    """A ``java`` that is a script with a child: the child holds the pipes, and would be waited for."""
    java = stand_in(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(JavaError, match="was not done after"):
        run_java(java, [], name="the program", timeout=2)
    assert is_gone(int((tmp_path / "child").read_text()))
    with JavaDialogue(java, [], name="the program", timeout=2) as program, pytest.raises(JavaError, match="2 s"):
        program.read()
    assert is_gone(int((tmp_path / "child").read_text()))


def test_an_interrupted_run_leaves_no_process(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = stand_in(f"echo $$ > {tmp_path}/pid; exec sleep 600")

    def interrupted(*arguments: object) -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_java(java, [], name="the program", timeout=30)
    assert not is_running(int((tmp_path / "pid").read_text()))


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
