"""The teacher's embeddings: computed once for an epoch, and with a folder once for all runs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from rewards.clip.backbone import Backbone, load_backbone
from rl_caption.reward_models.batch import PairBatch
from rl_caption.reward_models.teacher import Teacher
from tests.clip_for_tests import noise_image, tiny_student

ROWS: list[Any] = [
    {"image_id": str(index), "image": noise_image(index), "references": [f"a dog {index}", "two cats"]}
    for index in range(4)
]
ALL = {"image": 4, "text": 5}
MUCH = 2**20


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(str(tiny_student(tmp_path_factory.mktemp("student"))))


@pytest.fixture
def counts(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many images and captions went through the teacher."""
    counted = {"image": 0, "text": 0}

    def count(tower: str, name: str) -> None:
        encode = getattr(backbone, name)

        def counting(items: Any, normalize: bool = True) -> torch.Tensor:
            counted[tower] += len(items)
            return encode(items, normalize)

        monkeypatch.setattr(backbone, name, counting)

    count("image", "encode_images")
    count("text", "encode_texts")
    return counted


def epoch(teacher: Teacher) -> list[torch.Tensor]:
    """Both embeddings of every image with each of its captions, two images a step."""
    batches = [
        PairBatch(ROWS[i : i + 2], {}, [row["references"][k] for row in ROWS[i : i + 2]])
        for k in (0, 1)
        for i in (0, 2)
    ]
    return [torch.cat([found["image"], found["text"]], 1) for found in map(teacher, batches)]


def expected(backbone: Backbone) -> list[torch.Tensor]:
    return epoch(Teacher(backbone, ("image", "text"), Accelerator(cpu=True)))


def made(backbone: Backbone, cache_dir: Path | None, memory: int) -> Teacher:
    teacher = Teacher(
        backbone, ("image", "text"), Accelerator(cpu=True), cache_dir=str(cache_dir) if cache_dir else None
    )
    teacher.prepare(ROWS, "random", memory)
    return teacher


@pytest.mark.parametrize(("on_disk", "memory"), [(False, MUCH), (True, MUCH), (True, 0)])
def test_a_second_epoch_costs_no_forward_pass(
    backbone: Backbone, counts: dict[str, int], tmp_path: Path, on_disk: bool, memory: int
) -> None:
    right = expected(backbone)
    counts.update(image=0, text=0)
    teacher = made(backbone, tmp_path if on_disk else None, memory)
    first = epoch(teacher)
    assert counts == ALL | {"text": 5 + 1}, "the distinct captions, and one that tells the width"
    second = epoch(teacher)
    assert counts == ALL | {"text": 5 + 1}
    for whole, again, true in zip(first, second, right, strict=True):
        assert torch.equal(whole, again)
        torch.testing.assert_close(whole, true)


@pytest.mark.parametrize("memory", [MUCH, 0])
def test_a_second_run_costs_no_forward_pass(
    backbone: Backbone, counts: dict[str, int], tmp_path: Path, memory: int
) -> None:
    first = epoch(made(backbone, tmp_path, MUCH))
    counts.update(image=0, text=0)
    assert all(map(torch.equal, epoch(made(backbone, tmp_path, memory)), first))
    assert counts == {"image": 0, "text": 0}


def test_damaged_and_foreign_files_are_made_anew(
    backbone: Backbone, counts: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = epoch(made(backbone, tmp_path, MUCH))
    files = sorted(tmp_path.rglob("*.emb"))
    assert len(files) == 4 + 6
    assert all(file.parts[-3] == f"{backbone.fingerprint}-raw" for file in files)
    files[0].write_bytes(files[0].read_bytes()[:-3])
    shutil.copy(files[2], files[1])
    counts.update(image=0, text=0)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(epoch(made(backbone, tmp_path, MUCH)), first)
    assert sum(counts.values()) == 2
    assert caplog.text.count("is damaged or of something else: it is computed again") == 2
    made(backbone, tmp_path, MUCH)
    assert sum(counts.values()) == 2, "they are whole again"


def test_texts_are_told_apart_by_their_tokens_and_by_their_teacher(
    backbone: Backbone, counts: dict[str, int], tmp_path: Path
) -> None:
    teacher = made(backbone, tmp_path, MUCH)
    counts.update(text=0)
    one, other = teacher.text_embeddings(["Two  CATS", "two dogs"])
    assert counts["text"] == 1, "the tokenizer reads the first as 'two cats', which is known"
    assert torch.equal(one, teacher.text_embeddings(["two cats"])[0])
    assert not torch.equal(one, other)
    full = load_backbone(str(tiny_student(tmp_path / "full", pad_attention="full")))
    assert not torch.equal(made(full, tmp_path, MUCH).text_embeddings(["two cats"])[0], one)
