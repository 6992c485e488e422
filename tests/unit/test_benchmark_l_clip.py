"""The benchmark of L-CLIP runs, and compares what it says it compares. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch

from benchmarks import scst_step
from benchmarks.harness import Timing
from benchmarks.l_clip import (
    CACHED,
    FULL,
    TRIMMED,
    Shapes,
    caption_words,
    load_encoders,
    measure,
    reward_variants,
    write_images,
)
from benchmarks.studies import l_clip_size
from benchmarks.studies.l_clip_size import multiply_adds
from rewards.clip.student import LCLIP, LCLIPConfig
from tests.captioners_for_tests import SHAPE
from tests.clip_for_tests import ARCHITECTURE, tiny_checkpoint

STUDENT = LCLIPConfig(
    embed_dim=16, image_size=32, patch_size=16, image_width=32, image_heads=4, image_blocks=1, text_width=32,
    text_heads=4, text_blocks=1, embedding_rank=8,
)  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Shapes:
    tiny_checkpoint(tmp_path)  # makes the architecture known
    step = scst_step.Shapes(captioner={**SHAPE, "num_heads": 2}, words=60, regions=3, region_dim=6, tokens=5)
    return Shapes(teacher=ARCHITECTURE, student=STUDENT, step=step, images=3, captions=2)


def test_every_part_compares_what_it_says(tiny: Shapes) -> None:
    timing = Timing(repeats=1)
    rows = list(measure(timing, tiny, images=2, samples=2))
    rows += l_clip_size.measure(timing, tiny, pairs=3)
    assert all(row.ratio > 0 for row in rows)
    assert len({(row.name, row.baseline) for row in rows}) == len(rows) == 7 + 7 + 2 + 5 + 9
    shares = [row.ratio for row in rows if row.unit == "of the time"]
    assert len(shares) == 4
    assert all(share < 1 for share in shares)


def test_caching_and_trimming_change_no_score(tiny: Shapes, tmp_path: Path) -> None:
    teacher, student = load_encoders(tiny, tmp_path, "cpu")
    read: list[int] = []
    student._parts().model.text.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].shape[1]))
    variants = reward_variants(
        tiny, write_images(tmp_path, tiny.images), caption_words(tiny.step.words), teacher, student
    )
    for name in ("CLIPScore", "L-CLIPScore"):
        scores = variants[f"{name}, {FULL}"]()
        assert len(set(scores)) > 2
        assert variants[f"{name}, {CACHED}"]() == pytest.approx(scores, abs=1e-6)
        assert variants[f"{name}, {TRIMMED}"]() == pytest.approx(scores, abs=1e-6)
    assert read[:2] == [77, 77]
    assert read[2] <= 22


def test_images_are_embedded_once_only_where_they_are_cached(tiny: Shapes, tmp_path: Path) -> None:
    teacher, student = load_encoders(tiny, tmp_path, "cpu")
    seen: list[int] = []
    student._parts().model.image.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    variants = reward_variants(
        tiny, write_images(tmp_path, tiny.images), caption_words(tiny.step.words), teacher, student
    )
    for how, expected in ((FULL, [3, 3]), (CACHED, [3]), (TRIMMED, [3])):
        seen.clear()
        variants[f"L-CLIPScore, {how}"]()
        variants[f"L-CLIPScore, {how}"]()
        assert seen == expected


def test_multiply_adds_of_the_image_tower_are_those_counted_by_hand() -> None:
    model = LCLIP(STUDENT).eval()
    width, tokens, heads, patches = 32, 5, 4, 4
    projections = tokens * (4 * width * width + 2 * 4 * width * width)
    attention = 2 * tokens * tokens * width + 2 * heads * heads * tokens * tokens
    expected = patches * 3 * 16 * 16 * width + 2 * (projections + attention) + width * 16
    assert multiply_adds(lambda: model.encode_image(torch.zeros(2, 3, 32, 32))) == 2 * expected


def test_words_are_one_token_of_clip_each() -> None:
    words = caption_words(200)
    assert len(set(words)) == 200
    assert len(open_clip.SimpleTokenizer().encode(" ".join(words))) == 200
