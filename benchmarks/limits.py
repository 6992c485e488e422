"""What decoding cannot be faster than: the bytes that it has to read, at the speed of a copy on the same device."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.harness import Measurement, Timing, synchronise, timed
from rl_caption.captioners.base import Decoding, caption_mask
from rl_caption.captioners.modeling import CaptionTransformer
from rl_caption.captioners.replay import ReplayedGenerate
from rl_caption.captioners.transformer import TransformerCaptioner


def least_bytes(policy: CaptionTransformer, lengths: Tensor, states: int, size: int) -> int:
    """Bytes that decoding cannot but read: with every token the decoder's weights once, and all keys and values once.

    Args:
        policy: whose images are encoded already.
        lengths: [N] tokens of the captions that are decoded together; no two begin alike.
        states: of all images together, that captions look at.
        size: bytes of a number.
    """
    config, longest = policy.config, int(lengths.max())
    encoder = sum(parameter.numel() for parameter in policy.encoder.parameters())
    weights = sum(parameter.numel() for parameter in policy.parameters()) - encoder
    looked_at = longest * states + int((lengths * (lengths + 1)).sum()) // 2
    return size * (longest * weights + looked_at * 2 * config.d_model * config.decoder_layers)


def copy_bandwidth(device: str, numbers: int = 2**26, repeats: int = 5) -> float:
    """Bytes that a copy of so many float32 numbers reads and writes in a second; the best of some."""
    source = torch.ones(numbers, device=device)  # zeros may be one page that is read again and again
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(repeats + 1):
        synchronise(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / min(seconds)


def limit_rows(
    captioner: TransformerCaptioner,
    inputs: dict[str, Tensor],
    decoding: Decoding,
    accelerator: Accelerator,
    timing: Timing,
) -> list[Measurement]:
    """How near decoding the captions of B images comes to its limit, which is 1; on a GPU replayed, too."""
    policy, images, regions = captioner.policy, *inputs["region_features"].shape[:2]
    noise = torch.rand(images, decoding.num_samples, decoding.max_new_tokens, device=timing.device)
    calls = {"decode": partial(captioner.generate, policy, inputs, decoding, noise)}
    if timing.device.startswith("cuda"):
        calls["decode replayed"] = partial(ReplayedGenerate(captioner), policy, inputs, decoding, noise)
    with torch.no_grad(), accelerator.autocast():
        lengths = caption_mask(calls["decode"]().flatten(0, 1), captioner.eos_token_id).sum(-1)
        times = timed(calls, timing, "decoding")
    least = least_bytes(policy, lengths, images * regions, 4 if accelerator.mixed_precision == "no" else 2)
    bandwidth = copy_bandwidth(timing.device)
    rows = []
    for name, each in times.items():
        seconds, limit = statistics.median(each), least / bandwidth
        detail = f"{seconds:.3g} s against {limit:.3g} s for {least / 1e6:,.0f} MB at {bandwidth / 1e9:,.0f} GB/s"
        what = f"{name}, {images} images: share of the bandwidth limit"
        rows.append(Measurement(what, "the speed of a copy", limit / seconds, "of the limit", detail))
    return rows
