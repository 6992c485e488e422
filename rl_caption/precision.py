"""Which precision a device computes with fast."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_caption.launch import accelerator_kwargs


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
