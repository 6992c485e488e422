"""From a rollout to checked rewards: one call of the reward for all samples and greedy captions of a batch."""

from __future__ import annotations

from typing import Any

import torch

from rewards.base import checked_scores
from rewards.mixed import MixedReward
from rl_caption.types import CaptionBatch, Rollout, Scores


def score_rollout(reward: MixedReward, rollout: Rollout, batch: CaptionBatch) -> Scores:
    """Score B·K samples and, where there are any, B greedy captions.

    Raises:
        RewardError: a term failed, returned another number of scores, or a score that is not finite.
    """
    images, samples = rollout.token_ids.shape[:2]
    completions = [text for texts in rollout.texts for text in texts]
    rows = [row for row in batch.rows for _ in range(samples)]
    finished = rollout.finished.flatten().tolist()
    if rollout.greedy_texts is not None and rollout.greedy_finished is not None:
        completions += rollout.greedy_texts
        rows += list(batch.rows)
        finished += rollout.greedy_finished.tolist()
    columns: dict[str, Any] = {
        "references": [row["references"] for row in rows],
        "image_id": [row["image_id"] for row in rows],
        "image": [row["image"] for row in rows],
        "finished": finished,
    }
    terms = reward.terms([row.get("prompt", "") for row in rows], completions, **columns)
    total = torch.tensor(checked_scores(reward, reward.combine(terms), len(completions)))
    sampled = images * samples
    return Scores(
        samples=total[:sampled].view(images, samples),
        greedy=total[sampled:] if rollout.greedy_texts is not None else None,
        terms={name: values[:sampled] for name, values in terms.items()},
    )
