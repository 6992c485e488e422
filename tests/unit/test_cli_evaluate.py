"""The programs that judge captions in files: what they import, which images they judge, what they refuse and say."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rewards.base import RewardError
from rl_caption.cli.evaluate import compare_systems, evaluate_split, judge
from rl_caption.cli.main import main
from rl_caption.config.schema import EvaluateConfig, JudgeConfig
from rl_caption.data.base import DataError
from rl_caption.evaluation import EvaluationError
from tests.captions_for_tests import CAPTIONS, REFERENCES

KARPATHY = {
    "images": [
        {"cocoid": int(key), "filename": f"{key}.jpg", "split": split, "sentences": [{"raw": text} for text in texts]}
        for (key, texts), split in zip(REFERENCES.items(), ("train", "val", "test", "test"), strict=True)
    ]
}


def predictions(captions: dict[str, str] = CAPTIONS, key: str = "image_id") -> list[dict[str, str]]:
    return [{key: image_id, "caption": text} for image_id, text in captions.items()]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Captions by two systems and their references."""
    contents = {
        "a": predictions(),
        "b": predictions({key: f"{text} there" for key, text in CAPTIONS.items()}),
        "references": REFERENCES,
        "karpathy": KARPATHY,
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return {name: str(tmp_path / f"{name}.json") for name in contents} | {"out": str(tmp_path / "out")}


def configured(files: dict[str, str], **changes: Any) -> EvaluateConfig:
    options = {"predictions": files["a"], "references": files["references"], "out": files["out"]}
    return EvaluateConfig(**{**options, "metrics": ["rouge", "cider"], "tokenizer": "python", "bootstrap": 2} | changes)


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--predictions", "a", "--references", "references", "--metrics", "bleu,cider", "--out", "out"],
        ["evaluate", "--compare", "a", "b", "--references", "references", "--metrics", "cider", "--out", "out"],
        ["evaluate", "--predictions", "a", "--references", "absent", "--out", "out"],
        ["score", "--reward", "cider", "--captions", "a", "--references", "references"],
        ["score", "--reward", "cider", "--captions", "a", "--references", "absent"],
    ],
)  # fmt: skip
def test_files_are_judged_without_torch(words: list[str], files: dict[str, str], tmp_path: Path) -> None:
    words = [files.get(word, word) for word in words]
    code = (
        "import atexit, sys; from rl_caption.cli.main import main\n"
        "heavy = {'torch', 'transformers', 'accelerate'}\n"
        "atexit.register(lambda: print('imported', *sorted(heavy & set(sys.modules))))\n"
        f"sys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ("absent" in words), done.stderr
    assert done.stdout.splitlines()[-1] == "imported"


# which images


def scored(config: EvaluateConfig) -> tuple[int, dict[str, float]]:
    evaluate_split(config)
    scores = json.loads((Path(config.out) / "scores.json").read_text())
    return scores["n"], scores["metrics"]


@pytest.mark.parametrize("split", ["test", None])
def test_a_split_of_the_references_selects_the_images(
    split: str | None, files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    found = scored(configured(files, references=files["karpathy"], split=split))
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 of 4 captions" in warning
    Path(files["a"]).write_text(json.dumps(predictions({key: CAPTIONS[key] for key in ("3", "4")})))
    Path(files["references"]).write_text(json.dumps({key: REFERENCES[key] for key in ("3", "4")}))
    assert found == scored(configured(files))
    assert found[0] == 2


def test_captions_of_another_split_are_not_judged(files: dict[str, str]) -> None:
    Path(files["a"]).write_text(json.dumps(predictions({"1": CAPTIONS["1"]})))
    with pytest.raises(EvaluationError, match=r"a\.json has no caption of .*karpathy\.json.*--split"):
        judge(configured(files, references=files["karpathy"]))


def test_references_without_splits_refuse_a_split_that_is_named(files: dict[str, str]) -> None:
    assert judge(configured(files))
    for flat in (files["references"], files["karpathy"]):
        Path(files["karpathy"]).write_text(Path(files["karpathy"]).read_text().replace('"split"', '"other"'))
        with pytest.raises(DataError, match=r"json has no splits.*'test'|images\[0\]\.split is None"):
            judge(configured(files, references=flat, split="test"))


def test_images_without_a_caption_are_counted_and_named(
    files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    Path(files["a"]).write_text(json.dumps(predictions({key: CAPTIONS[key] for key in ("1", "3")})))
    judge(configured(files))
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "a.json has no caption of 2 of 4 images" in warning
    assert "'2', '4'" in warning


def test_a_model_does_not_take_references(files: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"references is '.*references\.json'"):
        judge(configured(files, predictions=None, model="nowhere"))


# formats


def test_names_and_gzip(files: dict[str, str], tmp_path: Path) -> None:
    expected = judge(configured(files))
    names = {f"{key}.jpg": text for key, text in CAPTIONS.items()}
    packed = tmp_path / "p.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(predictions(names, "image_name")).encode()))
    named = {f"{key}.jpg": texts for key, texts in REFERENCES.items()}
    Path(files["references"]).write_bytes(gzip.compress(json.dumps(named).encode()))
    found = judge(configured(files, predictions=str(packed)))
    assert expected is not None
    assert found is not None
    assert found[0].metrics == expected[0].metrics


def fill(pipe: int, content: bytes) -> None:
    with open(pipe, "wb") as file:
        file.write(content)


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="no /dev/fd")
@pytest.mark.parametrize("compared", [False, True])
def test_pipes_are_read_once(compared: bool, files: dict[str, str]) -> None:
    pipes = {}
    for name in ("a", "b", "references"):
        reading, writing = os.pipe()
        content = Path(files[name]).read_bytes()
        threading.Thread(target=fill, args=(writing, content)).start()
        pipes[name] = f"/dev/fd/{reading}"
    config = configured(files, references=pipes["references"], predictions=pipes["a"])
    if compared:
        config = configured(files, references=pipes["references"], predictions=None, compare=[pipes["a"], pipes["b"]])
        assert "difference" in compare_systems(config)
    else:
        assert scored(config) == scored(configured(files))


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a", '[{"image_id": 1, "caption": "x", "caption": "y"}]', ["'caption'"]),
        ("a", '[{"image_id": 1, "caption": "\\ud800"}]', ["[0].caption", "'\\ud800'"]),
        ("a", '[{"image_id": "\\ud800", "caption": "x"}]', ["[0].image_id", "'\\ud800'"]),
        ("a", '[{"image_id": 1, "caption": []}]', ["[0].caption", "[]"]),
        ("references", '{"1": ["x"], "2": ["y"], "1": ["z"]}', ["'1'"]),
        ("references", '{"1": ["x"], "2": [], "3": ["x"], "4": ["y"]}', ["1 of 4", "'2'", "empty"]),
        ("references", '{"1": ["x", "\\udfff"]}', ["'1'", "'\\udfff'"]),
        ("references", "[" * 100_000, ["nested"]),
        ("references", "7" * 5000, ["digits"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, text: str, parts: list[str], files: dict[str, str]) -> None:
    Path(files[name]).write_text(text)
    with pytest.raises(DataError) as raised:
        judge(configured(files))
    assert all(part in str(raised.value) for part in (files[name], *parts))


# what is not lost


class Failing:
    """Fails."""

    __name__, columns, bounds, signature = "failing", frozenset(), (0.0, 1.0), "failing"

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise RewardError("no score today")


def test_what_was_scored_is_printed_before_a_judge_fails(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    judges = {"rouge_l": JudgeConfig(), "mine": JudgeConfig(f"{__name__}:Failing")}
    with pytest.raises(RewardError, match=r"^judges\.mine"):
        evaluate_split(configured(files, judges=judges))
    printed = capsys.readouterr().out
    assert "CIDEr" in printed
    assert "rouge_l" in printed
    assert "mine" not in printed


def test_what_was_scored_is_printed_where_it_cannot_be_written(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_caption.evaluation.results.write_json", full)
    with pytest.raises(EvaluationError, match="No space left"):
        evaluate_split(configured(files))
    assert "CIDEr" in capsys.readouterr().out


# text that is tokenised already


def test_tokens_that_are_given_are_kept_as_they_are(files: dict[str, str]) -> None:
    """``A`` and ``-lrb-`` are not what the tokenizer would leave, and ``.`` is a token."""
    captions = {key: f"A {text} -lrb- ." for key, text in CAPTIONS.items()}
    references = {key: [f"A {text} -LRB- ." for text in texts] for key, texts in REFERENCES.items()}
    for name, content in (("a", predictions(captions)), ("b", predictions()), ("references", references)):
        Path(files[name]).write_text(json.dumps(content))
    words = [
        "--references",
        files["references"],
        "--metrics",
        "rouge,cider",
        "--tokenizer",
        "none",
        "--out",
        files["out"],
    ]
    assert main(["evaluate", "--predictions", files["a"], *words]) == 0
    scores = json.loads((Path(files["out"]) / "scores.json").read_text())
    assert "tokenizer:none" in scores["signature"]
    assert main(["evaluate", "--compare", files["a"], files["b"], *words]) == 0
    compared = json.loads((Path(files["out"]) / "a/scores.json").read_text())
    assert compared["metrics"] == scores["metrics"]
    again = judge(configured(files))
    assert again is not None
    assert again[0].metrics["ROUGE-L"] != scores["metrics"]["ROUGE-L"]


# progress


def test_progress_lines_are_true(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("PATH", "/nowhere")
    Path(files["a"]).write_text(json.dumps(predictions({"1": CAPTIONS["1"]})))
    judge(configured(files, metrics=["bleu", "meteor", "cider", "spice"]))
    lines = [record.message for record in caplog.records]
    for key in ("METEOR", "CIDEr", "SPICE"):
        assert [line.split(":")[0] for line in lines if key in line] == [f"{key} left out"]
    assert [line for line in lines if "BLEU-4" in line] == ["computed BLEU-1, BLEU-2, BLEU-3, BLEU-4 of 1 captions"]


def test_cider_of_images_that_have_the_same_references_is_left_out(files: dict[str, str]) -> None:
    Path(files["references"]).write_text(json.dumps({key: ["a dog runs", "a dog"] for key in REFERENCES}))
    found = judge(configured(files))
    assert found is not None
    assert "all 4 images" in found[0].left_out["CIDEr"]
    assert "ROUGE-L" in found[0].metrics
