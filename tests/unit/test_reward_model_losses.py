"""Losses of embedding models against slow loops over pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_caption.reward_models.config import LossConfig, RewardModelConfig, RewardModelTrainConfig
from rl_caption.reward_models.losses import (
    dynamic_margin,
    embedding_distance,
    hinge,
    info_nce,
    principal_reconstruction,
    short_info_nce,
    similarity_regulator,
)
from rl_caption.reward_models.objectives import Contrastive, Distillation, Specificity
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


# long captions


def test_info_nce_in_one_direction_lets_texts_pick_images() -> None:
    images, texts, scale = rows(5, 7, 0), rows(5, 7, 1), 9.0
    total = 0.0
    for own in range(5):
        to_images = [math.exp(scale * cosine(images[other], texts[own])) for other in range(5)]
        total -= math.log(to_images[own] / sum(to_images))
    assert info_nce(images, texts, scale, symmetric=False).item() == pytest.approx(total / 5, rel=1e-5)


def test_info_nce_with_label_smoothing_spreads_a_share_over_the_batch() -> None:
    images, texts, scale = rows(4, 7, 0), rows(4, 7, 1), 9.0
    total = 0.0
    for own in range(4):
        for chances in (
            [math.exp(scale * cosine(images[own], texts[other])) for other in range(4)],
            [math.exp(scale * cosine(images[other], texts[own])) for other in range(4)],
        ):
            logs = [math.log(chance / sum(chances)) for chance in chances]
            total -= 0.9 * logs[own] + 0.1 * sum(logs) / 4
    assert info_nce(images, texts, scale, 0.1).item() == pytest.approx(total / 8, rel=1e-5)


def test_the_reconstruction_is_that_of_the_covariance_s_leading_eigenvectors() -> None:
    data = rows(9, 5, 3).double()
    centred = data.numpy() - data.numpy().mean(axis=0)
    vectors = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :2]
    expected = centred @ vectors @ vectors.T + data.numpy().mean(axis=0)
    assert np.allclose(principal_reconstruction(data, 2).numpy(), expected, atol=1e-10)
    assert torch.allclose(principal_reconstruction(data, 5), data, atol=1e-10)
    assert torch.allclose(principal_reconstruction(data[:4], 3), data[:4], atol=1e-10)


def test_short_captions_meet_reconstructions_that_are_not_normalised() -> None:
    images, texts, scale = rows(6, 5, 0), rows(6, 5, 1), 9.0
    coarse = principal_reconstruction(images / images.norm(dim=1, keepdim=True), 2)
    assert (coarse.norm(dim=1) - 1).abs().max() > 0.1
    total = 0.0
    for own in range(6):
        units = texts / texts.norm(dim=1, keepdim=True)
        to_texts = [math.exp(scale * float(coarse[own] @ units[other])) for other in range(6)]
        to_images = [math.exp(scale * float(coarse[other] @ units[own])) for other in range(6)]
        total -= math.log(to_texts[own] / sum(to_texts)) + math.log(to_images[own] / sum(to_images))
    assert short_info_nce(images, texts, scale, 2).item() == pytest.approx(total / 12, rel=1e-5)


def test_equal_images_have_a_finite_gradient() -> None:
    images = rows(3, 5, 0)[[0, 0, 0, 1, 1, 2]].requires_grad_()
    short_info_nce(images, rows(6, 5, 1), 9.0, 2).backward()
    assert images.grad is not None
    assert images.grad.isfinite().all()
    assert images.grad.norm() > 1e-3


def test_a_margin_is_the_mean_gap_within_its_limits_and_has_no_gradient() -> None:
    gaps = torch.tensor([0.5, -0.1, 9.0], requires_grad=True)
    margin = dynamic_margin(gaps, torch.tensor([1.0, 1.0, 0.0]), 1.5)
    assert margin.item() == pytest.approx(0.2)
    assert not margin.requires_grad
    everything = torch.ones(3)
    assert dynamic_margin(gaps, everything, 1.5).item() == 1.5
    assert dynamic_margin(-gaps, everything, 1.5).item() == 0.0
    assert dynamic_margin(gaps, torch.zeros(3), 1.5).item() == 0.0


def test_a_hinge_is_what_gaps_lack_of_the_margin() -> None:
    gaps, counts = torch.tensor([0.5, -0.1, -9.0]), torch.tensor([1.0, 1.0, 0.0])
    assert hinge(gaps, counts, 0.2).item() == pytest.approx((0.0 + 0.3) / 2)
    assert hinge(gaps, torch.zeros(3), 0.2).item() == 0.0


def triplet_embeddings() -> dict[str, Tensor]:
    names = ("image", "text", "text_base", "text_positive", "text_negative")
    found = {name: rows(6, 5, seed) for seed, name in enumerate(names)}
    return found | {"scale": torch.tensor(4.0)}


@pytest.mark.parametrize(("units", "limit"), [("logit", None), ("cosine", None), ("logit", 0.1)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_specificity_objective_is_the_weighted_sum_of_its_terms(units: Any, limit: Any, symmetric: bool) -> None:
    given, counts = triplet_embeddings(), [1, 0, 1, 1, 1, 0]
    factor, largest = {"logit": (4.0, 1.5), "cosine": (1.0, 0.015)}[units]
    largest = largest if limit is None else limit
    own = [row for row in range(6) if counts[row]]
    scores = {
        name: [factor * cosine(given["image"][row], given[f"text_{name}"][row]) for row in own]
        for name in ("base", "positive", "negative")
    }
    terms = []
    for better, worse in (("positive", "base"), ("base", "negative")):
        gaps = [a - b for a, b in zip(scores[better], scores[worse], strict=True)]
        margin = min(max(sum(gaps) / len(gaps), 0.0), largest)
        terms.append((sum(max(margin - gap, 0.0) for gap in gaps) / len(gaps), margin, gaps))
    contrast = info_nce(given["image"], given["text"], 4.0, symmetric=symmetric).item()
    loss, metrics = Specificity(0.5, 8.0, 0.8, units, limit, symmetric)(
        given, {"triplet": torch.tensor(counts).float()}
    )
    assert loss.item() == pytest.approx(0.5 * contrast + 8 * terms[0][0] + 0.8 * terms[1][0], rel=1e-5)
    for name, (term, margin, gaps) in zip(("positive", "negative"), terms, strict=True):
        assert metrics[f"specificity/{name}_hinge"].item() == pytest.approx(term, rel=1e-5)
        assert metrics[f"specificity/{name}_margin"].item() == pytest.approx(margin, rel=1e-4, abs=1e-6)
        assert metrics[f"specificity/{name}_rate"].item() == pytest.approx(sum(gap > 0 for gap in gaps) / 4)
    assert metrics["specificity/contrastive"].item() == pytest.approx(contrast)


def test_rows_without_a_triplet_have_no_part_in_the_hinges() -> None:
    given = triplet_embeddings()
    for value in given.values():
        value.requires_grad_()
    loss, _ = Specificity()(given, {"triplet": torch.zeros(6)})
    assert loss.item() == pytest.approx(info_nce(given["image"], given["text"], 4.0, symmetric=False).item())
    loss.backward()
    assert given["text_positive"].grad is None or not given["text_positive"].grad.any()


def test_weights_of_the_configuration_reach_the_specificity_objective() -> None:
    loss = LossConfig(alpha=2.0, beta=3.0, gamma=4.0, margin_units="cosine", max_margin=0.5, symmetric=True)
    assert objective(RewardModelConfig("specificity", loss=loss)) == Specificity(2.0, 3.0, 4.0, "cosine", 0.5, True)
    assert objective(RewardModelConfig("specificity")) == Specificity(1.0, 8.0, 0.8, "logit", None, False)
    train = RewardModelTrainConfig(label_smoothing=0.1)
    long = RewardModelConfig("contrastive", loss=LossConfig(short=0.5, pca_rank=7), train=train)
    assert objective(long) == Contrastive(0.1, 0.5, 7)
