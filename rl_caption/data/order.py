"""Which images belong to which step: a pure function, so that resuming and re-sharding need no loader state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np


def step_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of the global batch of optimizer step ``step`` (counted from 0).

    Epochs are independent permutations laid end to end, so every image is seen once an epoch and no image is dropped;
    a batch may span two epochs.
    """
    start = step * batch_size
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(start + len(indices), num_rows)
        order = _permutation(num_rows, seed, epoch)
        indices.extend(order[offset : offset + batch_size - len(indices)].tolist())
    return indices


def row_generator(seed: int, step: int, key: str) -> np.random.Generator:
    """Random numbers for one image at one step: a pure function of the three, by a counter-based generator.

    Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") keyed by a hash.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{key}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)


def micro_batches(
    num_rows: int, batch_size: int, micro_batch_size: int, rank: int, processes: int, seed: int, first_step: int
) -> Iterator[list[tuple[int, int]]]:
    """(Row index, step) of the micro-batches of one process, step after step, without end.

    Each process takes a contiguous share of the global batch and cuts it into ``batch_size / (processes *
    micro_batch_size)`` micro-batches.
    """
    share = batch_size // processes
    step = first_step
    while True:
        mine = step_indices(num_rows, batch_size, step, seed)[rank * share : (rank + 1) * share]
        for start in range(0, share, micro_batch_size):
            yield [(index, step) for index in mine[start : start + micro_batch_size]]
        step += 1


def micro_batch_size(batch_size: int, micro_batch_size: int | None, processes: int) -> int:
    """Images of one forward pass of one process.

    Raises:
        ValueError: the global batch cannot be divided so; the message names what would work.
    """
    if batch_size % processes:
        raise ValueError(f"train.batch_size {batch_size} is not a multiple of the {processes} processes")
    share = batch_size // processes
    if micro_batch_size is None:
        return share
    if micro_batch_size < 1 or share % micro_batch_size:
        fitting = [size for size in range(1, share + 1) if share % size == 0]
        raise ValueError(
            f"train.micro_batch_size {micro_batch_size} does not divide the {share} images of a process "
            f"(train.batch_size {batch_size} / {processes} processes): use one of {fitting}"
        )
    return micro_batch_size
