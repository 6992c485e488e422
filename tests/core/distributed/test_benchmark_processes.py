"""The benchmark of processes trains as many as it says. No time is asserted."""

import multiprocessing

import pytest

from benchmarks import processes
from benchmarks.harness import Timing
from benchmarks.scst_step import Shapes
from tests.captioners_for_tests import SHAPE

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_two_processes_are_compared_with_one() -> None:
    preloaded = ["rl_caption.training.loop", "benchmarks.processes"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    shapes = Shapes(
        captioner={**SHAPE, "num_heads": 2},
        words=40,
        regions=3,
        region_dim=6,
        samples=2,
        tokens=4,
    )
    rows = list(
        processes.measure(
            Timing(repeats=1), images=2, shapes=shapes, method="forkserver"
        )
    )
    assert [(row.name, row.baseline) for row in rows] == [
        ("2 processes", "one process, 1 thread"), ("2 processes", "one process, 2 threads"),
    ]  # fmt: skip
    assert all(row.ratio > 0 for row in rows)
