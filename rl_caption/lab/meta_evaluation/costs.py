"""What a dual encoder costs: parameters, arithmetic and time.

The L-CLIPScore paper prints parameters, size and milliseconds for a batch of 128 pairs (table I),
the SPECS paper operations of one pair (table 2).
"""

import time
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rewards.clip.backbone import FrozenEncoder

PAIRS = 128
"""Pairs of a batch that is timed."""
REPEATS = 3
"""Batches that are timed, of which the fastest counts, after one that is not."""


class EncoderCost(NamedTuple):
    """Cost of embedding pairs of an image and a caption of full length, given as pixels and text."""

    parameters: int
    """Including the temperature."""
    half_mib: float
    """Size of the parameters with 2 bytes each, in MiB."""
    teraflops: float
    """Floating-point operations of the matrix products of one pair, times 1e-12; a multiply-add
    counts 2.
    """
    milliseconds: float
    """Time of a batch of ``PAIRS`` pairs."""


@cache
def encoder_cost(
    backbone: FrozenEncoder, pairs: int = PAIRS, repeats: int = REPEATS
) -> EncoderCost:
    """Measure a dual encoder on its own device; its texts fill the context."""
    size, text = backbone.preprocessing.size, "a " * backbone.context_length

    def embed(count: int) -> float:
        start = time.perf_counter()
        backbone.encode_pixels(torch.zeros(count, 3, size, size)).cpu()
        backbone.encode_texts([text] * count)
        return time.perf_counter() - start

    parameters = sum(parameter.numel() for parameter in backbone.model.parameters())
    # Fused kernels, which the counter does not know, are turned off meanwhile.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            embed(1)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    operations = counter.get_total_flops()
    embed(pairs)
    seconds = min(embed(pairs) for _ in range(repeats))
    return EncoderCost(
        parameters, 2 * parameters / 2**20, operations / 1e12, 1000 * seconds
    )
