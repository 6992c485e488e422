"""Cost of L-CLIP as a reward, against CLIP ViT-B/32 and in a self-critical step.

    python -m benchmarks.l_clip [--device cuda] [--only towers step] [--json FILE]

- towers: parameters and time of both models, for pairs of an image and a caption as
  pixels and token ids.
- step: a self-critical step of a Transformer captioner over region features, with CIDEr-D alone and
  with L-CLIPScore.

All weights are random, which costs the same time as trained ones.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from benchmarks import scst_step
from benchmarks.harness import (
    Measurement,
    Timing,
    command,
    compared,
    synchronise,
    timed,
)
from benchmarks.scst_step import build_bench, cider_of, our_step
from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rewards.clip.l_clipscore import LClipScore
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.mixed import MixedReward
from rl_caption.scst.advantages import leave_one_out

PARTS = ("towers", "step")


@dataclass(frozen=True)
class Shapes:
    """Sizes. The defaults are the L-CLIPScore paper's models and a captioner of the usual size."""

    teacher: str = "ViT-B-32-quickgelu"
    student: LCLIPConfig = field(default_factory=LCLIPConfig)
    step: scst_step.Shapes = field(default_factory=scst_step.Shapes)
    pairs: int = 128
    """Number of pairs of an image and a caption, for the towers alone."""


TINY = Shapes(
    teacher="ViT-S-32-alt",
    student=LCLIPConfig(
        embed_dim=16,
        image_width=32,
        image_heads=4,
        image_blocks=1,
        text_width=32,
        text_heads=4,
        text_blocks=1,
        embedding_rank=8,
    ),
    step=scst_step.Shapes(**scst_step.TINY),
    pairs=2,
)


def write_images(folder: Path, count: int) -> list[Path]:
    """JPEG files of random colours, upsampled from 80 x 60."""
    draw = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path in paths:
        small = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        small.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def caption_words(count: int) -> list[str]:
    """Words that CLIP's tokenizer reads as one token each, the most frequent first."""
    from open_clip import SimpleTokenizer

    entries = (
        entry.removesuffix("</w>")
        for entry in SimpleTokenizer().encoder
        if entry.endswith("</w>")
    )
    words = [
        word for word in entries if word.isascii() and word.isalpha() and len(word) > 2
    ]
    return words[:count]


