"""Size and speed of L-CLIP's towers against those of CLIP ViT-B/32: the part ``size`` of ``benchmarks.l_clip``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import Measurement, Timing, Timings, faster, timed
from rewards.clip.backbone import Backbone
from rewards.clip.student import LCLIP, LCLIPConfig, trim_padding

FULL_LENGTH = 77
"""Positions of a text that is not trimmed."""
Encode = Callable[[Tensor], Tensor]


def parameters(module: nn.Module) -> int:
    """Number of weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def multiply_adds(call: Callable[[], object]) -> float:
    """Multiply-adds of a call's matrix products. Fused kernels, which the counter does not know, are opened up."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return counter.get_total_flops() / 2


def measure_size(config: LCLIPConfig, teacher: Backbone, captions: Sequence[str], timing: Timing) -> list[Measurement]:
    """Parameters, arithmetic and time of embedding pixels and token ids, an image for each caption."""
    parts, device = teacher._parts(), timing.device
    model: Any = parts.model
    factorised = LCLIP(config).to(device).eval()
    plain = LCLIP(replace(config, embedding_rank=None)).to(device).eval()
    encoders: dict[str, tuple[Encode, Encode]] = {
        "CLIP": (model.encode_image, parts.encode_text),
        "L-CLIP": (factorised.encode_image, factorised.encode_text),
        "L-CLIP, plain table": (plain.encode_image, plain.encode_text),
    }
    ids = parts.tokenizer(captions, context_length=FULL_LENGTH).to(device)
    pixels = torch.randn(len(captions), 3, config.image_size, config.image_size, device=device)
    short = trim_padding(ids)
    inputs = {"images": pixels, f"texts of {FULL_LENGTH}": ids, f"texts cut to {short.shape[1]}": short}

    counts = {
        "CLIP": parameters(model) - 1,  # without the temperature
        "L-CLIP": parameters(factorised),
        "L-CLIP, plain table": parameters(plain),
    }
    rows = [parameter_row(name, counts) for name in counts if name != "CLIP"]
    variants = {
        f"{name}: {what}": partial(towers[what != "images"], tensor)
        for name, towers in encoders.items()
        for what, tensor in inputs.items()
    }
    with torch.no_grad():
        single = {name: partial(variant.func, variant.args[0][:1]) for name, variant in variants.items()}
        rows += arithmetic_rows({name: [multiply_adds(variant)] for name, variant in single.items()})
        return rows + speed_rows(timed(variants, timing, "embedding pairs"))


def parameter_row(name: str, counts: dict[str, int]) -> Measurement:
    """How many times fewer parameters than CLIP."""
    count, whole = counts[name], counts["CLIP"]
    detail = f"{count:,} against {whole:,}; {4 * count / 1e6:.1f} MB against {4 * whole / 1e6:.1f} MB in fp32"
    paper = "; paper 2.93" if name == "L-CLIP" else ""
    return Measurement(f"{name}: parameters", "CLIP: parameters", whole / count, "x fewer", detail + paper)


def with_pairs(values: Timings) -> Timings:
    """Add what a pair takes: the image, then the text."""
    return values | {
        key.replace(": texts", ": images and texts"): [sum(both) for both in zip(values[images], texts, strict=True)]
        for key, texts in values.items()
        if ": texts" in key
        for images in (key.split(":")[0] + ": images",)
    }


def arithmetic_rows(counts: Timings) -> list[Measurement]:
    """How many times fewer multiply-adds than CLIP."""
    rows = []
    for key, (count,) in with_pairs(counts).items():
        name, what = key.split(": ")
        if name == "L-CLIP":
            (before,) = with_pairs(counts)[f"CLIP: {what}"]
            detail = f"{count / 1e9:.3g} against {before / 1e9:.3g} billion multiply-adds each"
            rows.append(Measurement(f"{key}, arithmetic", f"CLIP: {what}", before / count, "x fewer", detail))
    return rows


def speed_rows(times: Timings) -> list[Measurement]:
    """Times of one tower, and sums of both, against CLIP."""
    times = with_pairs(times)
    rows = []
    for key in times:
        name, what = key.split(": ")
        if name == "L-CLIP" or (name != "CLIP" and "texts" in what):  # the image towers of both L-CLIPs are one
            paper = "; paper 1.82" if key == f"L-CLIP: images and texts of {FULL_LENGTH}" else ""
            rows.append(faster(times, key, f"CLIP: {what}", paper))
    return rows
