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


def test_models_side_by_side_on_short_and_long_captions(tmp_path, capsys):
    folders = {name: str(tiny_student(tmp_path / name)) for name in ("one", "two")}
    models = [
        word
        for name, folder in folders.items()
        for word in (f"--models.{name}.backbone", folder)
    ]
    data = ["--data.format", "scenes", "--data.kwargs", json.dumps(SCENES)]
    found = run(tmp_path / "out", *models, *data)
    assert (tmp_path / "out/retrieval.md").read_text() in capsys.readouterr().out
    results = {(one["model"], one["texts"]): one for one in found["results"]}
    backbone = load_frozen_encoder(folders["one"])
    rows = list(ScenesData(**SCENES).split("test"))
    images = backbone.encode_images([row["image"] for row in rows]).numpy()
    references = [text for row in rows for text in row["references"]]
    columns = {
        "references": (references, [n // 5 for n in range(60)]),
        "long": ([row["long_reference"] for row in rows], list(range(12))),
    }
    for kind, (texts, owners) in columns.items():
        recalls = results["one", kind]["recall"]
        assert recalls == results["two", kind]["recall"], "of equal weights"
        expected = retrieval_recall(
            images, backbone.encode_texts(texts).numpy(), owners
        )
        values = [value for value, _, _ in recalls.values()]
        assert values == pytest.approx(list(expected.values()))
        assert all(low <= value <= high for value, low, high in recalls.values())
    assert results["one", "long"]["cut"] > results["one", "references"]["cut"] == 0
