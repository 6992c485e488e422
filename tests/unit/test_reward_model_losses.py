"""Losses of embedding models against slow loops over pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_caption.reward_models.config import LossConfig, RewardModelConfig
from rl_caption.reward_models.losses import embedding_distance, info_nce, similarity_regulator
from rl_caption.reward_models.objectives import Contrastive, Distillation
from rl_caption.reward_models.program import objective


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_info_nce_is_the_mean_cross_entropy_of_both_directions() -> None:
    images, texts, scale = rows(5, 7, 0), rows(5, 7, 1), 9.0
    total = 0.0
    for own in range(5):
        to_texts = [math.exp(scale * cosine(images[own], texts[other])) for other in range(5)]
        to_images = [math.exp(scale * cosine(images[other], texts[own])) for other in range(5)]
        total -= math.log(to_texts[own] / sum(to_texts)) + math.log(to_images[own] / sum(to_images))
    assert info_nce(images, texts, scale).item() == pytest.approx(total / 10, rel=1e-5)


def test_info_nce_of_equal_embeddings_is_the_log_of_the_batch_size() -> None:
    same = torch.ones(6, 4)
    assert info_nce(same, same, 20.0).item() == pytest.approx(math.log(6), rel=1e-6)


def test_embedding_distance_is_taken_on_raw_embeddings() -> None:
    student, teacher = rows(4, 6, 2), rows(4, 6, 3)
    absolute = sum(abs(float(a - b)) for a, b in zip(student.flatten(), teacher.flatten(), strict=True)) / 24
    angle = sum(1 - cosine(a, b) for a, b in zip(student, teacher, strict=True)) / 4
    assert embedding_distance(student, teacher).item() == pytest.approx(0.5 * absolute + 0.5 * angle, rel=1e-5)
    assert embedding_distance(2 * teacher, teacher).item() == pytest.approx(0.5 * teacher.abs().mean().item(), rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_similarity_regulator_punishes_what_is_below_on_and_above_off_the_diagonal(reduction: Any) -> None:
    si, st, ti, tt = rows(4, 5, 4), rows(4, 5, 5), rows(4, 8, 6), rows(4, 8, 7)
    own: list[float] = []
    others: list[float] = []
    for i in range(4):
        for j in range(4):
            s, t = cosine(si[i], st[j]), cosine(ti[i], tt[j])
            (own if i == j else others).append(max(t - s, 0.0) if i == j else max(s - t, 0.0))
    expected = sum(own) + sum(others) if reduction == "sum" else sum(own) / 4 + sum(others) / 12
    found = similarity_regulator(si, st, ti, tt, reduction)
    assert min(sum(own), sum(others)) > 0.1, "both parts take part"
    assert found.item() == pytest.approx(expected, rel=1e-5)
    # S and S transposed give the same number, which is why one of them is enough.
    assert similarity_regulator(st, si, tt, ti, reduction).item() == pytest.approx(expected, rel=1e-5)


def test_similarity_regulator_is_0_where_the_student_is_the_teacher_or_better() -> None:
    images, texts = rows(4, 8, 8), rows(4, 8, 9)
    assert similarity_regulator(images, texts, images, texts).item() == 0.0
    perfect = torch.eye(8)[:4]
    assert similarity_regulator(perfect, perfect, images.abs(), texts.abs()).item() == 0.0


def test_similarity_regulator_of_one_pair_has_no_other_pairs() -> None:
    one, opposite = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    for reduction in ("mean", "sum"):
        assert similarity_regulator(one, opposite, one, one, reduction).item() == pytest.approx(2.0)  # type: ignore[arg-type]


def test_the_contrastive_objective_logs_its_scale_and_accuracy() -> None:
    images = torch.eye(4)
    swapped = images[[1, 0, 2, 3]]
    loss, metrics = Contrastive()({"image": images, "text": swapped, "scale": torch.tensor(5.0)}, {})
    assert loss.item() == pytest.approx(info_nce(images, swapped, 5.0).item())
    assert metrics["contrastive/scale"].item() == 5.0
    assert metrics["contrastive/accuracy"].item() == pytest.approx(0.5)


def test_stage_two_weighs_its_terms_as_the_released_code() -> None:
    """(L1 + cosine, both towers) / 6 + regulator / 30."""
    student = {"image": rows(4, 5, 1), "text": rows(4, 5, 2)}
    teacher = {"image": rows(4, 5, 3), "text": rows(4, 5, 4)}
    loss, metrics = objective(RewardModelConfig(task="distill_dual"))(student, teacher)
    names = ("distill/l1_image", "distill/cosine_image", "distill/l1_text", "distill/cosine_text")
    expected = sum(metrics[name].item() for name in names) / 6 + metrics["distill/regulator"].item() / 30
    assert set(metrics) == {*names, "distill/regulator"}
    assert metrics["distill/regulator"] > 0
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("task", "tower"), [("distill_image", "image"), ("distill_text", "text")])
def test_stage_one_is_half_l1_and_half_cosine_of_one_tower(task: Any, tower: str) -> None:
    student, teacher = {tower: rows(4, 5, 1)}, {tower: rows(4, 5, 3)}
    loss, metrics = objective(RewardModelConfig(task=task))(student, teacher)
    assert loss.item() == pytest.approx(embedding_distance(student[tower], teacher[tower]).item(), rel=1e-6)
    assert set(metrics) == {f"distill/l1_{tower}", f"distill/cosine_{tower}"}


def test_weights_come_from_the_configuration() -> None:
    config = RewardModelConfig(task="distill_dual", loss=LossConfig(l1=0.0, cosine=2.0, regulator=0.0))
    assert objective(config) == Distillation(("image", "text"), 0.0, 2.0, 0.0, "mean")
    student = {"image": rows(4, 5, 1), "text": rows(4, 5, 2)}
    teacher = {"image": rows(4, 5, 3), "text": rows(4, 5, 4)}
    loss, metrics = objective(config)(student, teacher)
    assert "distill/regulator" not in metrics
    assert loss.item() == pytest.approx(
        2 * (metrics["distill/cosine_image"] + metrics["distill/cosine_text"]).item(), rel=1e-5
    )
