"""A self-critical step against two loops that are common in implementations of SCST.

    python -m benchmarks.scst_step [--device cuda] [--images 50] [--precision bf16] [--length 20]
    [--json FILE]

A Transformer of 6 + 6 layers and width 512 over 36 region features of 2048 numbers,
random weights; K samples and the greedy caption of each image, at most 20 tokens,
CIDEr-D, gradient, clipping, Adam at learning rate 0. Captions end after as many tokens
as people's captions in COCO have; with ``--length 20`` none ends before the limit. Two
baselines do the same work on the same model:

- generate twice: Transformers' ``generate`` for the greedy captions and again for the samples,
  pycocoevalcap's CIDEr, a second forward pass with gradient over images copied K times.
- prefix with gradient: sampling with gradient, without a KV cache, where every token decodes the
  whole prefix again. It needs much memory and is compared at ``--prefix-images`` images.
"""

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from benchmarks.harness import (
    Measurement,
    Timing,
    command,
    compared,
    synchronise,
    timed,
)
from rewards.mixed import MixedReward
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.tokens import caption_mask, forbid, unique_prefixes
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.data.base import Row
from rl_caption.runtime.engines import Averages
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst.advantages import AdvantageFn, greedy, needs_greedy
from rl_caption.scst.rollout import sample_captions
from rl_caption.scst.step import SelfCriticalTask

PHASES = {
    "encode": "encode",
    "decode": "rollout",
    "reward": "reward",
    "score and update": "update",
}
"""Part of a step -> the key ``time/KEY`` of the log that has its seconds; ``rollout``
includes encoding.
"""


@dataclass(frozen=True)
class Shapes:
    """Sizes of model and batch."""

    captioner: dict[str, Any] = field(default_factory=dict)
    """Differences from ``CaptionTransformerConfig``, whose defaults come from the
    self-critical literature.
    """
    words: int = 10_000
    regions: int = 36
    region_dim: int = 2048
    images: int = 50
    prefix_images: int = 10
    samples: int = 5
    tokens: int = 20
    length: float = 11.4
    """Mean tokens of a caption, EOS included; with ``tokens`` or more no caption ends
    before the limit. The 25,010 captions of COCO's Karpathy test split have 10.4 words
    and a standard deviation of 2.4.
    """
    temperature: float = 1.0
    """Temperature of sampling. Below 1, samples of an image share prefixes, as a
    policy's samples do in the middle of its training.
    """


LENGTH_DEVIATION = 2.4
TINY: dict[str, Any] = {
    "captioner": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_heads": 2,
        "ffn_dim": 32,
    },
    "words": 60,
    "regions": 3,
    "region_dim": 6,
    "images": 3,
    "prefix_images": 2,
    "samples": 2,
    "tokens": 5,
}
"""Fields of ``Shapes`` for a rehearsal."""


def shapes_of(timing: Timing, **sizes: Any) -> Shapes:
    """The sizes that were asked for, or the small sizes of a rehearsal."""
    return Shapes(**(TINY if timing.tiny else sizes))


@dataclass
class Bench:
    """Parts of a step: captioner, optimizer, reward and a batch."""

    shapes: Shapes
    accelerator: Accelerator
    captioner: TransformerCaptioner
    reward: MixedReward
    batch: CaptionBatch
    advantage: AdvantageFn = greedy

    def __post_init__(self) -> None:
        self.policy = self.captioner.policy
        self.model: nn.Module = self.policy  # what the step calls: under DDP a wrapper
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.0)

    @property
    def decoding(self) -> Decoding:
        """Decode samples, and the greedy caption if the advantage needs it."""
        shapes = self.shapes
        return Decoding(
            num_samples=shapes.samples,
            with_greedy=needs_greedy(self.advantage),
            temperature=shapes.temperature,
            max_new_tokens=shapes.tokens,
        )

    def update(self) -> None:
        """Clip, step, zero the gradient."""
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def encode(self, batch: CaptionBatch) -> None:
        """The image encoder alone, to subtract it from the time of decoding."""
        with self.accelerator.autocast():
            self.policy.encoder(**batch.inputs)

    def generate(self, batch: CaptionBatch, **options: Any) -> Tensor:
        """Captions [N, 1 + T] by Transformers, BOS included."""
        return self.policy.generate(
            **batch.inputs, max_new_tokens=self.shapes.tokens, **options
        )

    def copied_logits(self, batch: CaptionBatch, ids: Tensor, copied: str) -> Tensor:
        """Logits [N, T, V] after each of ``ids`` [N, T], with a copy of the images for
        every caption.
        """
        inputs = {
            key: value.repeat_interleave(self.shapes.samples, 0)
            for key, value in batch.inputs.items()
        }
        return self.policy(**inputs, decoder_input_ids=ids).logits

    def part(self, images: int) -> CaptionBatch:
        """The first images of the batch."""
        return CaptionBatch(
            self.batch.rows[:images],
            {key: value[:images] for key, value in self.batch.inputs.items()},
        )


