"""The benchmark of growth runs every curve. No time is asserted."""

from __future__ import annotations

import pytest

from benchmarks.harness import Timing
from benchmarks.scst_step import Shapes
from benchmarks.studies import growth
from rewards.text.document_frequency import DocumentFrequencies
from tests.captioners_for_tests import SHAPE

SIZES = growth.Sizes(
    samples=(1, 3), images=(1, 2), length=(2, 4), limit=(3, 4), references=(1, 2), dataset=(50, 60),
    shapes=Shapes(
        captioner={**SHAPE, "num_heads": 2}, words=40, regions=3, region_dim=6, images=2, samples=2, tokens=4
    ),
)  # fmt: skip


def test_every_curve_is_measured_against_its_smallest_size() -> None:
    rows = list(growth.measure(Timing(repeats=1), sizes=SIZES))
    assert [row.name.rsplit(": ", 1)[0] for row in rows] == [title for title, _, _ in growth.CURVES.values()]
    assert [row.name.rsplit(": ", 1)[1] for row in rows] == ["3", "2", "4", "4", "2", "60", "60"]
    assert [row.baseline for row in rows] == ["1", "1", "2", "3", "1", "50", "50"]
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


def test_more_references_and_more_training_images_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    class Reward:
        def __init__(self, df: DocumentFrequencies) -> None:
            self.df = df

        def __call__(self, prompts: None, completions: list[str], references: list[list[str]]) -> None:
            seen.append((len(references[0]), self.df.documents))

    monkeypatch.setattr(growth, "CiderD", Reward)
    monkeypatch.setattr(growth, "TIMES", 1)
    for name in ("references", "dataset"):
        for call in growth.CURVES[name][2](SIZES, "cpu").values():
            call()
    assert seen == [(1, 50), (2, 50), (5, 50), (5, 60)]
    counted: list[DocumentFrequencies] = [call() for call in growth.start_up(SIZES, "cpu").values()]  # type: ignore[misc]
    assert [df.documents for df in counted] == [50, 60]
