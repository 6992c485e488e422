"""The grammar head: broken captions, its logit by hand, what it learns, and the reward."""

import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rewards.clip.grammar_head import GrammarConfig, GrammarModel
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.registry import build
from rewards.text.grammar import Grammar
from rl_caption.data.loader import row_generator
from rl_caption.data.scenes import ScenesData
from rl_caption.reward_models.grammar import (
    KINDS,
    Corpus,
    GrammarCollate,
    GrammarEncoderConfig,
    GrammarModelConfig,
    corrupt,
    grammar_loss,
    grammar_model,
    negative_of,
    validation_texts,
)
from rl_caption.runtime.errors import ConfigError
from tests.encoders_for_tests import save_text_encoder
from tests.reward_models_for_tests import DATA, STUDENT

CAPTION = "a small red dog runs fast in the park"
WORDS = CAPTION.split()
TEXTS = ["a large red circle", "circle circle a red", "", "The blue square is left of a circle."]


def draws(number: int) -> np.random.Generator:
    return row_generator(0, number, "test")


def is_subsequence(part: list[str], whole: list[str]) -> bool:
    words = iter(whole)
    return all(word in words for word in part)


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_broken_as_the_rule_says(kind: Any) -> None:
    found = [corrupt(WORDS, kind, ["zebra"], draws(number)) for number in range(200)]
    changed = [len(words) - len(WORDS) for words in found]
    for words in found:
        if kind == "repeat":
            (start, length) = next(
                (i, n)
                for n in (1, 2, 3)
                for i in range(len(WORDS))
                if words
                == [
                    *WORDS[: i + n],
                    *WORDS[i : i + n] * ((len(words) - len(WORDS)) // n),
                    *WORDS[i + n :],
                ]
            )
            assert 0 <= start <= len(WORDS) - length
        elif kind == "insert":
            assert [word for word in words if word != "zebra"] == WORDS
        elif kind == "remove":
            assert is_subsequence(words, WORDS)
        else:
            assert Counter(words) == Counter(WORDS)
            moved = sum(a != b for a, b in zip(words, WORDS, strict=True))
            assert moved == 2 or kind == "shuffle"
    sizes = {"repeat": {1, 2, 3, 4, 6, 9}, "insert": {1, 2, 3}, "remove": {-1, -2, -3}}
    assert set(changed) == sizes.get(kind, {0})
    assert corrupt(WORDS, kind, ["zebra"], draws(3)) == found[3], "a pure function of the draws"
    assert " ".join(WORDS) == CAPTION, "the caption stays"


def test_no_negative_is_a_reference() -> None:
    known = {"red dog", "dog red", "dog"}
    found = {negative_of("red dog", ["cat"], known, draws(number)) for number in range(200)}
    assert not found & known
    assert negative_of("red dog", ["cat"], known, draws(0), ["remove"]) == "red"
    assert negative_of("red dog", ["cat"], known, draws(0), ["swap", "shuffle"]) is None
    assert negative_of("dog", ["cat"], known, draws(0), ["remove", "swap", "shuffle"]) is None


def test_the_loss_is_binary_cross_entropy() -> None:
    positive, negative = torch.tensor([2.0, -1.0]), torch.tensor([0.5, -3.0])
    loss, metrics = grammar_loss({"text": positive, "text_negative": negative}, {})
    terms = [math.log(1 + math.exp(z)) for z in (-2.0, 1.0, 0.5, -3.0)]
    assert float(loss) == pytest.approx(sum(terms) / 4, rel=1e-6)
    assert float(metrics["grammar/accuracy"]) == 0.5


def over_encoder(folder: Path, **options: Any) -> GrammarModel:
    torch.manual_seed(0)
    return GrammarModel(GrammarConfig(save_text_encoder(folder), **{"hidden": 8} | options)).eval()


@torch.no_grad()
def test_the_logit_by_hand(tmp_path: Path) -> None:
    model = over_encoder(tmp_path)
    for text in ("a red circle", "a", "the large blue square is left of a small circle"):
        states = model.norm(model.text_encoder(model.tokenize([text])))[0]
        padded = F.pad(states, (0, 0, 1, 1))
        hidden = torch.stack(
            [
                torch.einsum("kd,hdk->h", padded[t : t + 3], model.conv.weight) + model.conv.bias
                for t in range(len(states))
            ]
        )
        hidden = F.gelu(hidden)
        expected = model.out(torch.cat([hidden.amax(dim=0), hidden.mean(dim=0)]))
        batch = model.tokenize([text, "the large blue square is left of a small circle and more"])
        assert float(model(batch)[0]) == pytest.approx(float(expected), abs=1e-5), (
            "padding changes nothing"
        )


def student(folder: Path, **shape: Any) -> Path:
    torch.manual_seed(1)
    LCLIP(LCLIPConfig(**STUDENT | shape)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pad_attention", ["masked", "full"])
def test_the_text_tower_of_an_l_clip_is_taken_as_it_is(tmp_path: Path, pad_attention: str) -> None:
    model = grammar_model(
        GrammarModelConfig(
            init=str(student(tmp_path, pad_attention=pad_attention)), kwargs={"hidden": 8}
        )
    )
    whole = LCLIP.from_pretrained(tmp_path)
    ids = model.tokenize(["a red circle"])
    assert ids.shape[1] == (5 if pad_attention == "masked" else 24)
    states = model.text_encoder(ids)[0, int(model.text_encoder.lengths(ids)) - 1]
    assert torch.allclose(whole.text.head(states), whole.encode_text(ids)[0], atol=1e-6)
    open_ = {name.split(".")[0] for name, value in model.named_parameters() if value.requires_grad}
    assert open_ == {"norm", "conv", "out"}
    every = grammar_model(
        GrammarModelConfig(init=str(tmp_path), text=GrammarEncoderConfig(train_blocks=None))
    )
    assert all(value.requires_grad for value in every.parameters())


def test_a_tiny_head_learns_to_tell_broken_captions(tmp_path: Path) -> None:
    """Of captions that it has not seen, over a random frozen encoder."""
    data = ScenesData(num_train=200, num_val=40, num_test=0, num_unseen=0, image_size=32)
    rows, held_out = data.split("train"), data.split("val")
    corpus = Corpus.of([*rows, *held_out])
    model = over_encoder(tmp_path, hidden=32)
    model.text_encoder.requires_grad_(False)
    model.train()
    optimizer = torch.optim.AdamW(
        [value for value in model.parameters() if value.requires_grad], lr=1e-2
    )
    collate = GrammarCollate(model.tokenize, corpus)  # type: ignore[arg-type]
    for step in range(80):
        order = draws(step).permutation(len(rows))[:32]
        inputs = collate([(rows[index], step) for index in order]).inputs
        loss, _ = grammar_loss({name: model(ids) for name, ids in inputs.items()}, {})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    model.save_pretrained(tmp_path / "head")
    reward = build("grammar", head=str(tmp_path / "head"))
    means = {
        kind: sum(reward(None, texts)) / len(texts)
        for kind, texts in validation_texts(held_out, corpus).items()
    }
    assert means.pop("references") > max(means.values()) + 0.1
    assert means["shuffle"] < 0.2


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    torch.manual_seed(3)
    GrammarModel.over_student(student(folder / "student"), hidden=8).save_pretrained(
        folder / "head"
    )
    return folder / "head"


def test_a_saved_head_needs_nothing_else(tmp_path: Path, head: Path) -> None:
    own = over_encoder(tmp_path / "encoder")
    own.save_pretrained(tmp_path / "head")
    (tmp_path / "encoder").rename(tmp_path / "gone")
    (head.parent / "student").rename(head.parent / "moved")
    loaded = GrammarModel.from_pretrained(tmp_path / "head")
    ids = own.tokenize(TEXTS[:2])
    assert torch.equal(loaded(ids), own(ids))
    assert loaded.config == own.config
    assert GrammarModel.from_pretrained(head).config.hidden == 8


def test_scores_are_probabilities_of_plain_captions(head: Path, tmp_path: Path) -> None:
    model, reward = GrammarModel.from_pretrained(head), Grammar(head, batch_size=3)
    found = reward(None, TEXTS)
    plain = ["a large red circle", "circle circle a red", "the blue square is left of a circle"]
    expected = [float(model(model.tokenize([text])).sigmoid()) for text in plain]
    assert found == pytest.approx([*expected[:2], 0.0, expected[2]], abs=1e-6)
    assert Grammar(head, batch_size=1)(None, TEXTS) == pytest.approx(found, abs=1e-6)
    assert reward(None, []) == []
    half, copy = Grammar(head, precision="bf16"), pickle.loads(pickle.dumps(reward))
    assert half(None, TEXTS) == pytest.approx(found, abs=0.05)
    assert copy(None, TEXTS) == found
    assert reward.signature.startswith("grammar[head,")
    assert reward.signature.endswith(",fp32]+ptb")
    GrammarModel.over_student(student(tmp_path / "other", text_width=32), hidden=8).save_pretrained(
        tmp_path / "head"
    )
    assert len({reward.signature, half.signature, Grammar(tmp_path / "head").signature}) == 3


def test_other_models_are_refused(head: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type 'l_clip': expected 'grammar_head'"):
        Grammar(student(tmp_path / "student"))
    with pytest.raises(ValueError, match="batch_size is 0"):
        Grammar(head, batch_size=0)
    for options, message in (
        ({"init": str(head), "kwargs": {"hidden": 3}}, "model.kwargs"),
        ({"init": str(tmp_path)}, "config.json"),
        (
            {"init": str(tmp_path / "student"), "text": GrammarEncoderConfig(train_blocks=9)},
            "train_blocks is 9",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            grammar_model(GrammarModelConfig(**options))
    rows = ScenesData(**DATA["kwargs"]).split("val")
    with pytest.raises(ConfigError, match=r"reference '\.\.\.'"):
        Corpus.of([*rows, {**rows[0], "references": ["a circle", "..."]}])