def build_bench(
    shapes: Shapes, device: str, precision: str, words: Sequence[str] | None = None
) -> Bench:
    """Random weights, features and captions of ``words``."""
    torch.manual_seed(0)
    words = words or [f"word{number}" for number in range(shapes.words - 4)]
    captioner = random_captioner(words, shapes)
    features = torch.randn(
        shapes.images, shapes.regions, shapes.region_dim, device=device
    )
    mask = torch.ones(shapes.images, shapes.regions, dtype=torch.bool, device=device)
    accelerator = prepare(captioner.policy, device, precision)
    rows = random_rows(words, shapes.images)
    batch = CaptionBatch(rows, {"region_features": features, "region_mask": mask})
    if shapes.length < shapes.tokens:
        end_captions(captioner, batch.inputs, shapes)
    return Bench(
        shapes,
        accelerator,
        captioner,
        MixedReward({"cider": (cider_of(rows), 1.0)}),
        batch,
    )


def random_captioner(words: Sequence[str], shapes: Shapes) -> TransformerCaptioner:
    """Random weights, over region features."""
    return TransformerCaptioner.from_scratch(
        [[" ".join(words)]],
        min_count=1,
        input_kind="regions",
        feature_dim=shapes.region_dim,
        **shapes.captioner,
    )


def random_rows(words: Sequence[str], images: int) -> list[Row]:
    """Images with five references of eleven words."""
    draw = np.random.default_rng(0)
    return [
        {
            "image_id": str(number),
            "references": [" ".join(draw.choice(words, 11)) for _ in range(5)],
        }
        for number in range(images)
    ]


def prepare(policy: nn.Module, device: str, precision: str) -> Accelerator:
    """Prepare a policy as ``runtime.engines.build_accelerator`` does in training; the
    baselines use it, too.
    """
    AcceleratorState._reset_state()  # a benchmark before may have had another precision
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
    torch.backends.cuda.enable_flash_sdp(device != "cpu" or precision != "bf16")
    accelerator.prepare_model(
        policy
    ).eval()  # its forward pass then computes in ``precision``
    return accelerator


def cider_of(rows: Sequence[Row]) -> Any:
    """CIDEr-D, with document frequencies of these rows."""
    return CiderD(
        DocumentFrequencies.from_texts([row["references"] for row in rows], eos=True)
    )


def ending_logits(shapes: Shapes) -> Tensor:
    """Log-odds [T] of P(length = t + 1 | length > t), of lengths that are about
    normally distributed.
    """
    lengths = torch.distributions.Normal(shapes.length, LENGTH_DEVIATION)
    edges = lengths.cdf(torch.arange(shapes.tokens + 1, dtype=torch.float64) + 0.5)
    return (
        ((edges[1:] - edges[:-1]) / (1 - edges[:-1])).nan_to_num(1.0).logit(1e-6)
    )  # all have ended by then


@torch.no_grad()
def end_captions(
    captioner: TransformerCaptioner, inputs: dict[str, Tensor], shapes: Shapes
) -> None:
    """Make lengths about normal by adding a multiple of EOS's embedding to each
    position's embedding.

    The multiples are found by ten rounds of correction on sampled captions that do not end.
    """
    policy = captioner.policy
    eos = captioner.eos_token_id
    ending = ending_logits(shapes)
    few = {key: value[:10] for key, value in inputs.items()}
    noise = torch.rand(len(few["region_mask"]), 8, shapes.tokens, device=policy.device)
    tokens = captioner.generate(
        policy,
        few,
        Decoding(
            num_samples=8, temperature=shapes.temperature, max_new_tokens=shapes.tokens
        ),
        noise,
    )
    for _ in range(10):
        ends = (
            (captioner.token_logits(policy, few, tokens) / shapes.temperature)
            .softmax(-1)[..., eos]
            .flatten(0, 1)
        )
        goes_on = torch.cat(
            [torch.ones_like(ends[:, :1]), (1 - ends[:, :-1]).cumprod(-1)], -1
        )
        found = (goes_on * ends).sum(0) / goes_on.sum(0)
        missing = ending.to(found) - found.logit(1e-9)
        vector = policy.token_embedding.weight[eos]
        factor = (
            2
            * shapes.temperature
            * missing
            / (policy.config.d_model**0.5 * vector.square().sum())
        )
        policy.position_embedding.weight[: shapes.tokens] += (
            factor.unsqueeze(1) * vector
        )


