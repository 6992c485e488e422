"""Captioners over region features and with subword tokens go through the same commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordPieceTrainer

from rl_caption.captioners.transformer import TransformerCaptioner
from tests.captioners_for_tests import REFERENCES
from tests.training_for_tests import checked_run, lines, run, scst_config, xe_config


@pytest.fixture
def features(tmp_path: Path) -> dict:
    """A dataset of eight images known only by their region features, one file each."""
    generator = np.random.default_rng(0)
    (tmp_path / "features").mkdir()
    rows = []
    for index in range(8):
        regions = generator.normal(size=(int(generator.integers(2, 6)), 6)).astype(np.float32)
        np.savez(tmp_path / "features" / f"image{index}.npz", features=regions)
        split = "train" if index < 5 else "val"
        row = {
            "image": f"{index}.jpg",
            "image_id": f"image{index}",
            "references": [*REFERENCES[index % 4], *(["a sign that reads 猫"] if index == 0 else [])],
            "split": split,
        }
        rows.append(json.dumps(row))
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return {
        "data": {
            "format": "jsonl",
            "path": str(tmp_path / "data.jsonl"),
            "features_root": str(tmp_path / "features"),
        },
        "model.kwargs.input_kind": "regions",
        "model.kwargs.feature_dim": 6,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
    }


def test_a_captioner_over_region_features_trains_by_both_stages(features: dict, tmp_path: Path) -> None:
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    checked_run(xe_config(xe, **features), xe)
    config = scst_config(scst, xe / "export/best", **{"data": features["data"], "train.batch_size": 4})
    checked_run(config, scst, "scst")
    assert [line["step"] for line in lines(scst) if "loss/total" in line] == [1, 2, 3, 4]
    signature = json.loads((scst / "env.json").read_text())["signature"]
    count = 1 + sum(len(REFERENCES[index % 4]) for index in range(5))
    assert f"+PTB-python[1 of {count} texts not compared with Java]" in signature


def test_features_of_another_width_are_an_error_that_names_the_image(features: dict, tmp_path: Path) -> None:
    xe = tmp_path / "xe"
    ended = run(xe_config(xe, **{**features, "model.kwargs.feature_dim": 7}), xe)
    assert ended.code == 1
    assert "image" in ended.output
    assert "7" in ended.output


def test_features_that_the_captioner_would_not_read_are_refused(features: dict, tmp_path: Path) -> None:
    for index in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index}.jpg")
    xe = tmp_path / "xe"
    pixels = {key: value for key, value in features.items() if not key.startswith("model.kwargs.")}
    ended = run(xe_config(xe, **pixels), xe)
    assert ended.code == 1
    assert "the captioner reads images: leave it out" in ended.output


def test_a_subword_tokenizer_is_saved_with_the_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordPiece(unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = Lowercase(), Whitespace(), WordPieceDecoder()
    texts = ["a red circle on a grey field", "two blue squares", "there is a shape on a background"]
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    tokenizer.train_from_iterator(texts, WordPieceTrainer(vocab_size=60, special_tokens=special))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    xe = tmp_path / "xe"
    checked_run(xe_config(xe, **{"model.tokenizer": str(tmp_path / "tokenizer.json")}), xe)
    captioner = TransformerCaptioner.from_pretrained(xe / "export/best")
    (ids,) = captioner.encode(["A red square"], 16)
    assert len(ids) > 3, "the word square is cut into pieces"
    assert captioner.tokenizer.decode(ids, skip_special_tokens=True) == "a red square"
