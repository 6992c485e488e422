"""The benchmark of the evaluation compares what it says it compares. No time is asserted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import evaluation
from benchmarks.harness import Timing

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no java")


@pytest.mark.java
@needs_java
def test_generated_captions_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions, references = evaluation.generated(3)
    (tmp_path / "predictions").mkdir()
    named = [{"image_name": name, "captions": texts} for name, texts in references.items()]
    (tmp_path / "refs.json").write_text(json.dumps(named))
    found = [{"image_name": name, "caption": text} for name, text in captions.items()]
    (tmp_path / "predictions" / "mine.json").write_text(json.dumps(found))
    (row,) = evaluation.measure(Timing(repeats=1), data=str(tmp_path))
    assert (row.name, row.baseline) == ("evaluation, mine", "pycocoevalcap with Java")
    assert "3 images, 6 scores equal to the bit" in row.detail
    monkeypatch.setattr(evaluation, "by_toolkit", lambda *_: {"BLEU-1": 0.5})
    assert evaluation.compare(captions, references, meteor=False) == "differ: BLEU-1"


def test_whole_commands_judge_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(evaluation, "run_command", lambda arguments: calls.append(list(arguments)))
    rows = evaluation.command_rows("mine", *evaluation.generated(3), Timing(repeats=1), tmp_path)
    assert [row.name for row in rows] == ["evaluate, mine", "evaluate --compare, mine", "score --reward cider, mine"]
    for ours, theirs in zip(calls[::2], calls[1::2], strict=True):
        files = {word for word in ours if word.endswith(".json")}
        assert files == {word for word in theirs if word.endswith(".json")}
        assert all(Path(file).is_file() for file in files)


def test_nothing_is_known_before_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    captions, references = evaluation.generated(2)
    evaluation.by_package(captions, references)
    known = evaluation._scan.cache_info().currsize
    monkeypatch.setattr(evaluation, "by_package", lambda *_: {"entries": float(evaluation._scan.cache_info().currsize)})
    assert known > 0
    assert evaluation.from_nothing(captions, references) == {"entries": 0}


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refs.json").write_text(json.dumps([{"image_name": "a", "captions": ["a dog"]}]))
    with pytest.raises(SystemExit, match=r"no theirs\.json"):
        evaluation.systems_of(tmp_path, "theirs", images=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs Java: no Java runtime"):
        list(evaluation.measure(Timing()))
