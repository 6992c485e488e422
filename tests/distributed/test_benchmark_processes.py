"""The benchmark of processes: what trains together exchanges gradients, and its figures are those of one round."""

from __future__ import annotations

import multiprocessing

import pytest

from benchmarks import processes
from benchmarks.scst_step import Shapes
from tests.captioners_for_tests import SHAPE

pytestmark = pytest.mark.distributed


def test_two_processes_train_together_and_apart() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["rl_caption.training.loop", "benchmarks.processes"]
    )
    shapes = Shapes(
        captioner={**SHAPE, "num_heads": 2}, words=40, regions=3, region_dim=6, images=2, samples=2, tokens=4
    )
    (found,) = processes.take_rounds(shapes, repeats=1, processes=2, start="forkserver")
    gradients = {name: {took["gradient"] for took in found[name]} for name in ("2 processes", "without exchange")}
    assert len(gradients["2 processes"]) == 1, "the mean of both"
    assert len(gradients["without exchange"]) == 2, "each has its own"
    rows = processes.table_of([found], shapes, processes=2)
    assert [row.baseline for row in rows[:3]] == [
        "one process, 1 thread", "one process, 2 threads", "one process, 1 thread",
    ]  # fmt: skip
    assert all(row.ratio > 0 for row in rows[:4])
    assert [row.baseline for row in rows[4:]] == ["step of 2 processes"] * 3


def test_a_process_that_has_ended_is_told() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(RuntimeError, match="'together': one of 1 processes ended"):
        processes.Team([], [ours]).take("together")


def test_table_of_one_round() -> None:
    def took(seconds: float, rollout: float = 1.0) -> dict[str, float]:
        return {"seconds": seconds, "computed": seconds - 1, "time/rollout": rollout, "time/reward": 0.5}

    found = {
        "one": [took(4)], "threaded": [took(3)], "several": [took(5, 1.0), took(4, 2.0)], "apart": [took(4), took(3)],
        "alone": [{"seconds": 1.0}, {"seconds": 0.5}],
    }  # fmt: skip
    ratios = [row.ratio for row in processes.table_of([found], Shapes(images=10), processes=2)]
    together, threads, apart, computed, exchange, bare, waiting = ratios
    assert together == pytest.approx(2 * 4 / 5), "twice the images in 5 s instead of 4"
    assert threads == pytest.approx(2 * 3 / 5)
    assert apart == pytest.approx(2 * 4 / 4)
    assert computed == pytest.approx((4 + 3) / 2 / 3)
    assert exchange == pytest.approx((5 - 4) / 5)
    assert bare == pytest.approx(1 / 5)
    assert waiting == pytest.approx(1 / 5)
