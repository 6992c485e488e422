"""What the log says of a rollout: rewards, advantages, and the state of the captions themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewards.text.degeneration import bad_ending, repeated_ngram_share
from rewards.text.tokenize import tokenize
from rl_caption.metrics import Averages
from rl_caption.types import CaptionBatch, Rollout, Scores


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
