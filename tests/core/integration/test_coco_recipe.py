"""The shipped COCO configurations, as they stand, on a tiny COCO: only sizes are changed."""

import json
import shutil
from pathlib import Path

import pytest

from rl_caption.cli.main import run_program
from rl_caption.config.commands import ScoreConfig
from rl_caption.data.base import DataError
from rl_caption.data.prepare_coco import prepare
from rl_caption.programs.score import score_files
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import tiny_student
from tests.coco_for_tests import write_downloads, write_features, write_photos
from tests.training_for_tests import lines, run_arguments, write_stage

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
SHAPE = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_heads": 2,
    "ffn_dim": 32,
}
XE_SIZES = [
    word
    for key, value in SHAPE.items()
    for word in (f"--model.kwargs.{key}", str(value))
]
SMALL = ["--train.threads", "1", "--train.epochs", "3", "--data.num_workers"]


def start(program: str, config: str, *overrides: str) -> str:
    """Run ``python -m rl_caption PROGRAM --config CONFIG`` in the working directory and
    return its output.
    """
    ended = run_arguments(
        [program, "--config", config, *overrides],
        Path(f"{config}.log").absolute(),
    )
    assert ended.code == 0, ended.output
    return ended.output


def test_the_recipe_of_the_paper_runs_from_downloads_to_scores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(REPOSITORY / "configs")
    photos, features = write_photos(Path("photos")), write_features(Path("regions"))
    coco = write_downloads(Path("data/coco").absolute())
    (coco / "images").symlink_to(photos.absolute())
    (coco / "features").symlink_to(features.absolute())
    prepare(coco, subset=True)
    student = Path("runs/lclip/dual/export/best")
    student.parent.mkdir(parents=True)
    tiny_student(student)
    Path("runs/lclip/dual/result.json").write_text("{}")

    start(
        "xe",
        "coco_transformer_bu_xe",
        *XE_SIZES,
        *SMALL,
        "1",
        "--model.min_count",
        "1",
        "--train.decay_epochs",
        "1",
    )
    rates = [
        line["train/lr"]
        for line in lines(Path("runs/coco/bu_xe"))
        if "train/lr" in line
    ]
    assert rates[-1] == pytest.approx(5e-4 * 0.8**2), (
        "one step an epoch, a decay an epoch"
    )
    write_stage("coco", "mix", Path("mix.yaml"))
    start("scst", "mix.yaml", *SMALL, "0")
    logged = lines(Path("runs/coco/bu_scst_mix"))
    assert [line["step"] for line in logged if "loss/total" in line][-1] == 3
    for term in ("cider", "ref_l_clipscore"):
        assert any(term in key for line in logged for key in line), (
            f"{term} is not logged"
        )
    model = ["--model", "runs/coco/bu_scst_mix/export/best"]
    output = start(
        "evaluate",
        "coco_evaluate",
        *model,
        "--metrics",
        "[cider,bleu]",
        "--tokenizer",
        "python",
    )
    assert "cider" in output.lower()
    predictions = json.loads(Path("runs/coco/evaluation/predictions.json").read_text())
    assert [row["image_id"] for row in predictions] == [114, 115, 116, 117]

    scores = json.loads(Path("runs/coco/evaluation/scores.json").read_text())["metrics"]
    again = score_files(
        ScoreConfig(
            reward="cider",
            captions="runs/coco/evaluation/predictions.json",
            references="data/coco/dataset_coco.json",
            split="test",
        )
    )
    assert again["mean"] == pytest.approx(scores["CIDEr"], rel=1e-12), (
        "the references that were prepared"
    )

    photo = next(Path("photos/train2014").iterdir())
    photo.unlink()
    mix = [
        "--config",
        "mix.yaml",
        "--run.dir",
        "runs/other",
        *SMALL,
        "0",
    ]
    with pytest.raises(DataError, match=rf"1 of 14.*{photo.name}"):
        run_program("scst", mix)
    shutil.rmtree("runs/coco")
    Path("two.yaml").write_text("stages: {xe: coco_transformer_bu_xe, scst: mix.yaml}")
    with pytest.raises(ConfigError, match=rf"1 (of 14|missing).*{photo.name}"):
        run_program("run", ["two.yaml"])
    assert not Path("runs/coco/bu_xe").exists(), (
        "found only after the captioner had been trained"
    )
