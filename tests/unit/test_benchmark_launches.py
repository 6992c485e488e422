"""What the benchmark of launches counts. Nothing here depends on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from benchmarks import launches
from benchmarks.device_work import counting
from benchmarks.scst_step import Shapes
from rewards.clip.student import LCLIPConfig
from tests.captioners_for_tests import SHAPE

SHAPES = Shapes(
    captioner={**SHAPE, "num_heads": 2}, words=400, regions=3, region_dim=6, images=4, prefix_images=2, samples=3,
    tokens=4,
)  # fmt: skip
STUDENT = LCLIPConfig(embed_dim=16, image_size=32, image_width=32, image_heads=4, text_width=32, text_heads=4)
FLOAT, LONG = 4, 8


@pytest.fixture(scope="module", autouse=True)
def state_of_this_file_alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state()  # other tests may have another precision


def on_host(_: Tensor) -> object:
    """Nothing here lies on the device."""
    return torch.ones(3).sum().item(), torch.ones(3).tolist()


@pytest.mark.parametrize(
    ("what", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: (x + 1).tolist(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.masked_fill(x > 0, 0.0), 0),
        (lambda x: (x > 0).nonzero(), 1),
        (lambda x: x.int().unique(), 1),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), 1),
        (lambda x: torch.tensor([], device=x.device), 0),
        (lambda x: x[torch.tensor([0, 1])], 0),
        (lambda x: x.argmax().view(1), 0),
        (on_host, 0),
    ],
)
def test_a_wait_is_whatever_the_host_needs_of_the_device(what: Callable[[Tensor], object], waits: int) -> None:
    tensor = torch.arange(-2.0, 3.0)
    with counting([tensor]) as work:
        what(tensor)
    assert work.waits == waits, work.waited


@pytest.mark.parametrize(
    ("what", "kernels", "moved"),
    [
        (lambda x: x @ x.T, 1, FLOAT * (60 + 60 + 100)),
        (lambda x: x.view(6, 10).T[1:].unsqueeze(0), 0, 0),
        (lambda x: x + 1, 1, FLOAT * 120),
        (lambda x: x.add_(1), 1, FLOAT * 120),
        (lambda x: x[:1].expand(10, 6) * 2, 1, FLOAT * (6 + 60)),  # what is repeated is read once
        (lambda x: x[torch.arange(2)], 2, LONG * 2 + FLOAT * 2 * 12),
        (lambda x: x[:2].copy_(x[2:4]), 1, FLOAT * 24),
        (lambda x: torch.empty(100, 100), 0, 0),
    ],
)
def test_kernels_and_the_bytes_they_move(what: Callable[[Tensor], object], kernels: int, moved: int) -> None:
    tensor = torch.rand(10, 6)
    with counting([tensor]) as work:
        what(tensor)
    assert (work.kernels, work.moved) == (kernels, moved), work.operators


def test_the_backward_pass_is_counted() -> None:
    weight = torch.rand(5, 5, requires_grad=True)
    loss = (weight @ weight).sum()
    with counting([weight]) as work:
        loss.backward()
    assert work.operators["aten.mm"] == 2


def test_the_table_compares_the_loops_and_decoding_with_what_must_be_read() -> None:
    rows = {row.name: row for row in launches.measure(SHAPES, "no", STUDENT)}
    kernels = rows["step, 4 images: kernels"]
    assert kernels.baseline == "generate twice, 4 images"
    assert kernels.ratio > 1
    assert rows["step, 2 images: bytes moved"].baseline == "prefix with gradient, 2 images"
    assert "0.0 waits a token" in rows["decode at fixed shapes, 4 images: bytes moved"].detail
    assert all(row.ratio > 1 for name, row in rows.items() if name.startswith("decode"))
    l_clip = rows["L-CLIPS of cached images, 16 captions: kernels"]
    assert l_clip.baseline == "step beside a replayed decode, 4 images"
    assert " 1 waits" in l_clip.detail
