"""Studies of reward models and of specificity: agreement with the oracle, by length, hubness, and the programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.studies.encoder_report import (
    RememberingEncoder,
    Report,
    agreement,
    judge_model,
    reference_metrics,
    scores_agreement,
)
from benchmarks.studies.reward_models import data_section, loaded
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
from rewards.clip.clipscore import ClipScore, RefClipScore
from rl_caption.config.build import ConfigError
from rl_caption.data.base import DataError
from rl_caption.data.scenes import ScenesData, oracle
from rl_caption.meta_evaluation.scenes import rate_captions
from rl_caption.meta_evaluation.specificity import make_chains
from rl_caption.reward_models.encoders import random_clip, save_clip
from tests.captioners_for_tests import tiny_captioner
from tests.clip_for_tests import noise_image, tiny_student
from tests.reward_models_for_tests import CLIP

REPOSITORY = Path(__file__).resolve().parents[2]
SCENES = {"num_train": 0, "num_val": 0, "num_test": 14, "num_unseen": 0, "image_size": 32}


def scenes(**changes):
    return list(ScenesData(**{**SCENES, **changes}).split("test"))


ROWS = scenes()
CAPTIONS = [row["long_reference"] for row in ROWS]


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


def test_the_specificity_program(tmp_path):
    models = [f"{label}={tiny_student(tmp_path / label)}" for label in ("before", "after")]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"format": "scenes", "kwargs": SCENES}}))
    command = [sys.executable, "-m", "benchmarks.studies.specificity_study", "--data", str(config)]
    command += ["--out", str(tmp_path / "out"), "--models", *models, "--device", "cpu", "--max-images", "12"]
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


def test_the_truth_agrees_with_itself_and_its_opposite_does_not():
    judged = rate_captions(scenes(num_test=12), {"sample at 1": [["a red circle and a dog"]] * 12})
    f1 = [caption.f1 for caption in judged.captions]
    same = scores_agreement(f1, judged)
    assert (same.tau_b, same.within_image_tau_b) == (pytest.approx(1), pytest.approx(1))
    assert same.tau_c == pytest.approx(1, abs=0.05)  # ties keep tau_c from 1
    expected = [f1[pair.correct] > f1[pair.wrong] for pair in judged.pairs]
    assert same.accuracy["all"] == pytest.approx(sum(expected) / len(expected))
    opposite = scores_agreement([-value for value in f1], judged)
    assert opposite.tau_b == pytest.approx(-1)
    assert opposite.within_image_tau_b == pytest.approx(-1)
    assert opposite.accuracy["all"] == pytest.approx(1 - same.accuracy["all"], abs=0.05)
    assert opposite.accuracy["replace_object"] == 0


def test_a_metric_without_order_gets_no_number():
    judged = rate_captions(scenes(num_test=12), {})
    found = scores_agreement([0.5] * len(judged.captions), judged)
    assert (found.tau_b, found.tau_c) == (None, None)
    assert found.notes == [
        f"over all captions: all {len(judged.captions)} scores are 0.5: Kendall's tau is not defined"
    ]
    assert (found.within_image_tau_b, found.constant_images, found.images) == (0, 12, 12)
    assert set(found.accuracy.values()) == {0}
    assert "| flat | – | – | 0.0 | 12 of 12 |" in Report("test", 12, 60, {}, {"flat": found}).markdown(judged)


def test_ngram_metrics_agree_with_the_oracle_better_than_chance():
    judged = rate_captions(scenes(num_test=40), {})
    metrics = reference_metrics(["cider", "bleu", "rouge_l"])
    assert list(metrics) == ["cider", "bleu4", "rouge_l"]
    assert metrics["cider"].signature.startswith("NO<EOS>_w/oInit")
    for metric in metrics.values():
        found = agreement(metric, judged)
        assert found.tau_b > 0.1
        assert found.accuracy["all"] > 0.6
    with pytest.raises(ValueError, match="metric 'clipscore' needs image"):
        reference_metrics([f"{__name__}:NeedsImages"])


class NeedsImages:
    __name__ = "clipscore"
    columns = frozenset({"image"})
    bounds = (0.0, 1.0)
    signature = "needs images"

    def __call__(self, prompts, completions, **columns):
        return [0.0] * len(completions)


class Counting:
    """A dual encoder that counts what it embeds."""

    def __init__(self, encoder):
        self.encoder, self.images, self.texts = encoder, [], []
        self.fingerprint, self.signature = encoder.fingerprint, encoder.signature
        self.context_length, self.name, self.num_parameters = 77, "folder", 7

    def encode_images(self, images):
        self.images += list(images)
        return self.encoder.encode_images(images)

    def encode_texts(self, texts):
        self.texts += list(texts)
        return self.encoder.encode_texts(texts)


def test_a_model_is_judged_with_every_image_and_text_embedded_once(tmp_path):
    backbone = load_backbone(str(tiny_student(tmp_path / "student")))
    rows = scenes(num_test=12)
    judged = rate_captions(rows, {})
    counting, report = Counting(backbone), Report("test", 12, 60)
    judge_model(report, "tiny", counting, rows, judged)
    assert len(counting.images) == 12
    assert len(counting.texts) == len(set(counting.texts))
    texts = [caption.text for caption in judged.captions]
    for name, plain_reward in (("clipscore", ClipScore), ("ref_clipscore", RefClipScore)):
        expected = plain_reward(backbone, prefix="")(None, texts, **judged.columns())
        assert report.metrics[f"{name} of tiny"] == scores_agreement(
            expected, judged, report.metrics[f"{name} of tiny"].signature
        )
    assert set(report.models["tiny"].retrieval) == {f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)}


def test_remembering_distinguishes_images_as_objects_and_paths(tmp_path):
    encoder = RememberingEncoder(load_backbone(str(tiny_student(tmp_path / "student"))))
    path = tmp_path / "a.png"
    noise_image(1).save(path)
    images = [noise_image(0), path, str(path), noise_image(2)]
    assert torch.equal(encoder.encode_images(images), encoder.encode_images(images))
    assert len(encoder._images) == 3
    assert encoder.encode_images(images)[0] == pytest.approx(encoder.encoder.encode_images(images[:1])[0], abs=1e-6)


def test_the_reward_models_program(tmp_path):
    tiny_student(tmp_path / "student")
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "captioner")
    config = tmp_path / "config.yaml"
    content = {"data": {"format": "scenes", "kwargs": SCENES}, "rollout": {"num_samples": 2}}
    config.write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "benchmarks.studies.reward_models", "--data", str(config), "--out", str(out),
        "--models", f"tiny={tmp_path / 'student'}", "--captioner", str(tmp_path / "captioner"),
        "--temperatures", "0.5", "1", "--max-new-tokens", "8", "--device", "cpu", "--max-images", "10",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["reward_models.json", "reward_models.md"]
    assert (out / "reward_models.md").read_text() in done.stdout
    content = json.loads((out / "reward_models.json").read_text())
    assert list(content["metrics"]) == ["cider", "bleu4", "rouge_l", "clipscore of tiny", "ref_clipscore of tiny"]
    assert content["models"]["tiny"]["parameters"] == load_backbone(str(tmp_path / "student")).num_parameters
    assert content["images"] == 10
    for source in ("reference", "sample at 0.5", "sample at 1", "hard negative"):
        assert f"| {source} |" in done.stdout


def test_the_reward_models_program_refuses_wrong_arguments_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"--models tiny=.*nowhere: expected LABEL=FOLDER"):
        loaded([f"tiny={tmp_path / 'nowhere'}"], "cpu")
    with pytest.raises(ConfigError, match=r"--models empty: backbone .* cannot be loaded"):
        loaded([f"empty={tmp_path}"], "cpu")
    config = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=r"--data .*config.yaml cannot be read: No such file"):
        data_section(config)
    config.write_text("rollout: {num_samples: 2}")
    with pytest.raises(ConfigError, match="has no section 'data'"):
        data_section(config)
