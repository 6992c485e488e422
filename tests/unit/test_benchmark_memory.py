"""What the benchmark of memory counts. Nothing here depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks import memory
from benchmarks.harness import Timing
from benchmarks.scst_step import Bench, Shapes
from rl_caption.types import CaptionBatch
from tests.captioners_for_tests import SHAPE

SHAPES = Shapes(
    captioner={**SHAPE, "num_heads": 2}, words=400, regions=3, region_dim=6, images=10, prefix_images=2, samples=3,
    tokens=4,
)  # fmt: skip
kept: list[torch.Tensor] = []


def known_step(bench: Bench, batch: CaptionBatch) -> None:
    """At most 4000 + 8000 bytes at a time; 16,000 in all."""
    first = torch.zeros(1000)
    second = first.double()
    del first
    third = second[:500].float()
    del second, third
    torch.zeros(500)


def forgetful_step(bench: Bench, batch: CaptionBatch) -> None:
    kept.append(torch.zeros(10))


@pytest.fixture(autouse=True)
def few_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large steps, log-probabilities are taken in parts that are small beside the logits."""
    monkeypatch.setattr("rl_caption.scst.objectives.CHUNK", 4 * SHAPES.words)


@pytest.fixture(scope="module", autouse=True)
def state_of_this_file_alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state()  # other tests may have another precision


@pytest.fixture
def bench() -> Bench:
    return memory.prepared(SHAPES, "no", "cpu")


def test_bytes_of_tensors_that_are_there_at_the_same_time(bench: Bench) -> None:
    batch = bench.part(2)
    peak = memory.count_peak(known_step, bench, batch)
    assert peak.step == 12_000
    numbers = sum(parameter.numel() for parameter in bench.policy.parameters())
    each_tensor = 4 * len(list(bench.policy.parameters()))  # Adam counts its steps for each
    assert peak.held == 12 * numbers + each_tensor + sum(value.nbytes for value in batch.inputs.values())
    assert peak.total == peak.held + 12_000


def test_a_step_that_keeps_a_tensor_is_told(bench: Bench) -> None:
    with pytest.raises(RuntimeError, match="40 bytes more than it began with"):
        memory.count_peak(forgetful_step, bench, bench.part(1))


def test_bytes_of_an_image_and_a_caption_are_fitted_and_inverted() -> None:
    true = memory.UnitBytes(1000, 20, 3)
    sizes = ((2, 1), (4, 1), (2, 5))
    found = memory.fit(sizes, [int(true.at(*size)) for size in sizes])
    assert (found.fixed, found.image, found.caption) == pytest.approx((1000, 20, 3))
    assert true.largest(1000 + 10 * (20 + 5 * 3), samples=5) == 10
    assert true.largest(10, samples=5) == 0


def test_small_steps_predict_a_larger_one() -> None:
    rows = list(memory.measure(Timing(repeats=1), SHAPES, ["no"], small=((4, 2), (7, 2), (4, 4))))
    lengths = 1 if SHAPES.length >= SHAPES.tokens else 2
    assert [row.baseline for row in rows[:2]] == ["generate twice", "prefix with gradient"]
    assert all(row.ratio > 1 for row in rows[: 2 * lengths]), "the step of the package needs least"
    predicted = [row.ratio for row in rows if row.baseline == "predicted from small steps"]
    assert predicted == pytest.approx([1, 1], rel=0.02)
    assert [row.name.split(" GB")[0].split()[-1] for row in rows[-3:]] == ["24", "80", "141"]


def test_another_precision_in_the_same_process() -> None:
    peaks = {}
    for precision in memory.PRECISIONS:
        bench = memory.prepared(SHAPES, precision, "cpu")
        peaks[precision] = memory.count_peak(memory.our_step, bench, bench.part(10))
        assert bench.accelerator.mixed_precision == precision
    assert peaks["bf16"].held == peaks["no"].held
