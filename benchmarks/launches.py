"""What a step asks of a GPU, counted without one: kernels to start, times the host waits for the device, bytes moved.

    python -m benchmarks.launches [--precision bf16] [--images 50] [--json FILE]

A GPU is slowed down less by arithmetic than by what is counted here: small kernels cost some microseconds each to
start, a value that the host looks at empties the queue, and decoding is bound by the bytes that its kernels read and
write. How it is counted: ``benchmarks.device_work``. Attention is the fused one; the optimizer's update, which is the
same for every loop, is left out. The loops are those of ``benchmarks.scst_step``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.cider import token_ids
from benchmarks.device_work import Work, counting
from benchmarks.harness import Measurement, report
from benchmarks.l_clip import caption_words, random_captions
from benchmarks.limits import least_bytes
from benchmarks.scst_step import Bench, Shapes, add_sizes, build_bench, generate_step, our_step, prefix_step
from rewards.clip.backbone import load_backbone
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.reference_bank import Bank
from rl_caption.scst.rollout import sample_captions
from rl_caption.types import CaptionBatch


def count(step: Callable[[Bench, CaptionBatch], object], bench: Bench, batch: CaptionBatch, *known: Tensor) -> Work:
    """Work of a step; ``known`` lie on the device too."""
    with counting([*bench.policy.parameters(), *batch.inputs.values(), *known]) as work:
        step(bench, batch)
    return work


def measure(shapes: Shapes, precision: str, student: LCLIPConfig | None = None) -> list[Measurement]:
    """Counts of the three steps, of decoding alone, and of rewards."""
    bench = build_bench(shapes, "cpu", precision)
    torch.backends.cuda.enable_flash_sdp(True)  # as on a GPU
    bench.updates = False
    whole, few = bench.part(shapes.images), bench.part(shapes.prefix_images)
    at, at_few = f"{shapes.images} images", f"{shapes.prefix_images} images"
    drawn = sample_captions(bench.captioner, bench.policy, whole, bench.decoding, 0, 0)
    tokens = torch.cat([drawn.token_ids, drawn.greedy_token_ids.unsqueeze(1)], 1)  # type: ignore[union-attr]
    replayed = partial(our_step, generate=lambda *_: tokens)  # one launch, which is not counted
    generate, prefix = count(generate_step, bench, whole), count(prefix_step, bench, few)
    beside = count(replayed, bench, whole, tokens)
    return [
        *against(f"step, {at}", count(our_step, bench, whole), f"generate twice, {at}", generate),
        *against(f"step beside a replayed decode, {at}", beside, f"generate twice, {at}", generate)[:2],
        *against(f"step, {at_few}", count(our_step, bench, few), f"prefix with gradient, {at_few}", prefix),
        *decoding_rows(bench, precision),
        *reward_rows(shapes, student or LCLIPConfig(), f"step beside a replayed decode, {at}", beside),
    ]


def reward_rows(shapes: Shapes, student: LCLIPConfig, name: str, step: Work) -> list[Measurement]:
    """Kernels of what scores the captions of a step on the device, against those of the rest of the step."""
    each, words = shapes.samples + 1, caption_words(shapes.words)
    captions = random_captions(words, shapes.images * each, seed=0)
    found = {"CIDEr-D": count_cider(captions, each), "L-CLIPS of cached images": count_l_clip(captions, student)}
    return [
        Measurement(
            f"{reward}, {len(captions)} captions: kernels", name, work.kernels / step.kernels, "x",
            f"{work.kernels:,} against {step.kernels:,}; {work.waits} waits, {work.moved / 1e6:,.0f} MB moved",
        )
        for reward, work in found.items()
    ]  # fmt: skip


def count_cider(captions: Sequence[str], each: int) -> Work:
    """Work of CIDEr-D from token ids where they are; ``each`` captions of every image, which are its references too."""
    images = [tuple(captions[start : start + each][:5]) for start in range(0, len(captions), each)]
    tokens = [[text.split() for text in own] for own in images]
    reward = CiderD(DocumentFrequencies.from_references(tokens, eos=True))
    ids = token_ids(captions, reward)
    packed, scorer = reward._packed, reward._tokens  # by hand: on a CPU the reward would take NumPy's arrays
    assert packed is not None
    assert scorer is not None
    bank = Bank.of(packed.references(images, reward._reference_tokens))
    owner, ended = np.arange(len(captions)) // each, np.ones(len(captions), bool)
    with counting([ids]) as work:
        scorer.on_device(ids, ended, owner, bank)
    work.waits = 1  # the scores; the square root that is NumPy's on a CPU is torch's on a GPU
    return work


def count_l_clip(captions: Sequence[str], config: LCLIPConfig) -> Work:
    """Work of embedding captions by L-CLIP; the images' embeddings are there."""
    with tempfile.TemporaryDirectory() as folder:
        LCLIP(config).save_pretrained(folder)
        encoder = load_backbone(folder)
    with counting(list(encoder._parts().model.parameters())) as work:
        encoder.encode_texts(captions)
    return work


def decoding_rows(bench: Bench, precision: str) -> list[Measurement]:
    """Kernels, waits and bytes of decoding, as a tree and at fixed shapes."""
    shapes, batch = bench.shapes, bench.batch
    rows, noise = [], torch.rand(shapes.images, shapes.samples, shapes.tokens)
    for name, decoding in (("", bench.decoding), (" at fixed shapes", replace(bench.decoding, fixed_shapes=True))):
        on_device = [*bench.policy.parameters(), *batch.inputs.values(), noise]
        with torch.no_grad(), bench.accelerator.autocast(), counting(on_device) as work:
            tokens = bench.captioner.generate(bench.policy, batch.inputs, decoding, noise).shape[-1]
        lengths = torch.full((shapes.images * (shapes.samples + 1),), tokens)
        least = least_bytes(bench.policy, lengths, shapes.images * shapes.regions, 4 if precision == "no" else 2)
        detail = (
            f"{work.moved / 1e6:,.0f} MB against {least / 1e6:,.0f} MB in {tokens} tokens; "
            f"{work.kernels / tokens:.0f} kernels and {work.waits / tokens:.1f} waits a token"
        )
        what = f"decode{name}, {shapes.images} images: bytes moved"
        rows.append(Measurement(what, "reading weights, keys and values once a token", work.moved / least, "x", detail))
    return rows


def against(name: str, ours: Work, baseline: str, theirs: Work) -> list[Measurement]:
    """Three rows: what each of two loops asks for."""
    counts = {
        "kernels": (ours.kernels, theirs.kernels, ""),
        "waits for the device": (ours.waits, theirs.waits, ""),
        "bytes moved": (ours.moved / 1e6, theirs.moved / 1e6, " MB"),
    }
    return [
        Measurement(
            f"{name}: {what}", baseline, before / max(after, 1), "x fewer", f"{after:,.0f} against {before:,.0f}{unit}"
        )
        for what, (after, before, unit) in counts.items()
    ]


def main(arguments: Sequence[str] | None = None, shapes: Shapes | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = shapes or Shapes()
    add_sizes(parser, defaults)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no", help="of autocast")
    parser.add_argument("--json", type=Path, help="file for the rows, a list of objects")
    chosen = parser.parse_args(arguments)
    names = ("images", "prefix_images", "samples")
    shapes = replace(defaults, **{name: getattr(chosen, name) for name in names})
    report([measure(shapes, chosen.precision)], chosen.json, "cpu")


if __name__ == "__main__":
    main()
