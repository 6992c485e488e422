"""The order of training images: every image once an epoch, the same however it is split."""

from __future__ import annotations

from itertools import islice

import pytest

from rl_caption.data.loader import micro_batch_size, micro_batches, step_indices


def test_every_image_is_seen_once_an_epoch_also_where_batches_span_epochs() -> None:
    seen = [index for step in range(10) for index in step_indices(7, 3, step, seed=1)]
    for epoch in range(4):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))


def test_a_batch_larger_than_the_data_wraps_around() -> None:
    assert sorted(step_indices(3, 6, 0, seed=0)) == [0, 0, 1, 1, 2, 2]


def test_order_depends_on_seed_and_epoch() -> None:
    first, second = step_indices(50, 50, 0, 0), step_indices(50, 50, 1, 0)
    assert first != second
    assert first != step_indices(50, 50, 0, 1)
    assert first == step_indices(50, 50, 0, 0)


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (1, 2), (2, 4), (2, 2), (4, 1)])
def test_processes_and_micro_batches_share_the_same_global_batch(processes: int, micro: int) -> None:
    per_step = 8 // processes // micro
    for step in range(3):
        parts: list[int] = []
        for rank in range(processes):
            order = micro_batches(20, 8, micro, rank, processes, seed=5, first_step=0)
            mine = list(islice(order, step * per_step, (step + 1) * per_step))
            assert all(len(part) == micro for part in mine)
            assert {of for part in mine for _, of in part} == {step}
            parts += [index for part in mine for index, _ in part]
        assert parts == step_indices(20, 8, step, seed=5)


def test_starting_at_a_later_step_continues_the_order() -> None:
    whole = list(islice(micro_batches(20, 8, 4, 0, 1, 0, first_step=0), 10))
    assert list(islice(micro_batches(20, 8, 4, 0, 1, 0, first_step=3), 4)) == whole[6:]


def test_sizes_that_do_not_divide_are_refused_with_what_would_work() -> None:
    assert micro_batch_size(12, None, 2) == 6
    assert micro_batch_size(12, 3, 2) == 3
    with pytest.raises(ValueError, match="batch_size 9 is not a multiple of the 2 processes"):
        micro_batch_size(9, None, 2)
    with pytest.raises(ValueError, match=r"use one of \[1, 2, 3, 6\]"):
        micro_batch_size(12, 4, 2)
