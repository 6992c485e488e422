"""Recall at k against a slow loop over all orders of ties, and against cases worked by hand."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from rl_caption.evaluation.retrieval import (
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


@pytest.mark.parametrize("chunk_size", [1, 512])
def test_recall_equals_a_slow_loop(chunk_size):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 6, generator=generator)
    more = torch.randint(20, (33,), generator=generator)
    owners = torch.cat([torch.arange(20), more])
    texts = images[owners] + 1.5 * torch.randn(53, 6, generator=generator)
    of_text = normalize(texts, dim=1)
    of_image = normalize(images, dim=1)
    cosines = of_image.double() @ of_text.double().T
    rows = list(range(20))
    of = owners.tolist()
    expected = {}
    for k in (1, 5, 10):
        expected[f"i2t_r{k}"] = slow_recall(cosines, rows, of, k)
        expected[f"t2i_r{k}"] = slow_recall(cosines.T, of, rows, k)
    assert retrieval_recall(3 * images, texts, owners) == pytest.approx(expected)
    ranks = retrieval_ranks(
        of_text.numpy(), of_image.numpy(), owners, rows, chunk_size=chunk_size
    )
    own = cosines.T[range(53), of]
    nearer = 1 + (own[:, None] < cosines.T).sum(dim=1)
    assert ranks[:, 0].tolist() == nearer.tolist()


@pytest.mark.parametrize("k", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("better", "others", "own"), [(0, 0, 1), (0, 3, 1), (1, 2, 2), (2, 1, 1), (5, 0, 2)]
)
def test_ties_count_by_their_expectation_over_all_orders(better, others, own, k):
    orders = list(itertools.permutations([False] * others + [True] * own))
    hits = [any(order[: max(0, k - better)]) for order in orders]
    counts = [np.array([count]) for count in (better, others, own)]
    found = hit_probability(*counts, k).item()
    assert found == pytest.approx(sum(hits) / len(hits), abs=1e-12)


def test_the_rank_is_the_expected_one_of_the_first_own_text():
    # two own texts among five in random order: (5 + 1) / (2 + 1)
    found = retrieval_ranks(np.ones((1, 2)), np.ones((5, 2)), [0], [0, 1, 0, 1, 1])
    assert found[0, 0] == pytest.approx(2.0)


def test_two_images_that_share_a_caption_share_the_hit():
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 1.0, 0.0], [1.0 + 1e-8, 1.0, 0.0], [0.0, 0.0, 1.0]])
    found = retrieval_recall(images, texts, torch.arange(3), ks=(1, 2))
    expected = {
        "i2t_r1": 2 / 3,
        "i2t_r2": 1.0,
        "t2i_r1": 2 / 3,
        "t2i_r2": 1.0,
    }
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("owners", "last"), [([1, 1], 1.0), ([0, 1], 0.0), ([0, 1], torch.nan)]
)
def test_bad_input_is_refused(owners, last):
    """An image without texts, a text of length 0, and NaN."""
    texts = torch.tensor([[1.0], [last]])
    with pytest.raises(ValueError):
        retrieval_recall(torch.ones(2, 1), texts, torch.tensor(owners))
