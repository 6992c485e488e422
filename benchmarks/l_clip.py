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
from safetensors.torch import save_file

from benchmarks import scst_step
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
from benchmarks.l_clip_size import FULL_LENGTH, measure_size
from benchmarks.loading import write_images
from benchmarks.scst_step import cider_of, prepare, random_captioner
from rewards.clip.backbone import Backbone, load_backbone
from rewards.clip.captions import WordTokens
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.clipscore import ClipScore
from rewards.l_clipscore import LClipScore
from rewards.mixed import MixedReward
from rl_caption.captioners.base import Decoding
from rl_caption.data.base import Row
from rl_caption.data.loader import Collate
from rl_caption.scst.advantages import leave_one_out
from rl_caption.scst.step import SelfCriticalTask

PARTS = ("size", "step", "reward")
FULL, CACHED, TRIMMED = "full forward", "images cached", "images cached, text trimmed"


@dataclass(frozen=True)
class Shapes:
    """What is measured. The defaults are the L-CLIPScore paper's models and a captioner of the usual size."""

    teacher: str = "ViT-B-32-quickgelu"
    student: LCLIPConfig = field(default_factory=LCLIPConfig)
    step: scst_step.Shapes = field(default_factory=lambda: scst_step.Shapes(images=10))
    """The captioner and a self-critical step of it; captions end where random weights end them, not at ``length``."""
    pairs: int = 128
    images: int = 50
    captions: int = 6


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


# A self-critical step.


def caption_rows(shapes: scst_step.Shapes, folder: Path, images: Sequence[Path], words: Sequence[str]) -> list[Row]:
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
    cider = cider_of(rows)

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
    shapes: scst_step.Shapes, rows: Sequence[Row], student: Backbone, words: Sequence[str], timing: Timing
) -> list[Measurement]:
    """Whole steps: sampling, reward, scoring with gradient, clipping, Adam (learning rate 0: all steps are alike)."""
    torch.manual_seed(0)
    captioner = random_captioner(words, shapes)
    policy = captioner.policy
    accelerator = prepare(policy, timing.device, "no")
    batch = Collate(captioner)([(row, 0) for row in rows]).to(accelerator.device)
    decoding = Decoding(num_samples=shapes.samples, with_greedy=False, max_new_tokens=shapes.tokens)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.0)
    logs: dict[str, list[dict[str, float]]] = {}

    def step(name: str, make_reward: Callable[[], MixedReward]) -> None:
        started, reward = time.perf_counter(), make_reward()
        task = SelfCriticalTask(accelerator, captioner, policy, reward, leave_one_out, decoding)
        optimizer.zero_grad()
        log = task.training_step([batch], step=0)
        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        synchronise(timing.device)
        log.add("time/step", time.perf_counter() - started)
        logs.setdefault(name, []).append(log.reduce(accelerator))

    variants = {name: partial(step, name, make) for name, make in step_rewards(rows, student).items()}
    times = timed(variants, timing, "self-critical steps")
    counted = {name: found[1:] for name, found in logs.items()}
    return step_rows(times, counted, f"{len(rows)} x {shapes.samples} captions")


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


# The reward alone.


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
    timing: Timing,
) -> list[Measurement]:
    """Time of one call for all captions: L-CLIPScore against CLIPScore alike, and both against their full forward."""
    times = timed(reward_variants(shapes, images, words, teacher, student), timing, "rewards")
    note = f"; {len(images) * shapes.captions} captions of {len(images)} images"
    rows = [faster(times, f"L-CLIPScore, {how}", f"CLIPScore, {how}", note) for how in (FULL, CACHED, TRIMMED)]
    for name in ("L-CLIPScore", "CLIPScore"):
        rows += [faster(times, f"{name}, {how}", f"{name}, {FULL}", note) for how in (CACHED, TRIMMED)]
    return [*rows, token_row(random_captions(words, len(images) * shapes.captions, seed=3), timing)]


def token_row(captions: Sequence[str], timing: Timing) -> Measurement:
    """Time of turning captions into CLIP's tokens, words looked up, as in training once they have been seen."""
    own: Any = open_clip.SimpleTokenizer(context_length=FULL_LENGTH)
    names = f"tokens of {len(captions)} captions, words looked up", "open_clip's tokenizer"
    calls = (partial(tokens, captions, context_length=FULL_LENGTH) for tokens in (WordTokens(own), own))
    return faster(timed(dict(zip(names, calls, strict=True)), timing, "tokens"), *names)


def machine() -> str:
    """What is measured; ``report`` says on what."""
    return f"Random weights, fp32, open_clip {open_clip.__version__}"


def measure(shapes: Shapes, parts: Sequence[str], timing: Timing) -> list[Measurement]:
    """Run the parts that are asked for."""
    rows: list[Measurement] = []
    step = shapes.step
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher, student = load_encoders(shapes, folder, timing.device)
        words = caption_words(step.words)
        images = write_images(folder, max(shapes.images, step.images))
        if "size" in parts:
            rows += measure_size(shapes.student, teacher, random_captions(words, shapes.pairs, seed=0), timing)
        if "step" in parts:
            batch = caption_rows(step, folder, images[: step.images], words)
            rows += measure_step(step, batch, student, words, timing)
        if "reward" in parts:
            rows += measure_reward(shapes, images[: shapes.images], words, teacher, student, timing)
    return rows


def main(arguments: Sequence[str] | None = None, shapes: Shapes = Shapes()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run; all by default")
    parser.add_argument("--images", type=int, default=shapes.step.images, help="images of a self-critical step")
    parser.add_argument("--samples", type=int, default=shapes.step.samples, help="captions sampled for each of them")
    chosen = parser.parse_args(arguments)
    for name, least in (("images", 1), ("samples", 2)):
        if getattr(chosen, name) < least:
            parser.error(f"--{name} is {getattr(chosen, name)}: expected at least {least}")
    timing = timing_of(parser, chosen)
    print(machine() + (", processor time" if timing.cpu_time else ""), flush=True)
    step = replace(shapes.step, images=chosen.images, samples=chosen.samples)
    rows = measure(replace(shapes, step=step), chosen.only, timing)
    report([rows], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
