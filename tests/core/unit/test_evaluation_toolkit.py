"""The toolkit's Java programs: its own classes in UTF-8, whatever is wrong with them as a reason."""

import os
import stat
from pathlib import Path

import pytest

from rewards.files import load_json
from rl_caption.data.files import write_json
from rl_caption.evaluation import (
    EvaluationError,
    JavaError,
    evaluate_captions,
    java_version,
    ptb_tokenize,
    toolkit,
)
from tests.captions_for_tests import CAPTIONS, REFERENCES, needs_java

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "karpathy_meteor.json"
posix = pytest.mark.skipif(
    os.name != "posix", reason="the stand-in for java is a shell script"
)
VERSION = (
    """[ "$1" = -version ] && { echo 'openjdk version "17.0.1" 2021' >&2; exit 0; }"""
)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put a shell script named ``java`` first on PATH."""

    def write(script):
        path = tmp_path / "java"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return path

    return write


def test_no_java_on_path_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match=r"'java'.*PATH"):
        java_version()
    evaluation = evaluate_captions(
        CAPTIONS, REFERENCES, metrics=("bleu", "meteor", "cider")
    )
    assert evaluation.left_out["METEOR"] == "no Java runtime: 'java' is not on PATH"
    assert set(evaluation.metrics) >= {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "CIDEr"}
    assert "METEOR" not in evaluation.metrics
    assert "tokenizer:PTB[corenlp3.4.1]" in evaluation.signature
    assert "+java" not in evaluation.signature
    with pytest.raises(EvaluationError, match=r"tokenizer 'java'.*Java runtime"):
        evaluate_captions(CAPTIONS, REFERENCES, metrics=("bleu",), tokenizer="java")


@posix
def test_a_placeholder_counts_as_no_java(stand_in):
    stand_in(VERSION)
    assert java_version() == "17.0.1"
    stand_in("echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    with pytest.raises(JavaError, match="status 1"):
        java_version()


@posix
def test_a_program_that_crashes_leaves_its_metric_out(stand_in):
    stand_in(f"{VERSION}\nread line; exit 9")
    evaluation = evaluate_captions(
        CAPTIONS, REFERENCES, metrics=("meteor", "rouge"), tokenizer="none"
    )
    assert "METEOR" not in evaluation.metrics
    assert "METEOR" in evaluation.left_out["METEOR"]
    assert "ROUGE-L" in evaluation.metrics


@needs_java
def test_tokens_equal_the_toolkits_tokenizer():
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


@pytest.mark.slow
@needs_java
def test_meteor_equals_the_toolkits_class():
    case = load_json(GOLDEN)["cases"][0]
    # '|||' separates the fields of METEOR's input; the toolkit takes it out of captions but not of references.
    references = {**case["references"], "5": ["a ||| café in the park"]}
    values, _ = toolkit.meteor(case["captions"], references)
    assert values == {"METEOR": (case["score"], case["per_image"])}


@pytest.fixture
def spice(tmp_path, monkeypatch, stand_in):
    """A ``java`` that writes the scores in ``answer.json`` as SPICE does, beside its parser's jars."""
    from pycocoevalcap.spice import spice as module

    values = {"1": 0.5, "2": 0.25, "3": 0.0, "4": 1.0}
    items = [
        {"image_id": key, "scores": {"All": {"f": value}}}
        for key, value in values.items()
    ]
    write_json(tmp_path / "answer.json", items)
    copy = f'while [ "$1" != -out ]; do shift; done; /bin/cat "{tmp_path}/answer.json" > "$2"'
    stand_in(f"{VERSION}\n{copy}")
    (tmp_path / "lib").mkdir()
    for end in ("", "-models"):
        (tmp_path / "lib" / f"corenlp{end}.jar").touch()
    monkeypatch.setattr("pycocoevalcap.spice.get_stanford_models.JAR", "corenlp")
    monkeypatch.setattr(
        "pycocoevalcap.spice.get_stanford_models.SPICEDIR", str(tmp_path)
    )
    monkeypatch.setattr(module, "__file__", str(tmp_path / "spice.py"))
    return tmp_path


def by_spice():
    return evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none")


@posix
def test_spice_scores_are_read(spice):
    evaluation = by_spice()
    assert evaluation.metrics["SPICE"] == 0.4375
    assert [evaluation.per_image[key]["SPICE"] for key in "1234"] == [
        0.5,
        0.25,
        0.0,
        1.0,
    ]


@posix
@pytest.mark.parametrize(
    "answer",
    ['[{"image_id": "1"}]', '[{"image_id": "1", "scores": {"All": {"f": NaN}}}]', "[]"],
)
def test_spice_without_a_score_is_left_out(spice, answer):
    (spice / "answer.json").write_text(answer)
    evaluation = by_spice()
    assert "SPICE" in evaluation.left_out
    assert "SPICE" not in evaluation.metrics


@posix
def test_spice_without_its_jars_is_left_out_and_nothing_is_fetched(spice):
    (spice / "lib/corenlp-models.jar").unlink()
    assert "corenlp-models.jar" in by_spice().left_out["SPICE"]