def our_step(bench: Bench, batch: CaptionBatch, step: int = 0) -> Averages:
    """Take the package's step and return its log; ``step`` seeds the samples."""
    parts = (
        bench.accelerator,
        bench.captioner,
        bench.model,
        bench.reward,
        bench.advantage,
        bench.decoding,
    )
    task = SelfCriticalTask(*parts)
    (log,) = task.training_step([batch], step)
    bench.update()
    return log


def in_turn(bench: Bench, batch: CaptionBatch) -> Callable[[], Averages]:
    """A function that takes ``our_step`` with other samples at each call."""
    steps = count()
    return lambda: our_step(bench, batch, next(steps))


def generate_step(bench: Bench, batch: CaptionBatch, copied: str = "images") -> None:
    """Baseline: ``generate`` twice, pycocoevalcap, a second forward pass over copies of
    ``images`` or ``states``.
    """
    captioner = bench.captioner
    temperature = bench.shapes.temperature
    with torch.no_grad(), bench.accelerator.autocast():
        best = bench.generate(batch, do_sample=False)[:, 1:]
        sampling = {
            "top_k": 0,
            "temperature": temperature,
            "num_return_sequences": bench.shapes.samples,
        }
        drawn = bench.generate(batch, do_sample=True, **sampling)
    tokens = drawn[:, 1:]
    rewards = toolkit_rewards(
        bench, batch, captioner.decode(tokens), captioner.decode(best)
    )
    with bench.accelerator.autocast():
        logits = bench.copied_logits(batch, drawn[:, :-1], copied)
    logprobs = (forbid(logits, captioner.forbidden) / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    learn(bench, chosen, rewards, caption_mask(tokens, captioner.eos_token_id))


def prefix_step(bench: Bench, batch: CaptionBatch) -> None:
    """Baseline: every sampled token decodes all of the prefix again with gradient; the
    greedy caption is decoded without gradient.
    """
    samples = bench.shapes.samples
    captioner = bench.captioner
    with torch.no_grad(), bench.accelerator.autocast():
        best, _ = decode_by_prefix(bench, batch.inputs, sample=False)
    inputs = {
        key: value.repeat_interleave(samples, 0) for key, value in batch.inputs.items()
    }
    with bench.accelerator.autocast():
        drawn, logprobs = decode_by_prefix(bench, inputs, sample=True)
    rewards = toolkit_rewards(
        bench, batch, captioner.decode(drawn), captioner.decode(best)
    )
    mask = caption_mask(drawn, captioner.eos_token_id)
    learn(bench, logprobs, rewards, mask)


def learn(bench: Bench, logprobs: Tensor, rewards: Tensor, mask: Tensor) -> None:
    """The baselines' update: REINFORCE, mean over tokens. ``logprobs`` and ``mask`` are
    [N, T], ``rewards`` [N].
    """
    loss = -(logprobs * rewards.unsqueeze(1) * mask).sum() / mask.sum()
    bench.accelerator.backward(loss)
    bench.update()


def decode_by_prefix(
    bench: Bench, inputs: dict[str, Tensor], sample: bool
) -> tuple[Tensor, Tensor]:
    """Tokens [N, T] and their log-probabilities [N, T]; the image is encoded a single
    time, nothing else is cached.
    """
    policy = bench.policy
    captioner = bench.captioner
    encoded = policy.encoder(**inputs)
    prefix = torch.full(
        (len(encoded[0]), 1), captioner.bos_token_id, device=encoded[0].device
    )
    chosen_logprobs = []
    for _ in range(bench.shapes.tokens):
        output = policy(
            region_mask=inputs["region_mask"],
            encoder_outputs=encoded,
            decoder_input_ids=prefix,
        )
        logits = (
            forbid(output.logits[:, -1], captioner.forbidden) / bench.shapes.temperature
        )
        logprobs = logits.log_softmax(-1)
        token = (
            torch.multinomial(logprobs.exp(), 1)
            if sample
            else logprobs.argmax(-1, keepdim=True)
        )
        chosen_logprobs.append(logprobs.gather(-1, token))
        prefix = torch.cat([prefix, token], 1)
        if (prefix == captioner.eos_token_id).any(-1).all():
            break
    return prefix[:, 1:], torch.cat(chosen_logprobs, 1)


def toolkit_rewards(
    bench: Bench, batch: CaptionBatch, samples: Sequence[str], best: Sequence[str]
) -> Tensor:
    """pycocoevalcap's CIDEr of the samples minus the greedy captions' CIDEr, [B * K];
    captions are tokenised.
    """
    from pycocoevalcap.cider.cider import Cider

    each = len(samples) // len(best)
    owners = [row for row in batch.rows for _ in range(each)] + list(batch.rows)
    references = {number: row["references"] for number, row in enumerate(owners)}
    with contextlib.redirect_stdout(io.StringIO()):
        _, scores = Cider().compute_score(
            references,
            {number: [text] for number, text in enumerate([*samples, *best])},
        )
    baseline = np.repeat(scores[len(samples) :], each)
    return torch.tensor(
        scores[: len(samples)] - baseline,
        dtype=torch.float32,
        device=bench.accelerator.device,
    )


def measure(
    timing: Timing, precision: str = "no", **sizes: Any
) -> Iterator[Measurement]:
    """Time the steps, then the parts of this package's step. ``sizes`` are fields of
    ``Shapes``.
    """
    shapes = shapes_of(timing, **sizes)
    bench = build_bench(shapes, timing.device, precision)
    small = bench.part(shapes.prefix_images)
    ours = f"step, {shapes.images} images"
    few = f"step, {shapes.prefix_images} images"
    twice = f"generate twice, {shapes.images} images"
    prefix = f"prefix with gradient, {shapes.prefix_images} images"
    variants: dict[str, Callable[[], object]] = {
        ours: in_turn(bench, bench.batch),
        twice: partial(generate_step, bench, bench.batch),
        few: in_turn(bench, small),
        prefix: partial(prefix_step, bench, small),
    }
    pairs = {ours: twice, few: prefix}
    times = timed(variants, timing, "self-critical steps")
    note = f"; {shapes.samples} samples and the greedy caption, {lengths_of(bench, bench.batch)}, {precision}"
    yield from (
        compared(times, name, baseline, note=note) for name, baseline in pairs.items()
    )
    if timing.device.startswith("cuda"):
        peaks = {
            name: peak_bytes(variant) / 2**20 for name, variant in variants.items()
        }
        for name, baseline in pairs.items():
            detail = f"{peaks[name]:.0f} MiB against {peaks[baseline]:.0f} MiB, weights and moments included"
            yield Measurement(
                f"{name}: peak memory",
                baseline,
                peaks[baseline] / peaks[name],
                "x less",
                detail,
            )
    yield from phase_rows(bench, ours, timing.repeats)


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes that tensors hold on the GPU at one moment of a step."""
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def phase_rows(bench: Bench, name: str, repeats: int) -> list[Measurement]:
    """The fraction of ``repeats`` more steps that each part takes, and its tokens per second."""
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    for step in range(repeats):
        times = our_step(bench, bench.batch, step=step).reduce(bench.accelerator)
        synchronise(bench.accelerator.device.type)
        started = time.perf_counter()
        bench.encode(bench.batch)
        synchronise(bench.accelerator.device.type)
        times["time/encode"] = time.perf_counter() - started
        times["time/rollout"] -= times["time/encode"]
        for phase, key in PHASES.items():
            phases[phase].append(times[f"time/{key}"])
    rollout = sample_captions(
        bench.captioner, bench.policy, bench.batch, bench.decoding, seed=0, step=0
    )
    tokens = (
        int(rollout.mask.sum())
        * bench.decoding.captions_per_image
        // bench.decoding.num_samples
    )
    total = statistics.median(map(sum, zip(*phases.values(), strict=True)))
    rows = []
    for phase, found in phases.items():
        seconds = statistics.median(found)
        detail = (
            f"{seconds:.3g} s of elapsed time, {tokens / seconds:,.0f} tokens a second"
        )
        rows.append(
            Measurement(
                name.replace("step", phase),
                name,
                seconds / total,
                "of the time",
                detail,
            )
        )
    return rows


def lengths_of(bench: Bench, batch: CaptionBatch) -> str:
    """Lengths of sampled captions, and the fraction of their tokens whose prefix no
    other sample of the image has.
    """
    rollout = sample_captions(
        bench.captioner, bench.policy, batch, bench.decoding, seed=0, step=0
    )
    lengths = rollout.mask.sum(-1).double()
    different = (
        unique_prefixes(rollout.token_ids, rollout.mask)[0].sum() / rollout.mask.sum()
    )
    shortest = int(lengths.min())
    longest = int(lengths.max())
    return f"{lengths.mean():.1f} tokens a caption ({shortest} to {longest}), {different:.0%} after different prefixes"


SIZES: dict[str, Any] = {
    "images": 50,
    "prefix_images": 10,
    "samples": 5,
    "length": 11.4,
}
"""Options of commands: fields of ``Shapes``."""

if __name__ == "__main__":
    command(__doc__, measure, **SIZES, temperature=1.0, precision="no")
