"""The toolkit's Java programs: equal to its own classes; one that hangs or crashes says why and leaves no process."""

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_caption.evaluation import (
    EvaluationError,
    Java,
    JavaError,
    evaluate_captions,
    find_java,
    ptb_tokenize,
    toolkit,
)
from rl_caption.evaluation.confidence import meteor_of_sums
from rl_caption.evaluation.toolkit import JavaProgram
from tests.captions_for_tests import CAPTIONS, REFERENCES, needs_java

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "karpathy_meteor.json"
posix = pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")
VERSION = """[ "$1" = -version ] && { echo 'openjdk version "17.0.1" 2021' >&2; exit 0; }"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a shell script named ``java`` first on PATH."""

    def write(script: str) -> Path:
        path = tmp_path / "java"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return path

    return write


def is_gone(pid: int) -> bool:
    """Whether a process, which was sent SIGKILL, ends; a child of it may stay a zombie until someone waits for it."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def program(timeout: float = 30.0, arguments: tuple[str, ...] = ()) -> JavaProgram:
    return JavaProgram(arguments, name="the program", timeout=timeout)


def test_no_java_on_path_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match=r"'java'.*PATH"):
        find_java()
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("bleu", "meteor", "cider"))
    assert evaluation.left_out["METEOR"] == "no Java runtime: 'java' is not on PATH"
    assert set(evaluation.metrics) >= {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "CIDEr"}
    assert "METEOR" not in evaluation.metrics
    assert "tokenizer:PTB[corenlp3.4.1]" in evaluation.signature
    assert "+java" not in evaluation.signature
    with pytest.raises(EvaluationError, match=r"tokenizer 'java'.*Java runtime"):
        evaluate_captions(CAPTIONS, REFERENCES, metrics=("bleu",), tokenizer="java")


@posix
def test_a_placeholder_counts_as_no_java(stand_in) -> None:
    java = stand_in(VERSION)
    assert find_java() == Java(str(java), "17.0.1")
    toolkit._version.cache_clear()
    stand_in("echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    with pytest.raises(JavaError, match=r"1: Unable.*Java Runtime"):
        find_java()


@posix
def test_run_passes_text_and_names_status_and_last_words(stand_in) -> None:
    stand_in(f'{VERSION}\nshift; echo "$@"; cat')
    with program(arguments=("-jar", "x")) as java:
        assert java.run("café") == "-jar x\ncafé"
    stand_in(f"{VERSION}\necho 'Out of memory' >&2; exit 3")
    with program() as java, pytest.raises(JavaError, match="3: Out"):
        java.run()


@posix
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")
def test_what_takes_too_long_is_ended_with_its_children(stand_in, tmp_path: Path) -> None:
    """A ``java`` that is a script with two children: one holds the pipes, and would be waited for; one does not."""
    stand_in(
        f"{VERSION}\nsleep 600 > /dev/null 2>&1 & echo $! > {tmp_path}/child; (sleep 9; touch {tmp_path}/late) & wait"
    )
    for call in (lambda java: java.run(), lambda java: java.read()):
        with program(0.3) as java, pytest.raises(JavaError, match=r"0\.3 s"):
            call(java)
        assert not Path(f"/proc/{java._process.pid}").exists()
        assert is_gone(int((tmp_path / "child").read_text()))
        assert not (tmp_path / "late").exists(), "it was not waited for"


@posix
def test_an_interrupt_leaves_no_process(stand_in) -> None:
    stand_in(f"{VERSION}\nexec sleep 600")
    with pytest.raises(KeyboardInterrupt), program() as java:
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(java._process.pid, 0)


@posix
def test_a_crash_between_lines_tells_why(stand_in) -> None:
    stand_in(
        f"{VERSION}\nread line; echo \"got $line\"; read line; echo 'Exception in thread main' >&2; exit 1"
    )
    with program() as java:
        assert java.ask("one") == "got one"
        with pytest.raises(JavaError, match=r"answering \(status 1\): Exception"):
            java.ask("two")
    stand_in(f"{VERSION}\necho lost >&2; exit 9")
    evaluation = evaluate_captions(
        CAPTIONS, REFERENCES, metrics=("meteor", "rouge"), tokenizer="none"
    )
    assert evaluation.left_out["METEOR"] == "METEOR stopped answering (status 9): lost"
    assert "ROUGE-L" in evaluation.metrics


@needs_java
def test_tokens_equal_the_toolkits_tokenizer() -> None:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    captions = [
        "A man's dog -- isn't it?",
        "",
        "  ",
        'He said "stop" (loudly).',
        "café at 5 p.m.",
        "x ||| y",
        "...",
    ]
    wanted = PTBTokenizer().tokenize(
        {row: [{"caption": caption}] for row, caption in enumerate(captions)}
    )
    assert ptb_tokenize(captions) == [wanted[row][0] for row in range(len(captions))]
    line_ends = [f"one{end}two" for end in "\n\r\x0b\x0c\u2028\u2029\x85"] + ["last"]
    assert ptb_tokenize(line_ends) == ["one two"] * 7 + ["last"], (
        "line ends of Java stay within their caption"
    )


@needs_java
def test_meteor_equals_the_toolkits_class() -> None:
    case = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"][0]
    # '|||' separates the fields of METEOR's input; the toolkit takes it out of captions but not of references.
    references = {**case["references"], "5": ["a ||| café in the park"]}
    values, counts = toolkit.meteor(case["captions"], references)
    assert values == {"METEOR": (case["score"], case["per_image"])}
    of_sums = meteor_of_sums(counts.sum(axis=0, keepdims=True), len(counts))[0, 0]
    assert of_sums == pytest.approx(case["score"], rel=1e-12), (
        "METEOR of a set is a function of its sums"
    )


def jars(folder: Path, name: str) -> Path:
    folder.mkdir()
    for end in ("", "-models"):
        (folder / f"{name}{end}.jar").touch()
    return folder


@pytest.fixture
def spice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in) -> Path:
    """A ``java`` that writes the scores in ``answer.json`` as SPICE does, and jars with the names that SPICE needs."""
    values = {"1": 0.5, "2": 0.25, "3": 0.0, "4": 1.0}
    items = [{"image_id": key, "scores": {"All": {"f": value}}} for key, value in values.items()]
    (tmp_path / "answer.json").write_text(json.dumps(items))
    copy = f'while [ "$1" != -out ]; do shift; done; /bin/cat "{tmp_path}/answer.json" > "$2"'
    stand_in(f'{VERSION}\npwd > "{tmp_path}/folder"; {copy}')
    jars(tmp_path / "lib", "corenlp")
    monkeypatch.setattr("pycocoevalcap.spice.get_stanford_models.JAR", "corenlp")
    monkeypatch.setattr(toolkit, "_folder", lambda module: tmp_path)
    return tmp_path


def by_spice(**options: object):
    return evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none", **options)


@posix
def test_spice_scores_are_read(spice: Path) -> None:
    for options in ({}, {"spice_jars": jars(spice / "jars", "corenlp")}):
        evaluation = by_spice(**options)
        assert evaluation.metrics["SPICE"] == 0.4375
        assert [evaluation.per_image[key]["SPICE"] for key in "1234"] == [0.5, 0.25, 0.0, 1.0]
        scratch = Path((spice / "folder").read_text().strip())
        assert scratch.name.startswith("spice-")
        assert not scratch.exists(), "the temporary folder is gone"


@posix
def test_spice_without_a_score_is_left_out(spice: Path) -> None:
    for answer, reason in (
        ('[{"image_id": "1"}]', "KeyError: 'scores'"),
        ('[{"image_id": "1", "scores": {"All": {"f": NaN}}}]', "SPICE gave nan for image '1'"),
        ("[]", "SPICE gave None for image '1'"),
    ):
        (spice / "answer.json").write_text(answer)
        evaluation = by_spice()
        assert reason in evaluation.left_out["SPICE"]
        assert "SPICE" not in evaluation.metrics


@posix
def test_spice_without_its_jars_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stand_in
) -> None:
    stand_in(VERSION)
    monkeypatch.setattr("pycocoevalcap.spice.get_stanford_models.JAR", "absent")
    for options, where in (
        ({}, "its folder"),
        ({"spice_jars": tmp_path}, rf"the folder '{tmp_path}' \(spice_jars\)"),
    ):
        assert re.search(
            rf"absent\.jar, and it is not in {where}", by_spice(**options).left_out["SPICE"]
        )


def test_the_command_line_of_spice(tmp_path: Path) -> None:
    own = jars(tmp_path / "my jars", "stanford-corenlp-3.6.0")
    line = toolkit.spice_arguments(tmp_path, own, "17.0.15")
    opening = [
        f"--add-opens=java.base/java.{name}=ALL-UNNAMED"
        for name in ("lang", "math", "net", "text", "util")
    ]
    assert set(opening) < set(line)
    assert not set(opening) & set(toolkit.spice_arguments(tmp_path, own, "1.8.0_412")), (
        "Java 8 does not know them"
    )
    assert (line[0], line[-3], line[-1]) == ("-Xmx8G", "-cp", "edu.anu.spice.SpiceScorer")
    names = [str(own / f"stanford-corenlp-3.6.0{end}.jar") for end in ("", "-models")]
    assert line[-2].split(os.pathsep) == [
        str(tmp_path / "spice-1.0.jar"),
        *names,
        str(tmp_path / "lib" / "*"),
    ]
