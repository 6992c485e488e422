"""retrieval: dual encoders side by side, from the command line to the tables."""

import json

import pytest

from rewards.clip.backbone import load_frozen_encoder
from rewards.files import load_json
from rl_caption.cli.main import main
from rl_caption.data.scenes import ScenesData
from rl_caption.evaluation.retrieval import retrieval_recall
from tests.clip_for_tests import tiny_student

SCENES = {
    "num_train": 0,
    "num_val": 0,
    "num_test": 12,
    "num_unseen": 0,
    "image_size": 32,
}


def run(out, *words):
    assert main(["retrieval", "--bootstrap", "50", "--out", str(out), *words]) == 0
    found = load_json(out / "retrieval.json")
    return found


def test_models_side_by_side_on_short_and_long_captions(tmp_path, capsys, monkeypatch):
    folders = {name: str(tiny_student(tmp_path / name)) for name in ("one", "two")}
    models = [
        word
        for name, folder in folders.items()
        for word in (f"--models.{name}.backbone", folder)
    ]
    data = ["--data.format", "scenes", "--data.kwargs", json.dumps(SCENES)]
    found = run(tmp_path / "out", *models, *data)
    assert (tmp_path / "out/retrieval.md").read_text() in capsys.readouterr().out
    assert found["models"]["one"]["captions"] == found["models"]["two"]["captions"], (
        "of equal weights"
    )
    own, backbone = found["models"]["one"], load_frozen_encoder(folders["one"])
    assert own["parameters"] == sum(
        each.numel() for each in backbone.model.parameters()
    )
    rows = list(ScenesData(**SCENES).split("test"))
    images = backbone.encode_images([row["image"] for row in rows])
    references = [text for row in rows for text in row["references"]]
    columns = {
        "references": (references, [n // 5 for n in range(60)]),
        "long": ([row["long_reference"] for row in rows], range(12)),
    }
    for kind, (texts, owners) in columns.items():
        figures = own["captions"][kind]["figures"]
        recall = retrieval_recall(
            images.numpy(), backbone.encode_texts(texts).numpy(), list(owners)
        )
        assert {name: figures[name]["value"] for name in recall} == pytest.approx(
            recall
        )
        assert all(
            figure["low"] <= figure["value"] <= figure["high"]
            for figure in figures.values()
        )
        assert 1 <= figures["t2i_median_rank"]["value"] <= 12
    assert own["captions"]["long"]["cut"] > own["captions"]["references"]["cut"] == 0
    results = [own]
    monkeypatch.setattr("rl_caption.lab.retrieval._measure", lambda *_: results.pop())
    with pytest.raises(SystemExit):
        run(tmp_path / "late", *models, *data)
    assert load_json(tmp_path / "late/retrieval.json")["models"] == {"one": own}, (
        "not lost"
    )
