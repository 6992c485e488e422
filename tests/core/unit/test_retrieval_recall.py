"""Recall at k against a slow loop over all orders of ties, and against cases worked by hand."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from rl_caption.evaluation.retrieval import (
    both_ways,
    hit_probability,
    retrieval_ranks,
    retrieval_recall,
)


def slow_recall(cosines, query_ids, candidate_ids, k):
    """Plain recall at k without ties, one query at a time."""
    hits = 0
    for row, own in zip(cosines.tolist(), query_ids, strict=True):
        nearest = sorted(range(len(row)), key=lambda column: -row[column])[:k]
        hits += any(candidate_ids[column] == own for column in nearest)
    return hits / len(query_ids)


@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_recall_equals_a_slow_loop(chunk_size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 6, generator=generator)
    owners = torch.cat(
        [torch.arange(20), torch.randint(20, (33,), generator=generator)]
    )
    owners = owners[torch.randperm(len(owners), generator=generator)]
    texts = images[owners] + 1.5 * torch.randn(53, 6, generator=generator)
    got = retrieval_recall(images, texts, owners)
    cosines = torch.nn.functional.cosine_similarity(
        images[:, None].double(), texts[None].double(), dim=-1
    )
    rows = list(range(20))
    expected, of = {}, owners.tolist()
    for k in (1, 5, 10):
        expected[f"i2t_r{k}"] = slow_recall(cosines, rows, of, k)
        expected[f"t2i_r{k}"] = slow_recall(cosines.T, of, rows, k)
    assert got == pytest.approx(expected)
    of_text, of_image = (
        torch.nn.functional.normalize(each, dim=1).numpy() for each in (texts, images)
    )
    ranks = retrieval_ranks(of_text, of_image, owners, rows, chunk_size=chunk_size)
    assert ranks == pytest.approx(both_ways(images, texts, owners)["t2i"])
    nearer = [
        1 + int((row > row[own]).sum())
        for row, own in zip(cosines.T, owners, strict=True)
    ]
    assert ranks[:, 0].tolist() == nearer
    again = retrieval_recall(3 * images, 0.1 * texts.flip(0), owners.flip(0))
    assert again == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("better", "others", "own"), [(0, 0, 1), (0, 3, 1), (1, 2, 2), (2, 1, 1), (5, 0, 2)]
)
def test_ties_count_by_their_expectation_over_all_orders(better, others, own, k):
    orders = list(itertools.permutations([False] * others + [True] * own))
    hits = Fraction(
        sum(any(order[: max(0, k - better)]) for order in orders), len(orders)
    )
    got = hit_probability(np.array([better]), np.array([others]), np.array([own]), k)
    assert got.item() == pytest.approx(float(hits), abs=1e-12)


def test_the_rank_is_the_expected_one_of_the_first_own_text():
    images, texts = (
        torch.ones(1, 2),
        torch.ones(5, 2),
    )  # two own texts among five in random order: (5 + 1) / (2 + 1)
    found = retrieval_ranks(images.numpy(), texts.numpy(), [0], [0, 1, 0, 1, 1])
    assert found[0, 0] == pytest.approx(2.0)


def test_two_images_that_share_a_caption_share_the_hit():
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 1.0, 0.0], [1.0 + 1e-8, 1.0, 0.0], [0.0, 0.0, 1.0]])
    got = retrieval_recall(images, texts, torch.tensor([0, 1, 2]), ks=(1, 2))
    assert got == pytest.approx(
        {"i2t_r1": 2 / 3, "i2t_r2": 1.0, "t2i_r1": 2 / 3, "t2i_r2": 1.0}
    )


@pytest.mark.parametrize(
    "change",
    [
        {"owners": torch.tensor([0, 1, 2]), "texts": torch.ones(3, 4)},
        {"owners": torch.tensor([1, 1])},
        {"texts": torch.tensor([[1.0, 0, 0, 0], [0.0, 0, 0, 0]])},
        {"images": torch.tensor([[1.0, 0, 0, torch.nan], [1.0, 0, 0, 0]])},
    ],
)
def test_bad_input_is_refused(change):
    arguments = {
        "images": torch.ones(2, 4),
        "texts": torch.ones(2, 4),
        "owners": torch.tensor([0, 1]),
    } | change
    with pytest.raises(ValueError):
        retrieval_recall(**arguments)
