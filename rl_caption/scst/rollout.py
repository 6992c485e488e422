"""Sampling: K captions of each image, and the greedy one where the baseline needs it, in one decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rewards.text.degeneration import bad_ending, repeated_ngram_share
from rewards.text.tokenize import tokenize
from rl_caption.captioners.base import Captioner, Decoding, Generate, caption_mask
from rl_caption.data.loader import row_generator
from rl_caption.training.accumulation import Averages
from rl_caption.types import CaptionBatch, Rollout, Scores


def sampling_noise(seed: int, step: int, image_ids: Sequence[str], num_samples: int, length: int) -> Tensor:
    """Uniform numbers in [0, 1) for the samples of each image: [B, K, L] float32.

    A pure function of (seed, step, image id): the same captions are sampled however the images are spread over
    micro-batches and processes, and a resumed run needs no random state for them.
    """
    noise = np.empty((len(image_ids), num_samples, length), dtype=np.float32)
    for row, image_id in enumerate(image_ids):
        noise[row] = row_generator(seed, step, image_id).random((num_samples, length), dtype=np.float32)
    return torch.from_numpy(noise)


@torch.no_grad()
def sample_captions(
    captioner: Captioner,
    policy: nn.Module,
    batch: CaptionBatch,
    decoding: Decoding,
    seed: int,
    step: int,
    generate: Generate | None = None,
) -> Rollout:
    """Draw K captions of each of B images (and the greedy ones, if ``decoding`` asks for them) from ``policy``.

    Args:
        generate: in place of the captioner's own, such as ``captioners.replay.ReplayedGenerate``.

    Returns:
        A ``Rollout`` whose tensors lie on the device of ``batch``.
    """
    samples = decoding.num_samples
    noise = sampling_noise(seed, step, batch.image_ids, samples, decoding.max_new_tokens)
    device = next(iter(batch.inputs.values())).device
    token_ids = (generate or captioner.generate)(policy, batch.inputs, decoding, noise.to(device))
    finished = (token_ids == captioner.eos_token_id).any(-1)
    texts = captioner.decode(token_ids.flatten(0, 1))
    rows = decoding.captions_per_image
    grouped = [texts[start : start + rows] for start in range(0, len(texts), rows)]
    sampled = token_ids[:, :samples]
    return Rollout(
        token_ids=sampled,
        mask=caption_mask(sampled, captioner.eos_token_id),
        finished=finished[:, :samples],
        texts=[group[:samples] for group in grouped],
        greedy_texts=[group[samples] for group in grouped] if decoding.with_greedy else None,
        greedy_finished=finished[:, samples] if decoding.with_greedy else None,
    )


def log_rollout(
    batches: Sequence[CaptionBatch],
    rollouts: Sequence[Rollout],
    scores: Sequence[Scores],
    advantages: Sequence[Tensor],
    log: Averages,
) -> list[dict[str, Any]]:
    """Add a rollout's rewards, advantages and caption statistics to ``log``; every key is defined in docs/metrics.md.

    Returns:
        One record an image for ``samples.jsonl``: samples, rewards, greedy caption.
    """
    for rollout, score, advantage in zip(rollouts, scores, advantages, strict=True):
        log.add("reward/total", score.samples)
        log.add("reward/std", score.samples.std(1, correction=0))
        if score.greedy is not None:
            log.add("reward/greedy", score.greedy)
        for name, values in score.terms.items():
            log.add(f"reward/{name}", values)
        log.add("advantage/mean", advantage)
        log.add("advantage/abs", advantage.abs())
        log.add("advantage/zero_fraction", (advantage.abs().amax(1) < 1e-8).double())
        log.add("completion/length", rollout.mask.sum(-1).double())
        log.add("completion/eos_fraction", rollout.finished.double())
        for key, values in caption_health(rollout.texts).items():
            log.add(key, values)
    return [
        record
        for batch, rollout, score in zip(batches, rollouts, scores, strict=True)
        for record in _records(batch, rollout, score)
    ]


def caption_health(texts: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    """Signs of degenerate captions, one number in [0, 1] for each of B·K samples, from B lists of K captions.

    Everything is decided within a caption, or among the samples of its image, so that averages do not depend on how a
    batch is split.
    """
    groups = [[tokenize(text) for text in group] for group in texts]
    captions = [tokens for group in groups for tokens in group]
    return {
        "hacking/repeated_ngrams": [repeated_ngram_share([tokens]) for tokens in captions],
        "hacking/bad_endings": [float(bad_ending(tokens)) for tokens in captions],
        "hacking/duplicates": [float(tokens in group[:k]) for group in groups for k, tokens in enumerate(group)],
    }


def _records(batch: CaptionBatch, rollout: Rollout, score: Scores) -> list[dict[str, Any]]:
    samples = torch.round(score.samples, decimals=4).tolist()
    return [
        {
            "image_id": row["image_id"],
            "samples": rollout.texts[image],
            "rewards": samples[image],
            "greedy": rollout.greedy_texts[image] if rollout.greedy_texts is not None else None,
        }
        for image, row in enumerate(batch.rows)
    ]
