"""ICC under a tiny RoBERTa with one label: the logit, clipping, cutting, and what is refused."""

import math
import shutil

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from rewards.base import RewardError
from rewards.registry import build
from rewards.text.icc import Icc
from tests.zoo.language_models import tiny_regressor

TEXTS = [
    "a red circle on the left",
    "the blue square",
    "",
    "a",
    "two small dogs sitting on a large brown couch",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_regressor(tmp_path_factory.mktemp("icc"))
    AutoTokenizer.from_pretrained(path, padding_side="left").save_pretrained(
        path
    )  # which is not how it was trained
    return path


def by_hand(folder, text):
    """The logit, by one pass of the model, as the README of the released model computes it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(
            model(**tokenizer([text], return_tensors="pt"))["logits"].squeeze()
        )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_raw_score_is_the_logit_and_a_clipped_one_lies_in_its_bounds(
    folder, batch_size
):
    expected = [by_hand(folder, text) for text in TEXTS]
    assert min(expected) < 0 < max(expected), "or clipping would not show"
    raw = Icc(str(folder), clip=False, batch_size=batch_size)
    assert raw(None, TEXTS) == pytest.approx(expected, abs=1e-5)
    assert raw.bounds == (-math.inf, math.inf)
    clipped = build("icc", model=str(folder), batch_size=batch_size)
    assert clipped(None, TEXTS) == pytest.approx(
        [min(1.0, max(0.0, score)) for score in expected], abs=1e-5
    )
    assert clipped.bounds == (0.0, 1.0)
    assert clipped(None, []) == []


def test_long_captions_are_cut_to_the_positions_after_padding(folder):
    raw = Icc(str(folder), clip=False)
    longest = AutoModel.from_pretrained(folder).config.max_position_embeddings - 2
    long, longer = raw(None, ["a" * longest, "a" * (longest + 40)])
    assert long == pytest.approx(longer, abs=1e-6)


def test_bad_models_and_scores_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="3 labels"):
        Icc(str(tiny_regressor(tmp_path / "three", labels=3)))
    headless = shutil.copytree(folder, tmp_path / "headless")
    AutoModel.from_pretrained(folder).save_pretrained(headless)
    with pytest.raises(ValueError, match=r"headless.*classifier\.dense\.bias"):
        Icc(str(headless))
    broken = Icc(str(folder))
    broken._frozen.network.classifier.out_proj.bias.data.fill_(math.nan)
    with pytest.raises(RewardError, match="nan"):
        broken(None, TEXTS)
