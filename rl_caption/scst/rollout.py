"""Rollouts: K sampled captions of each image, and the greedy caption where the baseline
needs it; their rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rewards.base import checked_scores
from rewards.mixed import MixedReward, moments
from rewards.text.degeneration import bad_ending, repeated_ngram_share
from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.tokens import caption_mask
from rl_caption.data.base import reward_inputs
from rl_caption.data.loader import row_generator
from rl_caption.runtime.engines import Averages, dropout_off
from rl_caption.runtime.types import CaptionBatch, Rollout, Scores


def sampling_noise(
    seed: int, step: int, image_ids: Sequence[str], num_samples: int, length: int
) -> Tensor:
    """Uniform numbers in [0, 1) for the samples of each image: [B, K, L] float32.

    A pure function of (seed, step, image id): the same captions are sampled however the
    images are spread over micro-batches and processes, and a resumed run needs no
    random state for them.
    """
    noise = np.empty((len(image_ids), num_samples, length), dtype=np.float32)
    for row, image_id in enumerate(image_ids):
        noise[row] = row_generator(seed, step, image_id).random(
            (num_samples, length), dtype=np.float32
        )
    return torch.from_numpy(noise)


@torch.no_grad()
def sample_captions(
    captioner: Captioner,
    policy: nn.Module,
    batch: CaptionBatch,
    decoding: Decoding,
    seed: int,
    step: int,
) -> Rollout:
    """Draw K captions of each of B images (and greedy captions, if ``decoding`` asks
    for them) from ``policy``.

    With beam search, its K candidates stand for the samples. Tensors of the rollout are
    on the device of ``batch``.

    Raises:
        ValueError: beam search found fewer than K captions of an image.
    """
    rows = decoding.captions_per_image
    samples = decoding.num_samples or rows
    noise = None
    if decoding.num_samples:
        numbers = sampling_noise(
            seed, step, batch.image_ids, samples, decoding.max_new_tokens
        )
        noise = numbers.to(next(iter(batch.inputs.values())).device)
    token_ids = captioner.generate(policy, batch.inputs, decoding, noise)
    if decoding.num_beams > 1 and captioner.pad_token_id != captioner.eos_token_id:
        for image, first in zip(
            batch.image_ids, token_ids[..., 0].tolist(), strict=True
        ):
            if captioner.pad_token_id in first:  # a row without a token
                raise ValueError(
                    f"image {image!r}: {decoding.describe()} found fewer than {samples} captions"
                )
    finished = (token_ids == captioner.eos_token_id).any(-1)
    texts = captioner.decode(token_ids.flatten(0, 1))
    grouped = [texts[start : start + rows] for start in range(0, len(texts), rows)]
    sampled = token_ids[:, :samples]
    return Rollout(
        token_ids=sampled,
        mask=caption_mask(sampled, captioner.eos_token_id),
        finished=finished[:, :samples],
        texts=[group[:samples] for group in grouped],
        greedy_texts=[group[samples] for group in grouped] if rows > samples else None,
        greedy_finished=finished[:, samples] if rows > samples else None,
        temperature=decoding.temperature,
    )


@torch.no_grad()
def with_greedy_captions(
    captioner: Captioner,
    policy: nn.Module,
    batch: CaptionBatch,
    decoding: Decoding,
    rollout: Rollout,
) -> Rollout:
    """``rollout`` with the greedy caption of each image, decoded without dropout.

    self-critical.pytorch decodes its baseline in this way, while dropout stays on for
    the samples. ``batch`` has images, not states that dropout changed.
    """
    greedy = decoding.replace(num_samples=0, temperature=1.0)
    with dropout_off(policy):
        inputs = captioner.image_states(policy, batch.inputs)
        token_ids = captioner.generate(policy, inputs, greedy)[:, 0]
    finished = (token_ids == captioner.eos_token_id).any(-1)
    return replace(
        rollout, greedy_texts=captioner.decode(token_ids), greedy_finished=finished
    )


def term_scores(
    reward: MixedReward, rollout: Rollout, batch: CaptionBatch
) -> dict[str, list[float]]:
    """Raw scores of every term (log key -> scores): of the B·K samples, then of the B
    greedy captions, if there are any.

    Raises:
        RewardError: a term failed, returned another number of scores, or a score that
            is not finite.
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
    reward: MixedReward,
    rollouts: Sequence[Rollout],
    batches: Sequence[CaptionBatch],
    accelerator: Accelerator,
) -> list[Scores]:
    """Score the micro-batches of one optimizer step, each in one call of the reward.
    Called by every process.

    With ``normalize: per_term``, a term is normalised by the mean and standard
    deviation of all samples of the step (of all micro-batches and processes; equal on
    each of them to the bit). With ``per_group``, it is normalised by the mean and
    standard deviation of the K samples of the same image (Liu et al. 2026, GDPO, before
    its normalisation over the batch). The greedy caption is normalised by the same two
    numbers as the samples.

    Raises:
        RewardError: as for ``term_scores``.
    """
    scored = [
        term_scores(reward, rollout, batch)
        for rollout, batch in zip(rollouts, batches, strict=True)
    ]
    sampled = [
        {
            name: values[: rollout.mask.shape[:2].numel()]
            for name, values in terms.items()
        }
        for terms, rollout in zip(scored, rollouts, strict=True)
    ]
    of = None
    if reward.normalize == "per_term":
        columns = [
            [score for terms in sampled for score in terms[name]]
            for name in reward.rewards
        ]
        table = torch.tensor(columns, dtype=torch.float64).T
        if accelerator.num_processes > 1:  # every process has as many samples
            table = accelerator.gather(table.contiguous().to(accelerator.device)).cpu()
        of = {
            name: moments(scores)
            for name, scores in zip(reward.rewards, table.T.tolist(), strict=True)
        }
    result = []
    for terms, samples, rollout in zip(scored, sampled, rollouts, strict=True):
        images, per_image = rollout.mask.shape[:2]
        if reward.normalize == "per_group":
            totals = _totals_per_group(reward, terms, images, per_image)
        else:
            totals = reward.combine(terms, of)
        total = torch.tensor(checked_scores(reward, totals, len(totals)))
        greedy = (
            total[images * per_image :] if rollout.greedy_texts is not None else None
        )
        result.append(
            Scores(total[: images * per_image].view(images, per_image), greedy, samples)
        )
    return result


