"""The benchmark of growth runs every curve. No time is asserted."""

from __future__ import annotations

import pytest

from benchmarks.harness import Timing
from benchmarks.scst_step import Shapes
from benchmarks.studies import growth
from tests.captioners_for_tests import SHAPE

SIZES = growth.Sizes(
    samples=(1, 3), images=(1, 2), length=(2, 4), limit=(3, 4),
    shapes=Shapes(
        captioner={**SHAPE, "num_heads": 2}, words=40, regions=3, region_dim=6, images=2, samples=2, tokens=4
    ),
)  # fmt: skip


def test_every_curve_is_measured_against_its_smallest_size() -> None:
    rows = list(growth.measure(Timing(repeats=1), sizes=SIZES))
    assert [row.name.rsplit(": ", 1)[0] for row in rows] == [title for title, _, _ in growth.CURVES.values()]
    assert [row.name.rsplit(": ", 1)[1] for row in rows] == ["3", "2", "4", "4"]
    assert [row.baseline for row in rows] == ["1", "1", "2", "3"]
    assert all(row.ratio > 0 and "expected: " in row.detail for row in rows)


def test_each_size_is_what_the_step_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        growth,
        "our_step",
        lambda bench, batch: seen.append((len(batch.rows), bench.shapes.samples, bench.shapes.tokens)),
    )
    for name in ("samples", "images", "length", "limit"):
        for call in growth.CURVES[name][2](SIZES, "cpu").values():
            call()
    assert seen == [(2, 1, 4), (2, 3, 4), (1, 2, 4), (2, 2, 4), (2, 2, 2), (2, 2, 4), (2, 2, 3), (2, 2, 4)]
