"""Growing captions, agreement by length, hubness, and the program that prints all of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.studies.specificity_report import (
    CaptionLength,
    GrownCaption,
    SpecificityStudy,
    grown_captions,
    hubness,
    tau_by_length,
)
from benchmarks.studies.specificity_study import exported
from rewards.clip.backbone import load_backbone
from rewards.text.detail_units import detail_units, prefixes
from rl_caption.config.build import ConfigError
from rl_caption.data.base import DataError
from rl_caption.data.scenes import ScenesData, oracle
from rl_caption.meta_evaluation.specificity import make_chains
from rl_caption.reward_models.encoders import random_clip, save_clip
from rl_caption.reward_models.triplets import Donor
from tests.clip_for_tests import tiny_student
from tests.reward_models_for_tests import CLIP

REPOSITORY = Path(__file__).resolve().parents[2]
SCENES = {"num_train": 0, "num_val": 0, "num_test": 14, "num_unseen": 0, "image_size": 32}
ROWS = list(ScenesData(**SCENES).split("test"))
CAPTIONS = [row["long_reference"] for row in ROWS]


def test_chains_are_prefixes_and_units_of_other_images():
    chains = make_chains(CAPTIONS)
    assert make_chains(CAPTIONS, seed=1) != chains
    for caption, chain in zip(CAPTIONS, chains, strict=True):
        assert chain is not None
        assert list(chain.captions) == prefixes(detail_units(caption))
        assert len(chain.negatives) == len(chain.captions) - 1
        for base, positive, negative in zip(chain.captions, chain.captions[1:], chain.negatives, strict=False):
            assert negative.startswith(base)
            assert negative not in (base, positive)


def test_chains_end_where_no_other_image_has_a_unit():
    long = "A dog runs and a cat sits. The sky is blue."
    assert make_chains([long, long]) == [None, None]
    assert make_chains(["A dog."], donors=[Donor("b", ["a cat"])]) == [None]
    (chain,) = make_chains([long], donors=[Donor("b", ["A bus"])])
    assert chain is not None
    assert all(negative == f"{base} A bus" for base, negative in zip(chain.captions, chain.negatives, strict=False))
    (chain,) = make_chains([long], donors=[Donor("b", ["x", detail_units(long)[1], "blue sky the is"])])
    assert chain is None  # the second unit is the true one
    with pytest.raises(ValueError, match="1 image ids for 2 captions"):
        make_chains([long, long], image_ids=["a"])


def test_grown_captions_are_judged_once_by_the_oracle():
    found = grown_captions(ROWS, make_chains(CAPTIONS))
    assert len({(caption.row, caption.text) for caption in found}) == len(found)
    assert {caption.source for caption in found} == {"prefix", "unit of another scene", "hard negative"}
    for caption in found[::7]:
        judged = oracle(caption.text, ROWS[caption.row]["scene"])
        assert (caption.f1, caption.precision) == (judged.f1, judged.precision)
        assert caption.words == len(caption.text.split())
    with pytest.raises(DataError, match="'x' has no scene"):
        grown_captions([{"image_id": "x"}], [None])  # type: ignore[list-item]


def caption(row, words, f1):
    return GrownCaption(row, "", "prefix", words, f1, 1.0)


def test_tau_by_length_by_hand():
    # Two bins. In the first, pairs 01 C, 02 D, 12 D; scene 0 has 01, scene 1 has one caption. The second is empty.
    captions = [caption(0, 3, 0.1), caption(0, 9, 0.2), caption(1, 4, 0.3), caption(1, 30, 0.4)]
    first, second, third, whole = tau_by_length([2, 3, 1, 4], captions, (0, 10, 30))
    assert (first.low, first.high, first.captions) == (0, 9, 3)
    assert first.tau_b == pytest.approx(-1 / 3)
    assert (first.within_scene_tau_b, first.scenes) == (1, 1)
    assert (second.captions, second.tau_b, second.within_scene_tau_b) == (0, None, None)
    assert (third.low, third.high, third.captions, third.tau_b) == (30, None, 1, None)
    # All pairs: 01 C, 02 D, 03 C, 12 D, 13 C, 23 C.
    assert (whole.captions, whole.tau_b) == (4, pytest.approx(2 / 6))
    assert tau_by_length([1, 1, 1, 1], captions, (0,))[0].tau_b is None
    with pytest.raises(ValueError, match=r"edges = \[0, 0\]: expected increasing"):
        tau_by_length([2, 3, 1, 4], captions, (0, 0))
    with pytest.raises(ValueError, match="1 scores for 4 captions"):
        tau_by_length([1], captions)


def test_hubness_by_hand():
    # Candidate 0 is nearest to every query, candidate 1 to none, candidate 2 second to all.
    queries = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.1, 0.5], [2.0, 0.0, 0.4]])
    candidates = torch.tensor([[3.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.2, 0.0, 1.0]])
    # Occurrences 3, 0, 0: mean 1, deviations 2 -1 -1, third moment 6/3, variance 6/3.
    assert hubness(queries, candidates, 1) == pytest.approx((2 / 2**1.5, 2 / 3, 1))
    even = hubness(torch.eye(3), torch.eye(3), 1)
    assert even == (0, 0, pytest.approx(1 / 3))
    assert hubness(queries, candidates, 2, chunk_size=1) == hubness(queries, candidates, 2)
    with pytest.raises(ValueError, match="k = 3 with 3 candidates"):
        hubness(queries, candidates, 3)
    with pytest.raises(ValueError, match="expected"):
        hubness(queries, torch.ones(3, 2), 1)


def test_a_metric_of_length_has_every_step_up_and_no_negative_below(tmp_path):
    study = SpecificityStudy(ROWS)
    study.judge_metric("words", CaptionLength())
    words = study.metrics["words"]
    assert (words.rates.positive, words.rates.negative) == (1, 0)
    assert words.released is None
    study.judge_model("tiny", load_backbone(str(tiny_student(tmp_path / "student")), device="cpu"))
    tiny = study.metrics["specs of tiny"].rates
    assert tiny.steps == words.rates.steps
    assert 0 <= tiny.positive <= 1
    assert set(study.models["tiny"].long) == {f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)}
    with pytest.raises(DataError, match="has no long_reference"):
        SpecificityStudy([{**ROWS[0], "long_reference": None}])  # type: ignore[typeddict-item]


def test_the_program(tmp_path):
    models = [f"{label}={tiny_student(tmp_path / label)}" for label in ("before", "after")]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"format": "scenes", "kwargs": SCENES}}))
    command = [
        sys.executable,
        "-m",
        "benchmarks.studies.specificity_study",
        "--data",
        str(config),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--models", *models, "--device", "cpu", "--max-images", "12"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "specificity.md").read_text() in done.stdout
    content = json.loads((tmp_path / "out" / "specificity.json").read_text())
    assert list(content["metrics"]) == ["words", "cider", "rouge_l", "specs of before", "specs of after"]
    assert content["metrics"]["specs of before"]["rates"] == content["metrics"]["specs of after"]["rates"]
    assert list(content["models"]) == ["before", "after"]
    for name in ("SR_neg, %", "10 to 19", "image to text R@1, %", "never near, %"):
        assert name in done.stdout


def test_a_run_is_judged_by_its_best_export_or_by_its_last_step(tmp_path):
    torch.manual_seed(0)
    run, step = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000004"
    best, shape = random_clip(None, CLIP)
    save_clip(best, shape, run / "export" / "best")
    last, _ = random_clip(None, CLIP)
    step.mkdir(parents=True)
    weights = {f"clip.{name}": value.clone() for name, value in last.state_dict().items()}
    save_file(weights, step / "model.safetensors")
    (step / "manifest.json").write_text("{}")
    labelled = exported([f"best={run}", f"last={run}@last", f"as is={run}/export/best"], tmp_path)
    folders = dict(item.split("=") for item in labelled)
    assert folders["best"] == folders["as is"] == str(run / "export" / "best")
    for label, model in (("best", best), ("last", last)):
        found = load_backbone(folders[label]).model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="is no finished run"):
        exported([f"last={tmp_path}@last"], tmp_path)
