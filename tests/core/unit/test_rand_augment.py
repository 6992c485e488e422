"""RandAugment: each operation is torchvision's, all of them are drawn, and a view
depends on its arguments alone.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from rl_caption.data import rand_augment as module
from rl_caption.data.rand_augment import (
    NUM_OPERATIONS,
    OPERATIONS,
    STRENGTH,
    apply_operation,
    rand_augment,
)
from tests.clip_for_tests import noise_image

SIDE = 224


def photo():
    """Smooth and noisy, and not of full contrast, so that every operation shows."""
    ramp = np.linspace(30, 200, SIDE)[:, None, None] * np.ones((SIDE, SIDE, 3))
    noise = np.asarray(noise_image(3, (SIDE, SIDE)), dtype=float) / 8
    return Image.fromarray((ramp + noise).astype(np.uint8))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_that_of_torchvision(operation, sign):
    autoaugment = pytest.importorskip("torchvision.transforms.autoaugment")
    space = autoaugment.RandAugment(
        num_ops=4, magnitude=9, num_magnitude_bins=31
    )._augmentation_space(31, (SIDE, SIDE))
    magnitudes, signed = space[operation]
    magnitude = float(magnitudes[9]) if magnitudes.ndim else 0.0
    nearest = autoaugment.InterpolationMode.NEAREST
    image = photo()
    theirs = autoaugment._apply_op(
        image, operation, magnitude * (sign if signed else 1), nearest, None
    )
    ours = apply_operation(image, operation, sign * STRENGTH)
    assert ours.tobytes() == theirs.tobytes()
    assert (ours.tobytes() == image.tobytes()) == (operation == "Identity")


def test_a_view_is_four_of_all_operations_by_seed_step_and_image(monkeypatch):
    drawn = []

    def recorded(image, operation, strength):
        drawn.append((operation, strength / STRENGTH))
        return apply_operation(image, operation, strength)

    monkeypatch.setattr(module, "apply_operation", recorded)
    square = torch.from_numpy(np.array(photo().resize((32, 32)))).permute(2, 0, 1)
    before = square.clone()
    rand_augment(square, 1, 4, "a")
    assert drawn[:2] == [("ShearY", 1), ("Contrast", -1)], "in every process"
    assert drawn[2:] == [("Identity", 1), ("Brightness", 1)]
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    assert len({rand_augment(square, *key).numpy().tobytes() for key in keys}) == 4
    drawn.clear()
    views = [rand_augment(square, 0, step, "a") for step in range(300)]
    assert torch.equal(square, before)
    assert {(view.shape, view.dtype) for view in views} == {(square.shape, torch.uint8)}
    assert len(drawn) == 300 * NUM_OPERATIONS
    counts = Counter(drawn)
    assert set(counts) == {(name, sign) for name in OPERATIONS for sign in (1, -1)}
    assert min(counts.values()) > 20
