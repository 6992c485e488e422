"""Losses of embedding models against slow loops over pairs, and the weights of their terms."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_caption.reward_models.contrastive import (
    contrastive,
    false_negatives,
    principal_reconstruction,
    short_info_nce,
)
from rl_caption.reward_models.distill import similarity_regulator
from rl_caption.reward_models.losses import cosine_matrix, info_nce
from rl_caption.reward_models.pac import positive_augmented
from rl_caption.reward_models.specs import dynamic_margin, specificity
from tests.reward_models_for_tests import config_of

NAMES = ("image", "text", "text_false0", "text_false1")


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def slow_nce(
    similarities: list[list[float]],
    smoothing: float = 0.0,
    symmetric: bool = True,
    false: list[list[float]] | None = None,
) -> float:
    """Mean cross-entropy of picking the diagonal of scaled [image][text] similarities, by loops;
    rows of ``false`` are an image's similarities to texts of no image.
    """
    count, total = len(similarities), 0.0
    for own in range(count):
        further = [] if false is None else false[own]
        directions = [[row[own] for row in similarities]] + [
            similarities[own] + further
        ] * symmetric
        for logits in directions:
            logs = [logit - math.log(sum(map(math.exp, logits))) for logit in logits]
            total -= (1 - smoothing) * logs[own] + smoothing * sum(logs) / count
    return total / count / (1 + symmetric)


def scaled(images: Tensor, texts: Tensor, scale: float) -> list[list[float]]:
    return [[scale * cosine(image, text) for text in texts] for image in images]


@pytest.mark.parametrize(
    ("smoothing", "symmetric"), [(0.0, True), (0.0, False), (0.1, True)]
)
def test_info_nce_is_the_mean_cross_entropy(smoothing, symmetric):
    images, texts = rows(5, 7, 0), rows(5, 7, 1)
    expected = slow_nce(scaled(images, texts, 9.0), smoothing, symmetric)
    assert info_nce(images, texts, 9.0, smoothing, symmetric).item() == pytest.approx(
        expected, rel=1e-5
    )
    same = torch.ones(6, 4)
    assert info_nce(same, same, 20.0, smoothing, symmetric).item() == pytest.approx(
        math.log(6), rel=1e-6
    )


def test_false_captions_are_further_columns_of_the_images_alone():
    images, texts, false = rows(3, 7, 0), rows(3, 7, 1), rows(6, 7, 2)
    counts = torch.tensor([[1.0, 1], [1, 1], [0, 1]])
    counted = [0, 1, 3, 4, 5]
    expected = slow_nce(
        scaled(images, texts, 9.0), false=scaled(images, false[counted], 9.0)
    )
    student = {"image": images, "text": texts, "scale": torch.tensor(9.0)}
    student |= {"text_false0": false[:3], "text_false1": false[3:]}
    loss, metrics = contrastive(student, {"false": counts})
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    right = [
        cosine(images[n % 3], texts[n % 3]) > cosine(images[n % 3], false[n])
        for n in counted
    ]
    assert metrics["contrastive/hard_negatives"].item() == pytest.approx(sum(right) / 5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_similarity_regulator_punishes_what_is_below_on_and_above_off_the_diagonal(
    reduction,
):
    si, st, ti, tt = rows(4, 5, 4), rows(4, 5, 5), rows(4, 8, 6), rows(4, 8, 7)
    own: list[float] = []
    others: list[float] = []
    for i in range(4):
        for j in range(4):
            s, t = cosine(si[i], st[j]), cosine(ti[i], tt[j])
            (own if i == j else others).append(
                max(t - s, 0.0) if i == j else max(s - t, 0.0)
            )
    expected = (
        sum(own) + sum(others)
        if reduction == "sum"
        else sum(own) / 4 + sum(others) / 12
    )
    assert min(sum(own), sum(others)) > 0.1, "both parts take part"
    assert similarity_regulator(si, st, ti, tt, reduction).item() == pytest.approx(
        expected, rel=1e-5
    )
    one, opposite = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    assert similarity_regulator(
        one, opposite, one, one, reduction
    ).item() == pytest.approx(2.0), "no other pairs"
    assert similarity_regulator(ti, tt, ti, tt, reduction).item() == 0.0


def test_false_negatives_are_left_out_of_the_softmax():
    """In both terms, and among hard negatives, one of which is word for word the caption of rows 0
    and 3.
    """
    names = ("image", "text", "text_short", "text_false0")
    given = {name: rows(4, 5, seed) for seed, name in enumerate(names)} | {
        "scale": torch.tensor(10.0)
    }
    target = {"false": torch.tensor([[1.0], [1], [1], [0]])}
    groups = {"image": [7.0, 7, 2, 3], "text": [0.0, 1, 2, 0]}
    groups |= {"text_short": [5.0, 6, 5, 8], "text_false0": [9.0, 0, 4, 0]}
    target |= {f"{name}_group": torch.tensor(own) for name, own in groups.items()}
    excluded = false_negatives(target["image_group"], target["text_group"])
    assert excluded.nonzero().tolist() == [[0, 1], [0, 3], [1, 0], [3, 0]]
    coarse = principal_reconstruction(torch.nn.functional.normalize(given["image"]), 2)
    texts, short, false = (
        torch.nn.functional.normalize(given[name]) for name in names[1:]
    )
    expected = {"long": 0.0, "short": 0.0}
    for term, logits in (
        ("long", 10 * cosine_matrix(given["image"], texts)),
        ("short", 10 * coarse @ short.T),
    ):
        own = groups["text" if term == "long" else "text_short"]
        for row in range(4):
            image = groups["image"]
            kept = [
                n
                for n in range(4)
                if n == row or (image[n] != image[row] and own[n] != own[row])
            ]
            columns = logits[row, kept]
            if term == "long":
                hard = [
                    n
                    for n in range(3)
                    if groups["text_false0"][n] != groups["text"][row]
                ]
                columns = torch.cat(
                    [columns, 10 * cosine_matrix(given["image"], false)[row, hard]]
                )
            expected[term] += (
                float(
                    torch.logsumexp(columns, 0) + torch.logsumexp(logits[kept, row], 0)
                )
                / 8
            )
            expected[term] -= float(logits[row, row]) / 4
    loss, metrics = contrastive(given, target, short=0.5, pca_rank=2)
    assert float(metrics["contrastive/short"]) == pytest.approx(
        expected["short"], rel=1e-5
    )
    assert float(loss) == pytest.approx(
        expected["long"] + 0.5 * expected["short"], rel=1e-5
    )


# distillation


@pytest.mark.parametrize(
    ("names", "weights", "l1", "angle", "regulator"),
    [
        ("text", {}, 1 / 2, 1 / 2, 0.0),
        ("dual", {}, 1 / 6, 1 / 6, 1 / 30),
        ("dual", {"l1": 0.0, "cosine": 2.0, "regulator": 0.0}, 0.0, 2.0, 0.0),
        ("dual", {"regulator": 0.0, "contrastive": 0.7}, 1 / 6, 1 / 6, 0.0),
    ],
)
def test_distillation_weighs_its_terms_as_the_released_code_or_as_asked(
    names, weights, l1, angle, regulator
):
    """Distances are taken on raw embeddings."""
    towers = ["image", "text"] if names == "dual" else [names]
    student = {tower: rows(4, 5, seed) for seed, tower in enumerate(towers)}
    teacher = {tower: rows(4, 5, 3 + seed) for seed, tower in enumerate(towers)}
    loss, metrics = config_of("distill", towers=names, loss=weights).objective()(
        student, teacher
    )
    expected, terms = 0.0, {}
    for tower in towers:
        pairs = list(zip(student[tower], teacher[tower], strict=True))
        terms[f"distill/l1_{tower}"] = (
            sum(float((a - b).abs().sum()) for a, b in pairs) / 20
        )
        terms[f"distill/cosine_{tower}"] = sum(1 - cosine(a, b) for a, b in pairs) / 4
        expected += (
            l1 * terms[f"distill/l1_{tower}"] + angle * terms[f"distill/cosine_{tower}"]
        )
    if regulator:
        terms["distill/regulator"] = similarity_regulator(
            *student.values(), *teacher.values()
        ).item()
        assert terms["distill/regulator"] > 0
        expected += regulator * terms["distill/regulator"]
    if "contrastive" in weights:
        terms["distill/contrastive"] = info_nce(*student.values(), 100.0).item()
        expected += 0.7 * terms["distill/contrastive"]
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        terms, rel=1e-5
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_reconstruction_is_that_of_the_covariance_s_leading_eigenvectors():
    data = rows(9, 5, 3).double()
    centred = data.numpy() - data.numpy().mean(axis=0)
    vectors = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :2]
    expected = centred @ vectors @ vectors.T + data.numpy().mean(axis=0)
    assert np.allclose(principal_reconstruction(data, 2).numpy(), expected, atol=1e-10)
    assert torch.allclose(
        principal_reconstruction(data[:4], 3), data[:4], atol=1e-10
    ), "of B - 1 components all"


def test_the_reconstruction_s_gradient_is_that_of_a_constant_basis():
    data, weights = rows(9, 5, 3).double().requires_grad_(), rows(9, 5, 4).double()
    (principal_reconstruction(data, 2) * weights).sum().backward()
    centred = (data - data.mean(dim=0)).detach().numpy()
    vectors = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :2]
    mean = weights.numpy().mean(axis=0)
    assert data.grad is not None
    assert np.allclose(
        data.grad.numpy(),
        (weights.numpy() - mean) @ vectors @ vectors.T + mean,
        atol=1e-10,
    )


def test_short_captions_meet_reconstructions_that_are_not_normalised():
    images, texts, scale = rows(6, 5, 0), rows(6, 5, 1), 9.0
    coarse = principal_reconstruction(images / images.norm(dim=1, keepdim=True), 2)
    assert (coarse.norm(dim=1) - 1).abs().max() > 0.1
    logits = [
        [scale * float(image @ text / text.norm()) for text in texts]
        for image in coarse
    ]
    assert short_info_nce(images, texts, scale, 2).item() == pytest.approx(
        slow_nce(logits), rel=1e-5
    )
    equal = rows(3, 5, 0)[[0, 0, 0, 1, 1, 2]].requires_grad_()
    short_info_nce(equal, texts, scale, 2).backward()
    assert equal.grad is not None
    assert equal.grad.isfinite().all(), "also where singular values are equal"
    assert equal.grad.norm() > 1e-3


# PAC-S


def directions(*degrees: float) -> Tensor:
    """Embeddings whose cosines are told by their angles; of lengths that must not matter."""
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor(
        [[1.0], [2.0], [0.5]]
    )


def test_the_loss_of_pac_s_by_hand():
    """Three pairs at right angles or opposite, so that every cosine is 1, 0 or -1; scale ln 2, so
    that e^s is 2.
    """
    images = texts = directions(0, 90, 180)
    # Rows 0 and 2 see cosines 1, 0, -1: 2 / (2 + 1 + 1/2) = 4/7. Row 1 sees 1, 0, 0: 2/4. Both
    # directions alike.
    pairs = 2 * (2 * math.log(7 / 4) + math.log(2)) / 3
    # V' of the three is where image 0 is: each text has the same cosine to all (columns: ln 3),
    # each V' row has 1, 0, -1 with the matching text elsewhere each time: 4/7, 2/7, 1/7.
    generated = math.log(3) + (math.log(7 / 4) + math.log(7 / 2) + math.log(7)) / 3
    # T' are opposite to their images: rows 0 and 2 give 1/2 of 7/2, row 1 (cosine -1 of -1, 0, 0)
    # 1/2 of 5/2.
    against = 2 * (2 * math.log(7) + math.log(5)) / 3
    given = {"image": images, "text": texts, "scale": torch.tensor(math.log(2))}
    given |= {"image_generated": directions(0, 0, 0), "text_generated": -texts}
    loss, metrics = positive_augmented(given, {})
    terms = {
        name: metrics[f"positive/{name}"].item()
        for name in ("pairs", "images", "captions")
    }
    assert terms == pytest.approx(
        {"pairs": pairs, "images": generated, "captions": against}, rel=1e-5
    )
    assert loss.item() == pytest.approx(
        pairs + 0.05 * generated + 0.1 * against, rel=1e-5
    )


# SPECS


def test_a_margin_is_the_mean_gap_within_its_limits_and_has_no_gradient():
    gaps = torch.tensor([0.5, -0.1, 9.0], requires_grad=True)
    margin = dynamic_margin(gaps, torch.tensor([1.0, 1.0, 0.0]), 1.5)
    assert margin.item() == pytest.approx(0.2)
    assert not margin.requires_grad
    for sign, counts, expected in (
        (1, torch.ones(3), 1.5),
        (-1, torch.ones(3), 0.0),
        (1, torch.zeros(3), 0.0),
    ):
        assert dynamic_margin(sign * gaps, counts, 1.5).item() == expected


def triplet_embeddings() -> dict[str, Tensor]:
    names = ("image", "text", "text_base", "text_positive", "text_negative")
    found = {name: rows(6, 5, seed) for seed, name in enumerate(names)}
    return found | {"scale": torch.tensor(4.0)}


@pytest.mark.parametrize(
    ("units", "limit", "symmetric", "fixed"),
    [
        ("logit", None, True, None),
        ("cosine", None, False, None),
        ("logit", 0.1, False, None),
        ("cosine", None, False, 1e-3),
    ],
)
def test_specificity_is_the_weighted_sum_of_its_terms(units, limit, symmetric, fixed):
    given, counts = triplet_embeddings(), [1, 0, 1, 1, 1, 0]
    factor, largest = {"logit": (4.0, 1.5), "cosine": (1.0, 0.015)}[units]
    largest = largest if limit is None else limit
    own = [row for row in range(6) if counts[row]]
    scores = {
        name: [
            factor * cosine(given["image"][row], given[f"text_{name}"][row])
            for row in own
        ]
        for name in ("base", "positive", "negative")
    }
    terms = []
    for better, worse in (("positive", "base"), ("base", "negative")):
        gaps = [a - b for a, b in zip(scores[better], scores[worse], strict=True)]
        margin = (
            min(max(sum(gaps) / len(gaps), 0.0), largest) if fixed is None else fixed
        )
        terms.append(
            (sum(max(margin - gap, 0.0) for gap in gaps) / len(gaps), margin, gaps)
        )
    contrast = slow_nce(scaled(given["image"], given["text"], 4.0), symmetric=symmetric)
    loss, metrics = specificity(
        given,
        {"triplet": torch.tensor(counts).float()},
        0.5,
        8.0,
        0.8,
        units,
        limit,
        symmetric,
        fixed,
    )
    assert loss.item() == pytest.approx(
        0.5 * contrast + 8 * terms[0][0] + 0.8 * terms[1][0], rel=1e-5
    )
    for name, (term, margin, gaps) in zip(("positive", "negative"), terms, strict=True):
        assert metrics[f"specificity/{name}_hinge"].item() == pytest.approx(
            term, rel=1e-5
        )
        assert metrics[f"specificity/{name}_margin"].item() == pytest.approx(
            margin, rel=1e-4, abs=1e-6
        )
        assert metrics[f"specificity/{name}_rate"].item() == pytest.approx(
            sum(gap > 0 for gap in gaps) / 4
        )
    assert metrics["specificity/contrastive"].item() == pytest.approx(
        contrast, rel=1e-5
    )


def test_what_is_logged_counts_both_directions_and_no_tie():
    """The second caption is nearer to the first image, yet the nearest of the second image."""
    image, text = (
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        torch.tensor([[1.0, 0.0], [1.0, 0.1]]),
    )
    student = {
        "image": image,
        "text": text,
        "text_false0": text,
        "scale": torch.tensor(2.0),
    }
    metrics = contrastive(student, {"false": torch.ones(2, 1)})[1]
    logged = [
        float(metrics[f"contrastive/{key}"])
        for key in ("accuracy", "hard_negatives", "scale")
    ]
    assert logged == [0.75, 0.0, 2.0]
    student |= dict.fromkeys(("text_base", "text_positive", "text_negative"), text)
    metrics = specificity(student, {"triplet": torch.ones(2)})[1]
    assert [
        float(metrics[f"specificity/{name}_rate"]) for name in ("positive", "negative")
    ] == [
        0.0,
        0.0,
    ]
