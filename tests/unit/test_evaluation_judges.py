"""Rewards as metrics of the evaluation program."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from rewards.base import RewardError
from rewards.clip.l_clipscore import LClipScore
from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.results import evaluate_captioner
from rl_caption.cli import evaluate as program
from rl_caption.cli.evaluate import compare_systems, evaluate_split, judge, metric_names
from rl_caption.cli.main import parse
from rl_caption.config.build import ConfigError
from rl_caption.config.schema import DataConfig, EvaluateConfig, JudgeConfig
from rl_caption.evaluation import EvaluationError
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.clip_for_tests import tiny_student

CAPTIONS = {"image-0": "a red circle", "image-2": "a dog runs on the tracks", "image-1": "squares"}


class Failing:
    """A reward that fails."""

    __name__, columns, bounds, signature = "failing", frozenset(), (0.0, 1.0), "failing"

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise RewardError("no score today")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images of a test split, captions of three of them, a file of references, a captioner and a student."""
    rows = tiny_rows()
    with (tmp_path / "data.jsonl").open("w") as file:
        for row in rows:
            row["image"].resize((40, 36)).save(tmp_path / f"{row['image_id']}.png")
            line = {"image": f"{row['image_id']}.png", "image_id": row["image_id"], "references": row["references"]}
            file.write(json.dumps(line | {"split": "test"}) + "\n")
    (tmp_path / "references.json").write_text(json.dumps({row["image_id"]: row["references"] for row in rows}))
    predictions = [{"image_id": image_id, "caption": caption} for image_id, caption in CAPTIONS.items()]
    (tmp_path / "captions.json").write_text(json.dumps(predictions))
    tiny_student(tmp_path / "student")
    return tmp_path


def configuration(folder: Path, **changes: Any) -> EvaluateConfig:
    config = EvaluateConfig(
        predictions=str(folder / "captions.json"),
        data=DataConfig(format="jsonl", path=str(folder / "data.jsonl")),
        metrics=["cider"],
        tokenizer="python",
        judges={"L-CLIPS": JudgeConfig("l_clipscore", {"backbone": str(folder / "student")})},
        out=str(folder / "out"),
    )
    return replace(config, **changes)


def test_a_judge_is_a_metric_with_its_range_and_signature(folder: Path) -> None:
    table = evaluate_split(configuration(folder, judges=configuration(folder).judges | {"rouge_l": JudgeConfig()}))
    reward = LClipScore(folder / "student")
    # One caption at a time, opened here: neither batches nor the rows' order may matter.
    alone = [reward(None, [text], image=[Image.open(folder / f"{name}.png")])[0] for name, text in CAPTIONS.items()]
    written = json.loads((folder / "out/scores.json").read_text())
    mean = written["metrics"]["judge/L-CLIPS"]
    assert mean == pytest.approx(math.fsum(alone) / 3, rel=1e-6)
    assert mean > 0
    assert 0 < written["metrics"]["judge/rouge_l"] < 1
    assert f"+judge/L-CLIPS[{reward.signature}]+judge/rouge_l[" in written["signature"]
    assert "ids:3 of 4" in written["signature"], "the judges change nothing about the references"
    low, high = written["intervals"]["judge/L-CLIPS"]
    assert min(alone) - 1e-6 <= low <= mean <= high <= max(alone) + 1e-6, "judges have intervals, too"
    lines = [" ".join(line.split()) for line in table.splitlines()]
    heading = next(index for index, line in enumerate(lines) if "L-CLIPS, 0 to 2.5 rouge_l, 0 to 1" in line)
    assert lines[heading + 3].startswith(f"{low:.4f} to {high:.4f}")
    assert lines[heading + 2].split()[:3] == ["captions", "3", f"{mean:.4f}"]


def test_scores_of_each_image_are_kept(folder: Path) -> None:
    found = judge(configuration(folder))
    assert found is not None
    evaluation, _ = found
    scores = [evaluation.per_image[image_id]["judge/L-CLIPS"] for image_id in CAPTIONS]
    assert evaluation.metrics["judge/L-CLIPS"] == pytest.approx(math.fsum(scores) / 3)
    assert len(set(scores)) == 3
    assert evaluation.bounds == {"judge/L-CLIPS": (0.0, 2.5)}
    assert "CIDEr" in evaluation.per_image["image-0"]


def test_captions_of_a_model_are_judged(folder: Path) -> None:
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, folder / "model")
    found = judge(configuration(folder, predictions=None, model=str(folder / "model")))
    assert found is not None
    evaluation, captions = found
    images = [str(folder / f"{name}.png") for name in captions]
    scores = LClipScore(folder / "student")(None, list(captions.values()), image=images)
    assert evaluation.metrics["judge/L-CLIPS"] == pytest.approx(math.fsum(scores) / 4, rel=1e-6)


