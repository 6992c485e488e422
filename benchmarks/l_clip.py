"""Size and speed of L-CLIP against the CLIP ViT-B/32 it is distilled from, and what it costs as a reward.

    python -m benchmarks.l_clip [--device cuda] [--only size step reward] [--json FILE]

Three parts, one table; every row is a ratio against a baseline of the same run:

- size: parameters, arithmetic, and time of embedding 128 image-caption pairs that are pixels and token ids already.
- step: a self-critical step of a Transformer captioner over region features, with CIDEr-D alone and with L-CLIPS.
- reward: scoring 300 captions of 50 JPEG files, tokenisation and decoding of the images included.

All weights are random, which costs the same time as trained ones. Variants are timed in turn, one of each a round, and
the first round is not counted. A ratio is the median over rounds of the ratio within a round, a time that over rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import (
    Measurement,
    Timing,
    Timings,
    add_timing,
    faster,
    paired,
    report,
    synchronise,
    timed,
    timing_of,
)
from benchmarks.loading import write_images
from rewards.clip.backbone import Backbone, load_backbone
from rewards.clip.student import LCLIP, LCLIPConfig, trim_padding
from rewards.clipscore import ClipScore
from rewards.l_clipscore import LClipScore
from rewards.mixed import MixedReward
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import tokenize
from rl_caption.advantages import leave_one_out
from rl_caption.captioners.base import Decoding
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.data.base import Row
from rl_caption.data.loader import Collate
from rl_caption.scst import SelfCriticalTask

PARTS = ("size", "step", "reward")
FULL_LENGTH = 77
"""Positions of a text that is not trimmed."""
FULL, CACHED, TRIMMED = "full forward", "images cached", "images cached, text trimmed"


@dataclass(frozen=True)
class Shapes:
    """What is measured. The defaults are the L-CLIPScore paper's models and a captioner of the usual size."""

    teacher: str = "ViT-B-32-quickgelu"
    student: LCLIPConfig = field(default_factory=LCLIPConfig)
    captioner: dict[str, Any] = field(default_factory=dict)
    """Differences from ``CaptionTransformerConfig``: 6 + 6 layers of width 512."""
    words: int = 10_000
    regions: int = 36
    region_dim: int = 2048
    max_new_tokens: int = 20
    pairs: int = 128
    images: int = 50
    captions: int = 6


@dataclass(frozen=True)
class Settings(Timing):
    """How it is measured."""

    images: int = 10
    """Images of a self-critical step."""
    samples: int = 5


Encode = Callable[[Tensor], Tensor]


# Inputs: random words of CLIP's vocabulary, JPEG files of coloured blots, random region features.


def caption_words(count: int) -> list[str]:
    """Words that CLIP reads as one token each, the most frequent first."""
    entries = (entry.removesuffix("</w>") for entry in open_clip.SimpleTokenizer().encoder if entry.endswith("</w>"))
    words = [word for word in entries if word.isascii() and word.isalpha() and len(word) > 2]
    return words[:count]


