"""Which precision a training computes in."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from rl_caption.launch import accelerator_kwargs


def asked_precision(train: str, environment: Mapping[str, str] = os.environ) -> str:
    """``train.mixed_precision``, or what ``accelerate launch`` was asked for where that is ``no`` or ``auto``.

    Raises:
        ValueError: both ask for a mixed precision, and not for the same, or the launcher for one not known here.
    """
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched in ("", "no") or launched == train:
        return train
    if launched not in ("bf16", "fp16"):
        raise ValueError(f"mixed_precision {launched!r} of accelerate launch is not supported: use no, bf16 or fp16")
    if train not in ("no", "auto"):
        raise ValueError(f"train.mixed_precision is {train}, but accelerate launch was asked for {launched}: set one")
    return launched


def usable_precision(wanted: str) -> str:
    """``wanted``, or for ``auto`` what is fast here: ``bf16`` on a GPU or a CPU that computes with it, else ``no``.

    A GPU has it from NVIDIA's Ampere on; a CPU with AVX512-BF16 or AMX. Others only imitate it, slowly.
    """
    if wanted != "auto":
        return wanted
    device = torch.accelerator.current_accelerator()
    if device is not None and device.type == "cuda" and "cpu" not in accelerator_kwargs():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "no"