def test_cider_as_a_judge_is_that_of_the_toolkit(folder: Path) -> None:
    """Where all images have captions: document frequencies of the split, no EOS."""
    predictions = [{"image_id": f"image-{i}", "caption": f"a red circle {i}"} for i in range(4)]
    (folder / "captions.json").write_text(json.dumps(predictions))
    for references in (None, str(folder / "references.json")):
        found = judge(configuration(folder, judges={"cider": JudgeConfig()}, references=references))
        assert found is not None
        metrics = found[0].metrics
        assert metrics["judge/cider"] == pytest.approx(metrics["CIDEr"], rel=1e-12)
        assert metrics["CIDEr"] > 0


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("this takes long, and the mistake could be known")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"judges": {"rogue_l": JudgeConfig()}}, ConfigError, r"^judges\.rogue_l: .* Did you mean 'rouge_l'"),
        (
            {"judges": {"L": JudgeConfig("l_clipscore", {"backbone": "nowhere"})}},
            ConfigError,
            r"^judges\.L: student folder 'nowhere'",
        ),
        (
            {"references": "references.json"},
            EvaluationError,
            r"^judges\.L-CLIPS: the reward 'l_clipscore' looks at images, and a file of references .*has none",
        ),
        (
            {"data": DataConfig(format="jsonl", image_root="elsewhere")},
            EvaluationError,
            r"^judges\.L-CLIPS: .* and 3 of 3 of split 'test' are not there, such as '.*image-0.png'",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_scored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(program, "evaluate_captions", refuse)
    if "references" in changes:
        changes = {"references": str(folder / changes["references"])}
    if "data" in changes:
        changes = {"data": replace(changes["data"], path=str(folder / "data.jsonl"))}
    with pytest.raises(error, match=words):
        judge(configuration(folder, **changes))


def test_mistakes_are_found_before_a_model_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_decode", refuse)
    with pytest.raises(ConfigError, match=r"^judges\.rogue_l"):
        judge(configuration(folder, predictions=None, model="model", judges={"rogue_l": JudgeConfig()}))


def test_a_failing_judge_is_named(folder: Path) -> None:
    with pytest.raises(RewardError, match=r"^judges\.mine: no score today"):
        judge(configuration(folder, judges={"mine": JudgeConfig(f"{__name__}:Failing")}))
    assert not (folder / "out/scores.json").exists()


def test_a_grid_keeps_scores_whose_signature_lacks_the_judges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were written before rewards were metrics of the evaluation."""
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, folder / "model")
    grid = AblateConfig(metrics=["cider"], tokenizer="python")
    judges = {"L-CLIPS": LClipScore(folder / "student")}
    arguments = (folder / "model", configuration(folder).data, 8, grid, judges, folder / "judged")
    first, captions = evaluate_captioner(*arguments)
    assert (folder / "judged/settings.json").is_file()
    scores = json.loads((folder / "judged/scores.json").read_text())
    end = f"+judge/L-CLIPS[{judges['L-CLIPS'].signature}]"
    assert scores["signature"].endswith(end)
    scores["signature"] = scores["signature"].removesuffix(end)
    (folder / "judged/scores.json").write_text(json.dumps(scores))
    monkeypatch.setattr("rl_caption.ablation.results.judge", refuse)
    kept, same = evaluate_captioner(*arguments)
    assert (kept.metrics, kept.signature, kept.bounds, same) == (
        first.metrics,
        first.signature,
        first.bounds,
        captions,
    )
    judges["L-CLIPS"] = SimpleNamespace(signature="other")
    with pytest.raises(AssertionError, match="takes long"):
        evaluate_captioner(*arguments)


def test_bad_settings_are_refused_before_anything_is_judged(folder: Path) -> None:
    with pytest.raises(ConfigError, match="bootstrap is -1"):
        judge(configuration(folder, bootstrap=-1))
    with pytest.raises(ConfigError, match="spice_jars 'nowhere' is not a folder"):
        judge(configuration(folder, spice_jars="nowhere"))
    with pytest.raises(ConfigError, match=r"compare names two files of captions, got \['a'\]"):
        compare_systems(configuration(folder, predictions=None, compare=["a"]))
    assert not (folder / "out").exists()


@pytest.mark.parametrize("given", ["[cider,bleu]", "cider,bleu", '["cider", "bleu"]', "cider, bleu"])
def test_metrics_are_a_list_or_names_with_commas(given: str) -> None:
    assert metric_names(parse(EvaluateConfig, ["--metrics", given], "evaluate.py").metrics) == ["cider", "bleu"]