def random_captions(words: Sequence[str], count: int, seed: int) -> list[str]:
    """Captions of 7 to 20 words; the longest of many has 22 tokens of CLIP, start and end included."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(words, draw.integers(7, 21))) for _ in range(count)]


def load_encoders(shapes: Shapes, folder: Path, device: str) -> tuple[Backbone, Backbone]:
    """Teacher and student with random weights, through files as trained ones would be."""
    torch.manual_seed(0)
    weights = open_clip.create_model(shapes.teacher, load_weights=False).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "teacher.safetensors")
    LCLIP(shapes.student).save_pretrained(folder / "student")
    teacher = load_backbone(shapes.teacher, str(folder / "teacher.safetensors"), device)
    return teacher, load_backbone(str(folder / "student"), device=device)


def untrimmed(encoder: Backbone) -> Backbone:
    """The same encoder at its full context. Trimming changes no score, so no public option turns it off."""
    full = copy.copy(encoder)
    full._loaded = replace(encoder._parts(), trims=False)
    return full


# Part 1: size and speed of the models.


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


def measure_size(shapes: Shapes, teacher: Backbone, settings: Settings) -> list[Measurement]:
    """Parameters, arithmetic and time of embedding pixels and token ids."""
    parts, device = teacher._parts(), settings.device
    model: Any = parts.model
    factorised = LCLIP(shapes.student).to(device).eval()
    plain = LCLIP(replace(shapes.student, embedding_rank=None)).to(device).eval()
    encoders: dict[str, tuple[Encode, Encode]] = {
        "CLIP": (model.encode_image, parts.encode_text),
        "L-CLIP": (factorised.encode_image, factorised.encode_text),
        "L-CLIP, plain table": (plain.encode_image, plain.encode_text),
    }
    captions = random_captions(caption_words(shapes.words), shapes.pairs, seed=0)
    ids = parts.tokenizer(captions, context_length=FULL_LENGTH).to(device)
    size = shapes.student.image_size
    pixels = torch.randn(shapes.pairs, 3, size, size, device=device)
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
        return rows + speed_rows(timed(variants, settings, "embedding pairs"))


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


# Part 2: a self-critical step.


def caption_rows(shapes: Shapes, folder: Path, images: Sequence[Path], words: Sequence[str]) -> list[Row]:
    """Images with five references and region features each."""
    draw = np.random.default_rng(1)
    rows: list[Row] = []
    for number, image in enumerate(images):
        features = folder / f"{number}.npy"
        np.save(features, draw.standard_normal((shapes.regions, shapes.region_dim), dtype=np.float32))
        references = random_captions(words, 5, seed=number)
        rows.append({"image_id": str(number), "image": str(image), "references": references, "features": str(features)})
    return rows


def step_rewards(rows: Sequence[Row], student: Backbone) -> dict[str, Callable[[], MixedReward]]:
    """The rewards of a step; one that is made anew has no cached embeddings."""
    references = ([tokenize(caption) for caption in row["references"]] for row in rows)
    cider: Any = CiderD(DocumentFrequencies.from_references(references, eos=True))

    def mixed(encoder: Backbone) -> MixedReward:
        l_clips: Any = LClipScore(encoder)
        return MixedReward({"cider": (cider, 0.5), "l_clipscore": (l_clips, 0.5)})

    alone, cached, trimmed = MixedReward({"cider": (cider, 1.0)}), mixed(untrimmed(student)), mixed(student)
    return {
        "CIDEr-D": lambda: alone,
        f"CIDEr-D + L-CLIPS, {FULL}": lambda: mixed(untrimmed(student)),
        f"CIDEr-D + L-CLIPS, {CACHED}": lambda: cached,
        f"CIDEr-D + L-CLIPS, {TRIMMED}": lambda: trimmed,
    }


def measure_step(
    shapes: Shapes, rows: Sequence[Row], student: Backbone, words: Sequence[str], settings: Settings
) -> list[Measurement]:
    """Whole steps: sampling, reward, scoring with gradient, clipping, Adam (learning rate 0: all steps are alike)."""
    torch.manual_seed(0)
    captioner = TransformerCaptioner.from_scratch(
        [[" ".join(words)]], min_count=1, input_kind="regions", feature_dim=shapes.region_dim, **shapes.captioner
    )
    accelerator = Accelerator(cpu=settings.device == "cpu")
    policy = captioner.policy.to(accelerator.device).train()
    batch = Collate(captioner)([(row, 0) for row in rows]).to(accelerator.device)
    decoding = Decoding(num_samples=settings.samples, with_greedy=False, max_new_tokens=shapes.max_new_tokens)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.0)
    logs: dict[str, list[dict[str, float]]] = {}

    def step(name: str, make_reward: Callable[[], MixedReward]) -> None:
        started, reward = time.perf_counter(), make_reward()
        task = SelfCriticalTask(accelerator, captioner, policy, reward, leave_one_out, decoding)
        optimizer.zero_grad()
        log = task.training_step([batch], step=0)
        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        synchronise(settings.device)
        log.add("time/step", time.perf_counter() - started)
        logs.setdefault(name, []).append(log.reduce(accelerator))

    variants = {name: partial(step, name, make) for name, make in step_rewards(rows, student).items()}
    times = timed(variants, settings, "self-critical steps")
    counted = {name: found[1:] for name, found in logs.items()}
    return step_rows(times, counted, f"{len(rows)} x {settings.samples} captions")


def step_rows(times: Timings, logs: dict[str, list[dict[str, float]]], batch: str) -> list[Measurement]:
    """Time of the step against CIDEr-D alone, then the reward's share of each step."""
    plain, *others = times
    rows = []
    for name in others:
        ratios = paired(times[name], times[plain])
        seconds, before = statistics.median(times[name]), statistics.median(times[plain])
        detail = f"{seconds:.3g} s against {before:.3g} s, {batch}; rounds {min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(Measurement(f"step: {name}", f"step: {plain}", statistics.median(ratios), "x the time", detail))
    for name, found in logs.items():
        reward, rollout, step = ([log[f"time/{part}"] for log in found] for part in ("reward", "rollout", "step"))
        share = statistics.median(paired(reward, step))
        detail = (
            f"reward {statistics.median(reward):.3g} s, sampling {statistics.median(rollout):.3g} s, "
            f"whole step {statistics.median(step):.3g} s, {found[0]['completion/length']:.0f} tokens a caption"
        )
        rows.append(Measurement(f"reward's share: {name}", "whole step", share, "of the time", detail))
    return rows