def _totals_per_group(
    reward: MixedReward,
    terms: Mapping[str, Sequence[float]],
    images: int,
    per_image: int,
) -> list[float]:
    """Weighted sums of terms that are normalised within each image, in the order of
    ``term_scores``.
    """
    samples, greedy = [], []
    for image in range(images):
        of_image = slice(image * per_image, (image + 1) * per_image)
        last = slice(
            images * per_image + image, images * per_image + image + 1
        )  # empty without greedy captions
        of = {name: moments(scores[of_image]) for name, scores in terms.items()}
        samples += reward.combine(
            {name: scores[of_image] for name, scores in terms.items()}, of
        )
        greedy += reward.combine(
            {name: scores[last] for name, scores in terms.items()}, of
        )
    return samples + greedy


def log_rollout(
    batches: Sequence[CaptionBatch],
    rollouts: Sequence[Rollout],
    scores: Sequence[Scores],
    advantages: Sequence[Tensor],
    log: Averages,
    tokenizer: str = TOKENIZER,
) -> list[dict[str, Any]]:
    """Add a rollout's rewards, advantages and caption statistics to ``log``; every key
    is defined in docs/metrics.md.

    ``tokenizer``, one of ``rewards.text.tokenize.TOKENIZERS``, splits captions for the
    statistics.

    Returns:
        One record per image for ``samples.jsonl``: samples, rewards, greedy caption.
    """
    records = []
    for batch, rollout, score, advantage in zip(
        batches, rollouts, scores, advantages, strict=True
    ):
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
        for key, signs in _degeneration(rollout.texts, tokenizer).items():
            log.add(key, signs)
        greedy: Sequence[str | None] = rollout.greedy_texts or [None] * len(batch.rows)
        rewards = torch.round(score.samples.double(), decimals=4).tolist()
        for row, *columns in zip(
            batch.rows, rollout.texts, rewards, greedy, strict=True
        ):
            names = ("samples", "rewards", "greedy")
            records.append(
                {"image_id": row["image_id"], **dict(zip(names, columns, strict=True))}
            )
    return records


def _degeneration(
    texts: Sequence[Sequence[str]], tokenizer: str
) -> Mapping[str, list[float]]:
    """Signs of degenerate captions, one number in [0, 1] for each of B·K samples, from
    B lists of K captions.

    Everything is decided within a caption, or among the samples of its image, so that
    averages do not depend on how a batch is split.
    """
    split = tokenizer_of(tokenizer)
    groups = [[split(text) for text in group] for group in texts]
    captions = [tokens for group in groups for tokens in group]
    statistics = {
        "hacking/repeated_ngrams": [
            repeated_ngram_share([tokens]) for tokens in captions
        ],
        "hacking/duplicates": [
            float(tokens in group[:k])
            for group in groups
            for k, tokens in enumerate(group)
        ],
    }
    if tokenizer == TOKENIZER:  # the words are English
        statistics["hacking/bad_endings"] = [
            float(bad_ending(tokens)) for tokens in captions
        ]
    return statistics
