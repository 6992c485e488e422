"""From rollouts to checked rewards: one call of the reward for all samples and greedy captions of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator

from rewards.base import checked_scores
from rewards.mixed import MixedReward, Moments, moments
from rl_caption.data.base import reward_inputs
from rl_caption.types import CaptionBatch, Rollout, Scores


def term_scores(reward: MixedReward, rollout: Rollout, batch: CaptionBatch) -> dict[str, list[float]]:
    """Raw scores of every term: those of the B·K samples, then, where there are any, of the B greedy captions.

    Raises:
        RewardError: a term failed, returned another number of scores, or a score that is not finite.
    """
    samples = rollout.token_ids.shape[1]
    completions = [text for texts in rollout.texts for text in texts]
    rows = [row for row in batch.rows for _ in range(samples)]
    finished = rollout.finished.flatten().tolist()
    if rollout.greedy_texts is not None and rollout.greedy_finished is not None:
        completions += rollout.greedy_texts
        rows += list(batch.rows)
        finished += rollout.greedy_finished.tolist()
    prompts, columns = reward_inputs(rows, finished)
    return reward.terms(prompts, completions, **columns)


def score_rollouts(
    reward: MixedReward, rollouts: Sequence[Rollout], batches: Sequence[CaptionBatch], accelerator: Accelerator
) -> list[Scores]:
    """Score the micro-batches of one optimizer step: B·K samples each and, where there are any, B greedy captions.

    With ``normalize: per_term``, a term's mean and standard deviation are those of the samples of the whole step, of
    all micro-batches and processes; greedy captions are normalised by the same two. Called by every process.

    Raises:
        RewardError: a term failed, returned another number of scores, or a score that is not finite.
    """
    terms = [term_scores(reward, rollout, batch) for rollout, batch in zip(rollouts, batches, strict=True)]
    samples = [_samples_of(values, rollout) for values, rollout in zip(terms, rollouts, strict=True)]
    of = _step_moments(samples, accelerator) if reward.normalize == "per_term" else None
    return [_scores(reward, values, rollout, of) for values, rollout in zip(terms, rollouts, strict=True)]


def _samples_of(terms: Mapping[str, list[float]], rollout: Rollout) -> dict[str, list[float]]:
    images, samples = rollout.token_ids.shape[:2]
    return {name: values[: images * samples] for name, values in terms.items()}


def _step_moments(parts: Sequence[Mapping[str, list[float]]], accelerator: Accelerator) -> dict[str, Moments]:
    """Moments of every term over the samples of all micro-batches and processes, equal everywhere to the bit."""
    names = list(parts[0])
    table = torch.tensor([[score for part in parts for score in part[name]] for name in names], dtype=torch.float64).T
    if accelerator.num_processes > 1:  # every process has as many samples
        table = accelerator.gather(table.contiguous().to(accelerator.device)).cpu()
    return {name: moments(scores) for name, scores in zip(names, table.T.tolist(), strict=True)}


def _scores(
    reward: MixedReward, terms: Mapping[str, list[float]], rollout: Rollout, of: Mapping[str, Moments] | None
) -> Scores:
    images, per_image = rollout.token_ids.shape[:2]
    sampled, greedy = images * per_image, rollout.greedy_texts
    count = sampled + (len(greedy) if greedy is not None else 0)
    total = torch.tensor(checked_scores(reward, reward.combine(terms, of), count))
    return Scores(
        samples=total[:sampled].view(images, per_image),
        greedy=total[sampled:] if greedy is not None else None,
        terms=_samples_of(terms, rollout),
    )
