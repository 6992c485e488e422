"""RandAugment: each operation is torchvision's, all of them are drawn, and a view depends on its arguments alone."""

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_caption.data import rand_augment as module
from rl_caption.data.rand_augment import NUM_OPERATIONS, OPERATIONS, STRENGTH, operated, rand_augment
from tests.clip_for_tests import noise_image

SIDE = 224
VIEW = """
import torch
from rl_caption.data.rand_augment import rand_augment
square = (torch.arange(3 * 32 * 32) % 251).reshape(3, 32, 32).to(torch.uint8)
print([rand_augment(square, 1, step, "a").sum(dim=(1, 2)).tolist() for step in range(6)])
"""


def photo() -> Image.Image:
    """Smooth and noisy, and not of full contrast, so that every operation shows."""
    ramp = np.linspace(30, 200, SIDE)[:, None, None] * np.ones((SIDE, SIDE, 3))
    noise = np.asarray(noise_image(3, (SIDE, SIDE)), dtype=float) / 8
    return Image.fromarray((ramp + noise).astype(np.uint8))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_that_of_torchvision(operation: str, sign: int) -> None:
    autoaugment = pytest.importorskip("torchvision.transforms.autoaugment")
    space = autoaugment.RandAugment(num_ops=4, magnitude=9, num_magnitude_bins=31)._augmentation_space(31, (SIDE, SIDE))
    magnitudes, signed = space[operation]
    magnitude = float(magnitudes[9]) if magnitudes.ndim else 0.0
    nearest = autoaugment.InterpolationMode.NEAREST
    image = photo()
    theirs = autoaugment._apply_op(image, operation, magnitude * (sign if signed else 1), nearest, None)
    ours = operated(image, operation, sign * STRENGTH)
    assert ours.tobytes() == theirs.tobytes()
    assert (ours.tobytes() == image.tobytes()) == (operation == "Identity")


def test_a_view_is_four_of_all_operations_up_and_down(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, float]] = []

    def recorded(image: Image.Image, operation: str, strength: float) -> Image.Image:
        drawn.append((operation, strength))
        return operated(image, operation, strength)

    monkeypatch.setattr(module, "operated", recorded)
    square = torch.from_numpy(np.array(photo().resize((32, 32)))).permute(2, 0, 1)
    before = square.clone()
    views = [rand_augment(square, 0, step, "a") for step in range(300)]
    assert torch.equal(square, before)
    assert {(view.shape, view.dtype) for view in views} == {(square.shape, torch.uint8)}
    assert len(drawn) == 300 * NUM_OPERATIONS
    counts = Counter(drawn)
    assert set(counts) == {(name, sign * STRENGTH) for name in OPERATIONS for sign in (1, -1)}
    assert min(counts.values()) > 20


def test_a_view_is_the_same_in_every_process_and_another_for_every_seed_step_and_image(capsys: Any) -> None:
    there = subprocess.run([sys.executable, "-c", VIEW], capture_output=True, text=True, check=True).stdout
    exec(VIEW, {})
    assert capsys.readouterr().out == there
    assert len({str(row) for row in eval(there)}) > 3
    square = torch.from_numpy(np.array(photo().resize((32, 32)))).permute(2, 0, 1)
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    assert len({rand_augment(square, *key).numpy().tobytes() for key in keys}) == 4
