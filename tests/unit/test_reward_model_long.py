"""What training on long captions makes of them, and models with more positions in the training program."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from rewards.clip.backbone import load_backbone
from rewards.clip.checkpoints import stretch_positions
from rewards.clip.preprocessing import Preprocessing
from rl_caption.config.build import ConfigError, build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.order import micro_batches, step_indices
from rl_caption.reward_models.batch import (
    PairBatch,
    PairCollate,
    PixelCache,
    TokenCache,
    plain_form,
    triplet_texts,
)
from rl_caption.reward_models.config import RewardModelConfig, RewardModelTrainConfig
from rl_caption.reward_models.encoders import ClipTowers, pretrained_clip, random_clip, save_clip
from rl_caption.reward_models.long_texts import StepTriplets, first_sentence, short_caption, validation_triplets
from rl_caption.reward_models.objectives import Contrastive
from rl_caption.reward_models.program import _decays, _triplets
from rl_caption.reward_models.task import EmbeddingTask
from rl_caption.reward_models.triplets import Triplet
from rl_caption.reward_models.validation import embedding_validator
from tests.reward_models_for_tests import CLIP, DATA

LONG = build_data(DataConfig(format="scenes", kwargs=DATA["kwargs"], long_captions=True))
ROWS = LONG.split("train")
TOKENS = TokenCache(SimpleTokenizer(context_length=124), 124, trims=True)


def triplets(batch_size: int = 8) -> StepTriplets:
    return StepTriplets(ROWS, batch_size, 3, "random", shuffle_rate=0.0, per="unit")


def test_false_details_come_from_the_global_batch_however_it_is_split() -> None:
    whole, parts = triplets(), triplets()
    collate = PairCollate(None, TOKENS, seed=3, triplets=parts)
    for step in (0, 1):
        seen: dict[str, list[str]] = {}
        for rank in (1, 0):
            batches = micro_batches(len(ROWS), 8, 2, rank, 2, 3, step)
            for _ in range(2):
                batch = collate([(ROWS[index], at) for index, at in next(batches)])
                decode = TOKENS.tokenizer.decode
                for row, ids in zip(batch.rows, batch.inputs["text_negative"].tolist(), strict=True):
                    seen[row["image_id"]] = decode([token for token in ids if 0 < token < 49406]).split()
        expected = whole(step)
        assert seen.keys() == expected.keys()
        for image_id, words in seen.items():
            made = expected[image_id]
            assert made is not None
            assert words == TOKENS.tokenizer.decode(TOKENS.tokenizer.encode(made.negative)).split()


def test_triplets_tell_of_their_own_image_but_for_one_detail_of_another() -> None:
    made = triplets()
    captions = {row["image_id"]: row["references"][0] for row in ROWS}
    batch = {ROWS[index]["image_id"] for index in step_indices(len(ROWS), 8, 5, 3)}
    assert made(5).keys() == batch
    for image_id, triplet in made(5).items():
        assert triplet is not None
        assert captions[image_id].startswith(triplet.positive)
        assert triplet.positive.startswith(triplet.base)
        detail = triplet.negative.removeprefix(triplet.base).strip()
        others = [caption for other, caption in captions.items() if other in batch - {image_id}]
        assert any(detail in other for other in others)
    assert made(5) != made(6)
    assert made(5) == triplets()(5)


def test_triplets_that_do_not_fit_do_not_count() -> None:
    short = TokenCache(SimpleTokenizer(context_length=8), 8, trims=True)
    given = [Triplet("a cat", "a cat sits", "a cat flies"), None, Triplet("a", "a cat", "a cat on a mat in a hat")]
    texts, counts = triplet_texts(given, short)
    assert counts.tolist() == [1, 0, 0]
    assert texts == {"base": ["a cat", "", ""], "positive": ["a cat sits", "", ""], "negative": ["a cat flies", "", ""]}
    assert short(texts["base"], keep=False).shape == (3, 4)
    assert short.cached == {}


def test_short_captions_are_the_first_sentence_or_a_reference() -> None:
    assert first_sentence("A cat sits. It is 3.5 kg.") == "A cat sits."
    assert first_sentence("A cat sits.") == "A cat sits."
    assert first_sentence("a cat") == "a cat"
    row = ROWS[0]
    assert short_caption(row, "One. Two.", 0, "first_sentence", 0) == "One."
    drawn = {short_caption(row, "One. Two.", step, "references", 0) for step in range(40)}
    assert drawn == set(row["short_references"])
    collate = PairCollate(None, TOKENS, short=partial(short_caption, source="references", seed=0))
    batch = collate([(row, 4)])
    assert batch.inputs["text_short"].tolist() == TOKENS([short_caption(row, "", 4, "references", 0)]).tolist()
    assert batch.targets == {}


def test_a_stretched_model_is_exported_and_loads_again(tmp_path: Path) -> None:
    torch.manual_seed(2)
    clip, shape = random_clip(None, CLIP)
    save_clip(clip, shape, tmp_path / "short")
    long, long_shape, _ = pretrained_clip(None, str(tmp_path / "short"), 104, 4)
    assert long_shape["text_cfg"]["context_length"] == 104
    save_clip(long, long_shape, tmp_path / "long")
    backbone: Any = load_backbone(str(tmp_path / "long"))
    assert backbone.context_length == 104
    assert torch.equal(backbone.model.positional_embedding, stretch_positions(clip.positional_embedding, 4, 5))
    again, again_shape, _ = pretrained_clip(None, str(tmp_path / "long"))
    assert again_shape == long_shape
    assert again.context_length == 104
    with pytest.raises(ConfigError, match=r"model\.context_length, .*: context_length = 100: .* which become 24, 44"):
        pretrained_clip(None, str(tmp_path / "short"), 100, 4)


def test_frozen_positions_stay_as_they_are() -> None:
    torch.manual_seed(3)
    network = ClipTowers(random_clip(None, CLIP)[0], frozen_positions=4)
    table: Any = network.clip.positional_embedding
    before = table.detach().clone()
    decays = _decays(4)
    assert not decays("clip.positional_embedding", table)
    assert _decays(0)("clip.positional_embedding", table)
    optimizer = torch.optim.AdamW([{"params": [table], "weight_decay": 0.0}], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 49000, (4, 9), generator=generator)
    ids[:, 8] = 49407
    rows: Any = [{"image_id": str(index)} for index in range(4)]
    batch = PairBatch(rows, {"image": torch.randn(4, 3, 32, 32, generator=generator), "text": ids}, ["a"] * 4)
    EmbeddingTask(Accelerator(cpu=True), network, Contrastive()).training_step([batch], 0)
    optimizer.step()
    assert torch.equal(table[:4], before[:4])
    assert not torch.equal(table[4:9], before[4:9])


class Scripted(nn.Module):
    """Embeds images at 0 degrees, and a caption at 10 degrees for each of its tokens, or 5 where it says "true"."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        (true,) = TOKENS.tokenizer.encode("true")
        found = {}
        for name, values in inputs.items():
            length = (values != 0).sum(dim=1).float() if name == "text" else torch.zeros(len(values))
            said = (values == true).any(dim=1) if name == "text" else torch.zeros(len(values))
            angles = torch.deg2rad(length * torch.where(said.bool(), 5.0, 10.0))
            found[name] = torch.stack([angles.cos(), angles.sin()], dim=1)
        return found