def random_captions(words: Sequence[str], count: int, seed: int) -> list[str]:
    """Captions of 7 to 20 words, at most 22 tokens of CLIP with start and end."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(words, draw.integers(7, 21))) for _ in range(count)]


def load_encoders(
    shapes: Shapes, folder: Path, device: str
) -> tuple[FrozenEncoder, FrozenEncoder]:
    """Teacher and student with random weights, loaded from files as trained ones are."""
    from open_clip import create_model

    torch.manual_seed(0)
    weights = create_model(shapes.teacher, load_weights=False).state_dict()
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "teacher.safetensors",
    )
    LCLIP(shapes.student).save_pretrained(folder / "student")
    teacher = load_frozen_encoder(
        shapes.teacher, str(folder / "teacher.safetensors"), device
    )
    return teacher, load_frozen_encoder(str(folder / "student"), device=device)


@torch.no_grad()
def measure_towers(
    shapes: Shapes, teacher: FrozenEncoder, timing: Timing
) -> Iterator[Measurement]:
    """Parameters of L-CLIP, with and without factorised word embedding, and its time,
    against CLIP's.
    """
    network = teacher.network
    clip: Any = network.model
    models = {
        "L-CLIP": LCLIP(shapes.student),
        "L-CLIP, plain word table": LCLIP(replace(shapes.student, embedding_rank=None)),
    }
    total = count_weights(clip) - 1  # without the temperature
    for name, model in models.items():
        count = count_weights(model.to(timing.device).eval())
        detail = f"{count:,} against {total:,}"
        yield Measurement(
            f"{name}: parameters", "CLIP", total / count, "x fewer", detail
        )
    captions = random_captions(caption_words(shapes.step.words), shapes.pairs, seed=0)
    ids = network.texts.encoder.tokenize(captions, teacher.context_length).to(
        timing.device
    )
    short = ids[:, : int(ids.argmax(dim=-1).max()) + 1]  # cut after the last EOT
    side = shapes.student.image_size
    images = torch.randn(shapes.pairs, 3, side, side, device=timing.device)
    student = models["L-CLIP"]
    encoders = {
        "images": (student.encode_image, clip.encode_image, images),
        f"texts of {ids.shape[1]}": (student.encode_text, network.encode_text, ids),
        f"texts cut to {short.shape[1]}": (
            student.encode_text,
            network.encode_text,
            short,
        ),
    }
    for what, (ours, theirs, inputs) in encoders.items():
        calls = {
            f"L-CLIP: {what}": partial(ours, inputs),
            f"CLIP: {what}": partial(theirs, inputs),
        }
        yield compared(
            timed(calls, timing, what), *calls, note=f"; {shapes.pairs} pairs"
        )


def count_weights(model: torch.nn.Module) -> int:
    """Number of weights of a model."""
    return sum(weight.numel() for weight in model.parameters())


def measure_step(
    shapes: scst_step.Shapes, student: FrozenEncoder, folder: Path, timing: Timing
) -> Iterator[Measurement]:
    """Steps without a greedy caption, against CIDEr-D alone, and the fraction of each
    that the reward takes.
    """
    bench = build_bench(shapes, timing.device, "no", caption_words(shapes.words))
    bench.advantage = leave_one_out
    batch = bench.batch
    cider = cider_of(bench.batch.rows)
    for row, image in zip(batch.rows, write_images(folder, shapes.images), strict=True):
        row["image"] = str(image)
    logs: dict[str, list[dict[str, float]]] = {}

    def step(name: str, reward: MixedReward) -> None:
        """Take a step with a reward, and keep what it logs."""
        started = time.perf_counter()
        bench.reward = reward
        log = our_step(bench, batch)
        synchronise(timing.device)
        log.add("time/step", time.perf_counter() - started)
        logs.setdefault(name, []).append(log.reduce(bench.accelerator))

    l_clipscore: Any = LClipScore(student)
    both = MixedReward({"cider": (cider, 0.5), "l_clipscore": (l_clipscore, 0.5)})
    rewards = {"step: CIDEr-D": bench.reward, "step: CIDEr-D + L-CLIPS": both}
    times = timed(
        {name: partial(step, name, reward) for name, reward in rewards.items()},
        timing,
        "steps",
    )
    alone, mixed = rewards
    note = f"; {shapes.images} x {shapes.samples} captions"
    yield compared(times, mixed, alone, "x the time", note)
    for name, (_, *found) in logs.items():
        seconds = statistics.median(log["time/reward"] for log in found)
        ratio = statistics.median(
            log["time/reward"] / log["time/step"] for log in found
        )
        detail = (
            f"{seconds:.3g} s; {found[0]['completion/length']:.0f} tokens a caption"
        )
        yield Measurement(f"reward of {name}", name, ratio, "of the time", detail)


def measure(
    timing: Timing,
    shapes: Shapes | None = None,
    only: Sequence[str] = PARTS,
    pairs: int = Shapes.pairs,
    **sizes: Any,
) -> Iterator[Measurement]:
    """All parts; ``sizes`` are fields of the step's ``Shapes``."""
    shapes = shapes or (
        TINY if timing.tiny else Shapes(step=scst_step.Shapes(**sizes), pairs=pairs)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        teacher, student = load_encoders(shapes, folder, timing.device)
        if "towers" in only:
            yield from measure_towers(shapes, teacher, timing)
        if "step" in only:
            yield from measure_step(shapes.step, student, folder, timing)


if __name__ == "__main__":
    command(__doc__, measure, only=PARTS, images=10, samples=5, pairs=128)
