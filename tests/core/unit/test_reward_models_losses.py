"""Losses of embedding models against slow loops over pairs, and the weights of their terms."""

import math

import pytest
import torch
from torch.nn.functional import normalize

from rl_caption.reward_models.contrastive import (
    contrastive,
    principal_reconstruction,
)
from rl_caption.reward_models.distill import similarity_regulator
from rl_caption.reward_models.losses import info_nce
from rl_caption.reward_models.pac import positive_augmented
from rl_caption.reward_models.specs import dynamic_margin, specificity
from tests.reward_models_for_tests import config_of


def rows(count, width, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def cosines(a, b):
    """[N, M] of all pairs, in float64."""
    a, b = (rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (a, b))
    return a @ b.T


def slow_nce(logits, smoothing=0.0, symmetric=True, false=None):
    """Mean cross-entropy of picking the diagonal of scaled [image][text] similarities,
    row by row; ``false`` are an image's similarities to texts of no image.
    """
    count = len(logits)
    total = 0.0
    for own in range(count):
        row = logits[own] if false is None else torch.cat([logits[own], false[own]])
        for choices in [logits[:, own], row][: 1 + symmetric]:
            logs = choices - choices.exp().sum().log()
            total -= (1 - smoothing) * logs[own] + smoothing * logs.mean()
    return float(total) / count / (1 + symmetric)


def test_info_nce_is_the_mean_cross_entropy_with_smoothed_targets():
    images = rows(5, 7, 0)
    texts = rows(5, 7, 1)
    expected = slow_nce(9 * cosines(images, texts), 0.1)
    found = info_nce(images, texts, 9.0, 0.1)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_false_captions_are_further_columns_of_the_images_alone():
    names = ("image", "text", "text_false0", "text_false1")
    student = {name: rows(3, 7, seed) for seed, name in enumerate(names)}
    student["scale"] = torch.tensor(9.0)
    counts = torch.tensor([[1.0, 1], [1, 1], [0, 1]])
    counted = [0, 1, 3, 4, 5]
    false = torch.cat([student["text_false0"], student["text_false1"]])
    to_texts = cosines(student["image"], student["text"])
    to_false = cosines(student["image"], false)
    expected = slow_nce(9 * to_texts, false=9 * to_false[:, counted])
    loss, metrics = contrastive(student, {"false": counts})
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    right = [to_texts[n % 3, n % 3] > to_false[n % 3, n] for n in counted]
    assert metrics["contrastive/hard_negatives"].item() == pytest.approx(sum(right) / 5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_similarity_regulator_punishes_what_is_below_on_and_above_off_the_diagonal(
    reduction,
):
    given = [rows(4, width, seed) for seed, width in enumerate((5, 5, 8, 8), 4)]
    student = cosines(*given[:2])
    teacher = cosines(*given[2:])
    diagonal = torch.eye(4, dtype=torch.bool)
    own = (teacher - student)[diagonal].clamp(min=0).sum()
    others = (student - teacher)[~diagonal].clamp(min=0).sum()
    assert min(own, others) > 0.1, "both parts take part"
    expected = own + others if reduction == "sum" else own / 4 + others / 12
    found = similarity_regulator(*given, reduction)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    one = torch.tensor([[1.0, 0.0]])
    alone = similarity_regulator(
        one,
        -one,
        one,
        one,
        reduction,
    )
    assert alone.item() == pytest.approx(2.0), "no other pairs"


def test_false_negatives_are_left_out_of_the_softmax():
    """In both terms, and among hard negatives, one of which is word for word the
    caption of rows 0 and 3.
    """
    names = ("image", "text", "text_short", "text_false0")
    given = {name: rows(4, 5, seed) for seed, name in enumerate(names)}
    groups = {
        "image": [7, 7, 2, 3],
        "text": [0, 1, 2, 0],
        "text_short": [5, 6, 5, 8],
        "text_false0": [9, 0, 4, 0],
    }
    target = {f"{name}_group": torch.tensor(own) for name, own in groups.items()}
    target["false"] = torch.tensor([[1.0], [1], [1], [0]])
    infinite = -math.inf

    def expected(logits, equal, hard):
        """Mean over rows and columns without the equal ones."""
        for one, other in equal:
            logits[one, other] = logits[other, one] = infinite
        columns = torch.cat([logits, hard], dim=1)
        total = columns.logsumexp(1) + logits.logsumexp(0) - 2 * logits.diagonal()
        return float(total.mean()) / 2

    images = normalize(given["image"])
    hard = 10 * cosines(images, given["text_false0"])[:, :3]
    hard[[0, 3], 1] = infinite
    logits = 10 * cosines(images, given["text"])
    long = expected(logits, [(0, 1), (0, 3)], hard)
    coarse = principal_reconstruction(images, 2).double()
    logits = 10 * coarse @ normalize(given["text_short"]).double().T
    shorter = expected(logits, [(0, 1), (0, 2)], hard[:, :0])
    given["scale"] = torch.tensor(10.0)
    loss, metrics = contrastive(given, target, short=0.5, pca_rank=2)
    assert float(metrics["contrastive/short"]) == pytest.approx(shorter, rel=1e-5)
    assert float(loss) == pytest.approx(long + 0.5 * shorter, rel=1e-5)


@pytest.mark.parametrize(
    ("names", "weights", "l1", "angle", "regulator"),
    [
        ("text", {}, 1 / 2, 1 / 2, 0.0),
        ("dual", {}, 1 / 6, 1 / 6, 1 / 30),
        ("dual", {"regulator_reduction": "sum"}, 1 / 6, 1 / 6, 1 / 30),
        (
            "dual",
            {"l1": 0.0, "cosine": 2.0, "regulator": 0.0, "contrastive": 0.7},
            0.0,
            2.0,
            0.0,
        ),
    ],
)
def test_distillation_weighs_its_terms_as_the_released_code_or_as_asked(
    names, weights, l1, angle, regulator
):
    """Distances are taken on raw embeddings."""
    towers = ["image", "text"] if names == "dual" else [names]
    student = {tower: rows(4, 5, seed) for seed, tower in enumerate(towers)}
    teacher = {tower: rows(4, 5, 3 + seed) for seed, tower in enumerate(towers)}
    config = config_of("distill", towers=names, loss=weights)
    loss, metrics = config.objective()(student, teacher)
    terms = {}
    weighted = []
    for tower in towers:
        own = student[tower]
        other = teacher[tower]
        terms[f"l1_{tower}"] = (own - other).abs().mean()
        terms[f"cosine_{tower}"] = 1 - cosines(own, other).diagonal().mean()
        weighted += [l1 * terms[f"l1_{tower}"], angle * terms[f"cosine_{tower}"]]
    if regulator:
        embeddings = [*student.values(), *teacher.values()]
        reduction = weights.get("regulator_reduction", "mean")
        terms["regulator"] = similarity_regulator(*embeddings, reduction)
        weighted.append(regulator * terms["regulator"])
    if "contrastive" in weights:
        terms["contrastive"] = info_nce(*student.values(), 100.0)
        weighted.append(0.7 * terms["contrastive"])
    expected = {f"distill/{name}": float(value) for name, value in terms.items()}
    found = {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(float(sum(weighted)), rel=1e-5)


def test_the_reconstruction_is_that_of_the_covariance_s_leading_eigenvectors():
    data = rows(9, 5, 3).double().requires_grad_()
    weights = rows(9, 5, 4).double()
    mean = data.mean(dim=0).detach()
    centred = data.detach() - mean
    vectors = torch.linalg.eigh(centred.T @ centred)[1][:, -2:]
    basis = vectors @ vectors.T
    found = principal_reconstruction(data, 2)
    assert torch.allclose(found, centred @ basis + mean, atol=1e-10)
    few = principal_reconstruction(data[:4], 3)
    assert torch.allclose(few, data[:4], atol=1e-10), "of B - 1 components all"
    # the basis is constant
    (found * weights).sum().backward()
    average = weights.mean(dim=0)
    expected = (weights - average) @ basis + average
    assert torch.allclose(data.grad, expected, atol=1e-10)


def directions(*degrees):
    """Embeddings whose cosines are told by their angles; of lengths that must not matter."""
    angles = torch.tensor(degrees).deg2rad()
    lengths = torch.tensor([[1.0], [2.0], [0.5]])
    return torch.stack([angles.cos(), angles.sin()], dim=1) * lengths


def test_the_loss_of_pac_s_by_hand():
    """Three pairs at right angles or opposite, so that every cosine is 1, 0 or -1;
    scale ln 2, so that e^s is 2.
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
    given = {
        "image": images,
        "text": texts,
        "scale": torch.tensor(math.log(2)),
    }
    given |= {
        "image_generated": directions(0, 0, 0),
        "text_generated": -texts,
    }
    loss, metrics = positive_augmented(given, {})
    expected = {
        "pairs": pairs,
        "images": generated,
        "captions": against,
    }
    for name, value in expected.items():
        assert metrics[f"positive/{name}"].item() == pytest.approx(value, rel=1e-5)
    total = pairs + 0.05 * generated + 0.1 * against
    assert loss.item() == pytest.approx(total, rel=1e-5)


def test_a_margin_is_the_mean_gap_within_its_limits_and_has_no_gradient():
    gaps = torch.tensor([0.5, -0.1, 9.0], requires_grad=True)
    for sign, counts, expected in (
        (1, [1.0, 1.0, 0.0], 0.2),
        (1, [1.0, 1.0, 1.0], 1.5),
        (-1, [1.0, 1.0, 1.0], 0.0),
        (1, [0.0, 0.0, 0.0], 0.0),
    ):
        margin = dynamic_margin(sign * gaps, torch.tensor(counts), 1.5)
        assert margin.item() == pytest.approx(expected)
        assert not margin.requires_grad


@pytest.mark.parametrize(
    ("largest", "symmetric", "fixed"),
    [(1.5, True, None), (0.1, False, None), (1.5, False, 0.1)],
)
def test_specificity_is_the_weighted_sum_of_its_terms(largest, symmetric, fixed):
    names = ("image", "text", "text_base", "text_positive", "text_negative")
    given = {name: rows(6, 5, seed) for seed, name in enumerate(names)}
    own = torch.tensor([0, 2, 3, 4])
    counts = torch.zeros(6).index_fill(0, own, 1.0)
    base, positive, negative = (
        4 * cosines(given["image"], given[name]).diagonal()[own] for name in names[2:]
    )
    logits = 4 * cosines(given["image"], given["text"])
    terms = {"contrastive": slow_nce(logits, symmetric=symmetric)}
    for name, gaps in (("positive", positive - base), ("negative", base - negative)):
        margin = gaps.mean().clamp(0, largest) if fixed is None else fixed
        terms[f"{name}_hinge"] = float((margin - gaps).clamp(min=0).mean())
        terms[f"{name}_rate"] = float((gaps > 0).double().mean())
    weights = {
        "contrastive": 0.5,
        "positive_hinge": 8,
        "negative_hinge": 0.8,
    }
    total = sum(weight * terms[name] for name, weight in weights.items())
    given["scale"] = torch.tensor(4.0)
    options = (*weights.values(), largest, symmetric, fixed)
    loss, metrics = specificity(given, {"triplet": counts}, *options)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for name, value in terms.items():
        found = metrics[f"specificity/{name}"].item()
        assert found == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_what_is_logged_counts_both_directions_and_no_tie():
    """The second caption is nearer to the first image, yet the nearest of the second image."""
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0], [1.0, 0.1]])
    texts = ("text", "text_false0", "text_base", "text_positive", "text_negative")
    student = {
        "image": image,
        "scale": torch.tensor(2.0),
        **dict.fromkeys(texts, text),
    }
    metrics = contrastive(student, {"false": torch.ones(2, 1)})[1]
    metrics |= specificity(student, {"triplet": torch.ones(2)})[1]
    for name, expected in (
        ("contrastive/accuracy", 0.75),
        ("contrastive/hard_negatives", 0.0),
        ("contrastive/scale", 2.0),
        ("specificity/positive_rate", 0.0),
        ("specificity/negative_rate", 0.0),
    ):
        assert float(metrics[name]) == expected
