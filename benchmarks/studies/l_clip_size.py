"""Parameters, arithmetic and speed of L-CLIP's towers against those of CLIP ViT-B/32 (docs/l_clip.md).

    python -m benchmarks.studies.l_clip_size [--device cuda] [--pairs 128] [--json FILE]

Random weights; time is that of embedding pairs of an image and a caption, given as pixels and token ids.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Measurement, Timing, Timings, command, compared, timed
from benchmarks.l_clip import Shapes, caption_words, load_encoders, random_captions
from rewards.clip.student import LCLIP
from rl_caption.lab.meta_evaluation.costs import count_operations

FULL_LENGTH = 77
"""Tokens of a padded text."""
Encode = Callable[[Tensor], Tensor]


def multiply_adds(call: Callable[[], object]) -> float:
    """Multiply-adds of a call's matrix products."""
    return count_operations(call) / 2


def with_pairs(values: Timings) -> Timings:
    """Add to each model's ``images`` and ``texts ...`` their sums, ``images and texts ...``."""
    sums = {}
    for key, texts in values.items():
        name, what = key.split(": ")
        if what != "images":
            sums[f"{name}: images and {what}"] = [
                sum(both) for both in zip(values[f"{name}: images"], texts, strict=True)
            ]
    return values | sums


@torch.no_grad()
def measure(
    timing: Timing, shapes: Shapes | None = None, pairs: int = 128
) -> Iterator[Measurement]:
    """Rows of parameters, arithmetic and time; the plain word table is the student without factorised embedding."""
    shapes, device = shapes or Shapes(), timing.device
    with tempfile.TemporaryDirectory() as folder:
        teacher, _ = load_encoders(shapes, Path(folder), device)
        parts = teacher._network()
    model: Any = parts.model
    student = LCLIP(shapes.student).to(device).eval()
    plain = LCLIP(replace(shapes.student, embedding_rank=None)).to(device).eval()
    total = sum(weight.numel() for weight in model.parameters()) - 1  # without the temperature
    for name, network in {"L-CLIP": student, "L-CLIP, plain table": plain}.items():
        count = sum(weight.numel() for weight in network.parameters())
        detail = f"{count:,} against {total:,}; {4 * count / 1e6:.1f} MB against {4 * total / 1e6:.1f} MB in fp32"
        yield Measurement(
            f"{name}: parameters", "CLIP: parameters", total / count, "x fewer", detail
        )

    encoders: dict[str, tuple[Encode, Encode]] = {
        "CLIP": (model.encode_image, parts.encode_text),
        "L-CLIP": (student.encode_image, student.encode_text),
        "L-CLIP, plain table": (plain.encode_image, plain.encode_text),
    }
    captions = random_captions(caption_words(shapes.step.words), pairs, seed=0)
    ids = parts.tokenize(captions).to(device)
    pixels = torch.randn(
        pairs, 3, shapes.student.image_size, shapes.student.image_size, device=device
    )
    short = ids[:, : int(ids.argmax(dim=-1).max()) + 1]  # cut after the last EOT
    inputs = {
        "images": pixels,
        f"texts of {FULL_LENGTH}": ids,
        f"texts cut to {short.shape[1]}": short,
    }
    variants = {
        f"{name}: {what}": partial(towers[what != "images"], tensor)
        for name, towers in encoders.items()
        for what, tensor in inputs.items()
    }
    single = {name: partial(call.func, call.args[0][:1]) for name, call in variants.items()}
    counts = with_pairs({name: [multiply_adds(call)] for name, call in single.items()})
    times = with_pairs(timed(variants, timing, "embedding pairs"))
    for key, (count,) in counts.items():
        name, what = key.split(": ")
        if name == "L-CLIP":
            (before,) = counts[f"CLIP: {what}"]
            detail = f"{count / 1e9:.3g} against {before / 1e9:.3g} billion multiply-adds each"
            yield Measurement(
                f"{key}, arithmetic", f"CLIP: {what}", before / count, "x fewer", detail
            )
    for key in times:
        name, what = key.split(": ")
        if name == "L-CLIP" or (
            name != "CLIP" and "texts" in what
        ):  # the image towers of both L-CLIPs are one
            yield compared(times, key, f"CLIP: {what}")


if __name__ == "__main__":
    command(__doc__, measure, pairs=128)
