"""Judged captions of generated scenes, agreement with the oracle, and the program that prints both."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.studies.encoder_report import (
    ModelReport,
    RememberingEncoder,
    Report,
    agreement,
    judge_model,
    reference_metrics,
    scores_agreement,
)
from benchmarks.studies.reward_models import data_section, loaded
from rewards.clip.backbone import load_backbone
from rewards.clip.clipscore import ClipScore, RefClipScore
from rewards.text.tokenize import tokenize
from rl_caption.config.build import ConfigError
from rl_caption.data.base import DataError
from rl_caption.data.scenes import ScenesData, hard_negatives, oracle
from rl_caption.meta_evaluation.scenes import rate_captions, sample_at_temperatures
from tests.captioners_for_tests import tiny_captioner
from tests.clip_for_tests import noise_image, tiny_student

REPOSITORY = Path(__file__).resolve().parents[2]
SCENES = {"num_train": 0, "num_val": 0, "num_test": 12, "num_unseen": 0, "image_size": 32}


def scenes(**changes):
    return list(ScenesData(**{**SCENES, **changes}).split("test"))


def plain(text):
    return " ".join(tokenize(text))


def test_every_caption_is_judged_once_and_by_the_oracle():
    rows = scenes()
    greedy = [[plain(row["references"][0]).upper()] for row in rows]
    judged = rate_captions(rows, {"greedy": greedy, "sample at 1": [["a red dog", "a red dog"]] * 12})
    assert Counter(caption.source for caption in judged.captions)["sample at 1"] == 12
    assert "greedy" not in {caption.source for caption in judged.captions}  # it repeats the references
    keys = [(caption.row, caption.text) for caption in judged.captions]
    assert len(set(keys)) == len(keys)
    for caption in judged.captions:
        assert caption.text == plain(caption.text)
        assert caption.f1 == oracle(caption.text, rows[caption.row]["scene"]).f1


@pytest.mark.parametrize("count", [1, 2])
def test_judged_references_are_hidden_from_metrics(count):
    rows = scenes()
    judged = rate_captions(rows, {}, judged_references=count)
    for number, row in enumerate(rows):
        own = [caption.text for caption in judged.captions if caption.row == number and caption.source == "reference"]
        assert own == list(dict.fromkeys(map(plain, row["references"][:count])))
        assert judged.references[number] == [text for text in row["references"] if plain(text) not in own]
        assert judged.references[number]
    columns = judged.columns()
    for caption, references in zip(judged.captions, columns["references"], strict=True):
        if caption.source == "reference":
            assert caption.text not in map(plain, references)
    assert columns["image_id"][-1] == rows[-1]["image_id"]


def test_a_reference_written_twice_is_hidden_twice():
    rows = scenes(num_test=1)
    first = rows[0]["references"][0]
    rows[0]["references"] = [first, f" {first.upper()} ", rows[0]["references"][1]]
    assert rate_captions(rows, {}).references == [rows[0]["references"][2:]]


def test_pairs_are_hard_negatives_of_the_judged_references():
    rows = scenes()
    judged = rate_captions(rows, {}, judged_references=2, seed=3)
    expected = [
        (plain(text), plain(negative), kind)
        for row in rows
        for text in row["references"][:2]
        for kind, negative in hard_negatives(row["scene"], text, 3)
    ]
    captions = judged.captions
    assert [(captions[p.correct].text, captions[p.wrong].text, p.kind) for p in judged.pairs] == expected
    assert all(captions[pair.correct].row == captions[pair.wrong].row for pair in judged.pairs)


def test_unusable_rows_are_named():
    rows = scenes(num_test=2)
    with pytest.raises(DataError, match="image 'test-000001' has 1 references and 1 of them are judged"):
        rate_captions([rows[0], {**rows[1], "references": rows[1]["references"][:1]}], {})
    with pytest.raises(DataError, match="image 'x' has no scene"):
        rate_captions([{"image_id": "x", "image": noise_image(0), "references": ["a", "b"]}], {})
    with pytest.raises(ValueError, match="'greedy' has captions for 1 images: expected 2"):
        rate_captions(rows, {"greedy": [["a"]]})
    with pytest.raises(ValueError, match="judged_references = 0"):
        rate_captions(rows, {}, judged_references=0)


def test_samples_do_not_depend_on_the_batch_and_differ_between_temperatures():
    rows, captioner = scenes(), tiny_captioner()
    found = sample_at_temperatures(captioner, rows, [0.5, 2.0], num_samples=2, max_new_tokens=8)
    assert {source: {len(texts) for texts in own} for source, own in found.items()} == {
        "greedy": {1}, "sample at 0.5": {2}, "sample at 2": {2},
    }  # fmt: skip
    assert all(len(own) == len(rows) for own in found.values())
    assert found == sample_at_temperatures(captioner, rows, [0.5, 2.0], 2, 8, batch_size=5)
    assert found["sample at 0.5"] != found["sample at 2"]
    with pytest.raises(ValueError, match="expected different ones"):
        sample_at_temperatures(captioner, rows, [1.0, 1.0])


def test_the_truth_agrees_with_itself_and_its_opposite_does_not():
    judged = rate_captions(scenes(), {"sample at 1": [["a red circle and a dog"]] * 12})
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
    judged = rate_captions(scenes(), {})
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
        reference_metrics(["tests.unit.test_judging_scenes:NeedsImages"])


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
    rows = scenes()
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


def test_remembering_tells_images_apart_as_objects_and_paths(tmp_path):
    encoder = RememberingEncoder(load_backbone(str(tiny_student(tmp_path / "student"))))
    path = tmp_path / "a.png"
    noise_image(1).save(path)
    images = [noise_image(0), path, str(path), noise_image(2)]
    assert torch.equal(encoder.encode_images(images), encoder.encode_images(images))
    assert len(encoder._images) == 3
    assert encoder.encode_images(images)[0] == pytest.approx(encoder.encoder.encode_images(images[:1])[0], abs=1e-6)
    assert encoder.encode_texts([]).shape == (0, 0)


def test_size_of_a_model():
    # The published student: 51,552,896 parameters of 4 bytes.
    assert ModelReport("folder", "signature", 51_552_896, {}).fp32_mib == pytest.approx(196.66, abs=0.005)


def test_the_program(tmp_path):
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


def test_the_program_refuses_wrong_arguments_by_name(tmp_path):
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
