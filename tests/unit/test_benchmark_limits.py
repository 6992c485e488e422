"""What decoding is compared with. No time is asserted."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from benchmarks.harness import Timing
from benchmarks.limits import copy_bandwidth, least_bytes, limit_rows
from rl_caption.captioners.base import Decoding
from tests.captioners_for_tests import region_inputs, tiny_captioner


def test_bytes_that_cannot_but_be_read() -> None:
    policy = tiny_captioner(input_kind="regions", feature_dim=6).policy
    decoder = sum(p.numel() for name, p in policy.named_parameters() if not name.startswith("encoder."))
    both = 2 * policy.config.d_model * policy.config.decoder_layers  # keys and values of a token or a state, all layers
    # Two captions of 3 and 1 tokens look at 1 + 2 + 3 and 1 tokens; each of 3 times, all 12 states are looked at.
    assert least_bytes(policy, torch.tensor([3, 1]), 12, 4) == 4 * (3 * decoder + (3 * 12 + 6 + 1) * both)
    assert least_bytes(policy, torch.tensor([3, 1]), 12, 2) * 2 == least_bytes(policy, torch.tensor([3, 1]), 12, 4)


def test_a_decode_is_compared_with_the_speed_of_a_copy() -> None:
    captioner = tiny_captioner(input_kind="regions", feature_dim=6)
    captioner.policy.eval()
    decoding = Decoding(num_samples=2, max_new_tokens=4)
    (row,) = limit_rows(captioner, region_inputs(3), decoding, Accelerator(cpu=True), Timing(repeats=1))
    assert row.name == "decode, 3 images: share of the bandwidth limit"
    assert 0 < row.ratio < 1
    assert copy_bandwidth("cpu", numbers=1000, repeats=1) > 0
