"""retrieval: dual encoders side by side, from the command line to the tables."""

import json

import pytest

from rewards.clip.backbone import load_frozen_encoder
from rewards.files import load_json
from rl_caption.cli.main import main
from rl_caption.data.scenes import ScenesData
from rl_caption.evaluation.retrieval import retrieval_recall
from tests.clip_for_tests import tiny_student

SCENES = {"num_train": 0, "num_val": 0, "num_test": 12, "num_unseen": 0}


def test_models_side_by_side_on_short_and_long_captions(tmp_path, capsys):
    words = ["--bootstrap", "50", "--out", str(tmp_path)]
    words += ["--data.format", "scenes", "--data.kwargs", json.dumps(SCENES)]
    for name in ("one", "two"):
        words += [f"--models.{name}.backbone", str(tiny_student(tmp_path / name))]
    assert main(["retrieval", *words]) == 0
    assert (tmp_path / "retrieval.md").read_text() in capsys.readouterr().out
    found = load_json(tmp_path / "retrieval.json")["results"]
    results = {(one["model"], one["texts"]): one for one in found}
    backbone = load_frozen_encoder(str(tmp_path / "one"))
    rows = list(ScenesData(**SCENES)["test"])
    images = backbone.encode_images([row["image"] for row in rows]).numpy()
    references = [text for row in rows for text in row["references"]]
    long = [row["long_reference"] for row in rows]
    owners = [number // 5 for number in range(60)]
    for kind, texts, own in (
        ("references", references, owners),
        ("long", long, range(12)),
    ):
        recalls = results["one", kind]["recall"]
        assert recalls == results["two", kind]["recall"], "of equal weights"
        expected = retrieval_recall(images, backbone.encode_texts(texts).numpy(), own)
        values = [value for value, _, _ in recalls.values()]
        assert values == pytest.approx(list(expected.values()))
        assert all(low <= value <= high for value, low, high in recalls.values())
    assert results["one", "long"]["cut"] > results["one", "references"]["cut"] == 0