def validator(given: list[Triplet | None]) -> Any:
    rows: Any = [{"image_id": str(i), "image": ROWS[i]["image"], "references": ["a cat"]} for i in range(len(given))]
    pixels, towers = PixelCache(Preprocessing(8)), ("image", "text")
    return embedding_validator(Accelerator(cpu=True), Scripted(), towers, rows, pixels, TOKENS, 2, None, given)


def test_validation_counts_triplets_in_order() -> None:
    right = Triplet("a", "a true cat", "a cat")
    no_gain = Triplet("a", "a cat", "a cat sits")
    tie = Triplet("a cat", "a cat", "a cat")
    metrics = validator([right, no_gain, tie, None])(1, {}).metrics
    assert metrics["val/specificity_positive"] == pytest.approx(1 / 3)
    assert metrics["val/specificity_negative"] == pytest.approx(2 / 3)
    assert metrics["val/specificity"] == pytest.approx(1 / 2)


def test_validation_without_long_captions_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"none of 2 validation captions has two details .*data\.long_captions"):
        validator([None, None])


def test_validation_triplets_are_the_same_every_time() -> None:
    rows = LONG.split("val")
    assert validation_triplets(rows, 0) == validation_triplets(rows, 0)
    assert None not in validation_triplets(rows, 0)


def test_the_program_reads_the_shuffle_of_the_configuration() -> None:
    train = RewardModelTrainConfig(batch_size=8, seed=3, shuffle_rate=0.5, shuffle_per="row")
    made = _triplets(RewardModelConfig("specificity", train=train), ROWS)
    assert made is not None
    assert (made.shuffle_rate, made.per, made.batch_size, made.seed) == (0.5, "row", 8, 3)
    assert _triplets(RewardModelConfig("contrastive", train=train), ROWS) is None


def test_some_captions_are_as_a_captioner_writes_them() -> None:
    """Per image and step, all texts of it alike, and their tokens those of the bare words."""
    made = triplets(batch_size=len(ROWS))
    items = [(row, 2) for row in ROWS]
    short = partial(short_caption, source="references", seed=0)
    written = PairCollate(None, TOKENS, seed=3, short=short, triplets=made)(items)
    bare = PairCollate(None, TOKENS, seed=3, short=short, triplets=made, plain_captions=1.0)(items)
    mixed = PairCollate(None, TOKENS, seed=3, short=short, triplets=made, plain_captions=0.5)(items)
    assert mixed.captions == bare.captions == written.captions, "what the log and a teacher see does not change"
    commas = {TOKENS.tokenizer.encode(mark)[0] for mark in ".,"}
    plain = [not commas & set(ids) for ids in mixed.inputs["text"].tolist()]
    assert 0.2 < sum(plain) / len(plain) < 0.8
    for name in ("text", "text_base", "text_positive", "text_negative", "text_short"):
        assert not commas & set(bare.inputs[name].flatten().tolist())
        for own, ids, with_marks, without in zip(
            plain, mixed.inputs[name].tolist(), written.inputs[name].tolist(), bare.inputs[name].tolist(), strict=True
        ):
            expected = without if own else with_marks
            assert [token for token in ids if token] == [token for token in expected if token]
    assert plain_form("A red circle, on 3.5 metres. It's big!") == "a red circle on 3.5 metres it 's big"


def test_false_details_may_come_from_all_training_captions() -> None:
    train = RewardModelTrainConfig(batch_size=4, seed=3, shuffle_rate=0.0, negatives="data")
    given = _triplets(RewardModelConfig("specificity", train=train), ROWS)
    assert given is not None
    captions = {row["image_id"]: row["references"][0] for row in ROWS}
    outside = 0
    for step in range(4):
        batch = {ROWS[index]["image_id"] for index in step_indices(len(ROWS), 4, step, 3)}
        made = given(step)
        assert made.keys() == batch
        for image_id, triplet in made.items():
            assert triplet is not None
            detail = triplet.negative.removeprefix(triplet.base).strip(" ,")
            assert any(detail in caption for other, caption in captions.items() if other != image_id)
            outside += not any(detail in captions[other] for other in batch - {image_id})
    assert outside > 0