# Part 3: the reward alone.


def reward_variants(
    shapes: Shapes, images: Sequence[Path], words: Sequence[str], teacher: Backbone, student: Backbone
) -> dict[str, Callable[[], list[float]]]:
    """Scoring every caption of every image; one that is made anew has no cached embeddings."""
    captions = random_captions(words, len(images) * shapes.captions, seed=2)
    column = [str(path) for path in images for _ in range(shapes.captions)]

    def score(make_reward: Callable[[], ClipScore]) -> list[float]:
        return make_reward()(None, captions, image=column)

    def kept(encoder: Backbone) -> Callable[[], ClipScore]:
        reward = ClipScore(encoder, prefix="")
        return lambda: reward

    variants: dict[str, Callable[[], list[float]]] = {}
    for name, encoder in (("CLIPScore", teacher), ("L-CLIPScore", student)):
        long = untrimmed(encoder)
        variants[f"{name}, {FULL}"] = partial(score, partial(ClipScore, long, prefix=""))
        variants[f"{name}, {CACHED}"] = partial(score, kept(long))
        variants[f"{name}, {TRIMMED}"] = partial(score, kept(encoder))
    return variants


def measure_reward(
    shapes: Shapes,
    images: Sequence[Path],
    words: Sequence[str],
    teacher: Backbone,
    student: Backbone,
    settings: Settings,
) -> list[Measurement]:
    """Time of one call for all captions: L-CLIPScore against CLIPScore alike, and both against their full forward."""
    times = timed(reward_variants(shapes, images, words, teacher, student), settings, "rewards")
    note = f"; {len(images) * shapes.captions} captions of {len(images)} images"
    rows = [faster(times, f"L-CLIPScore, {how}", f"CLIPScore, {how}", note) for how in (FULL, CACHED, TRIMMED)]
    for name in ("L-CLIPScore", "CLIPScore"):
        rows += [faster(times, f"{name}, {how}", f"{name}, {FULL}", note) for how in (CACHED, TRIMMED)]
    return rows


def machine() -> str:
    """What is measured; ``report`` says on what."""
    return f"Random weights, fp32, open_clip {open_clip.__version__}"


def measure(shapes: Shapes, parts: Sequence[str], settings: Settings) -> list[Measurement]:
    """Run the parts that are asked for."""
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher, student = load_encoders(shapes, folder, settings.device)
        words = caption_words(shapes.words)
        images = write_images(folder, max(shapes.images, settings.images))
        if "size" in parts:
            rows += measure_size(shapes, teacher, settings)
        if "step" in parts:
            batch = caption_rows(shapes, folder, images[: settings.images], words)
            rows += measure_step(shapes, batch, student, words, settings)
        if "reward" in parts:
            rows += measure_reward(shapes, images[: shapes.images], words, teacher, student, settings)
    return rows


def main(arguments: Sequence[str] | None = None, shapes: Shapes = Shapes()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    parser.add_argument("--images", type=int, default=10, help="images of a self-critical step")
    parser.add_argument("--samples", type=int, default=5, help="captions sampled for each of them")
    chosen = parser.parse_args(arguments)
    for name, least in (("images", 1), ("samples", 2)):
        if getattr(chosen, name) < least:
            parser.error(f"--{name} is {getattr(chosen, name)}: expected at least {least}")
    timing = timing_of(parser, chosen)
    print(machine() + (", processor time" if timing.cpu_time else ""), flush=True)
    settings = Settings(**vars(timing), images=chosen.images, samples=chosen.samples)
    rows = measure(shapes, chosen.only, settings)
    report([rows], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
