"""Batches go to page-locked memory, where the loader is asked for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from rl_caption.reward_models.batch import PairBatch
from rl_caption.types import CaptionBatch

ROWS = [{"image_id": "a", "references": ["a dog"]}]
PIXELS, IDS, MASK = torch.zeros(1, 3, 2, 2), torch.ones(1, 1, 4, dtype=torch.long), torch.ones(1, 1, 4) > 0


@pytest.mark.parametrize(
    "batch",
    [
        CaptionBatch(ROWS, {"pixel_values": PIXELS}),
        CaptionBatch(ROWS, {"pixel_values": PIXELS}, IDS, MASK),
        PairBatch(ROWS, {"image": PIXELS, "text": IDS[0]}, ["a dog"], {"triplet": MASK[0, 0]}),
    ],
)
def test_the_loader_pins_every_tensor_of_a_batch(
    batch: CaptionBatch | PairBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:  # no GPU is needed
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    found = pin_memory(batch)
    assert type(found) is type(batch)
    tensors = [*found.inputs.values()]
    tensors += [*found.targets.values()] if isinstance(found, PairBatch) else [found.targets, found.target_mask]
    tensors = [tensor for tensor in tensors if tensor is not None]
    assert len(tensors) == len(pinned)
    assert all(any(tensor is one for one in pinned) for tensor in tensors)
    assert found.rows is batch.rows
