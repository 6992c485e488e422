"""How much the scores of each reward term vary among the captions of one image: the terms that vary
most, times their weights, are those that a policy learns from.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from rewards.mixed import MixedReward, moments
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import Row
from rl_caption.runtime.engines import autocast, dropout_off
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst.rollout import sample_captions, term_scores

IMAGES = 64
"""Training images that are scored, evenly spaced, as data sets are often sorted by content."""
MAX_RATIO = 10.0
"""A warning names the terms whose weighted variation is more than this factor below the largest
one.
"""

Groups = dict[str, list[list[float]]]
"""Term -> scores of the captions of each image."""


def sample_scores(
    captioner: Captioner,
    decoding: Decoding,
    seed: int,
    accelerator: Accelerator,
    batch_size: int,
    reward: MixedReward,
    rows: Sequence[Row],
) -> Groups:
    """Score K >= 2 samples of the current policy for each image, dropout off.

    The policy runs in this process alone. Samples depend on ``seed`` alone; no global random state
    is used.
    """
    k = max(decoding.num_samples, 2)
    decoding = Decoding(
        num_samples=k,
        temperature=decoding.temperature,
        max_new_tokens=decoding.max_new_tokens,
    )
    policy = captioner.policy.to(accelerator.device)
    scores: Groups = {name: [] for name in reward.rewards}
    starts = range(0, len(rows), batch_size)
    with torch.no_grad(), dropout_off(policy):
        for start in tqdm(
            starts, "sampling", unit="batch", leave=False, delay=2, disable=None
        ):
            chunk = rows[start : start + batch_size]
            batch = CaptionBatch(chunk, captioner.preprocess(chunk)).to(
                accelerator.device
            )
            with autocast(accelerator):  # of the policy alone, as in a step
                rollout = sample_captions(captioner, policy, batch, decoding, seed, 0)
            for name, values in term_scores(reward, rollout, batch).items():
                scores[name] += [values[i * k : (i + 1) * k] for i in range(len(chunk))]
    return scores


def scale_report(
    reward: MixedReward,
    rows: Sequence[Row],
    sample: Callable[[MixedReward, Sequence[Row]], Groups],
) -> list[str]:
    """The scales of the terms on samples of ``IMAGES`` of the training images, as lines to print;
    the last one warns of terms that training will hardly see.

    ``sample`` is ``sample_scores`` with all arguments bound but the last two. Raises RewardError
    where a term fails, as it would in training.
    """
    count = min(IMAGES, len(rows))
    rows = [rows[index * len(rows) // count] for index in range(count)]
    lines = [f"scales of the terms on samples of {count} training images"]
    seen = {}
    for name, groups in sample(reward, rows).items():
        total = moments([score for group in groups for score in group])
        within = fmean(moments(group).std for group in groups)
        unit = {"none": 1.0, "per_term": total.std, "per_group": within}[
            reward.normalize
        ]
        seen[name] = abs(reward.weights[name]) * within / unit if unit else 0.0
        low, high = reward.rewards[name].bounds
        lines.append(
            f"  {name} ({low:.4g} to {high:.4g}): mean {total.mean:.4g}, standard deviation among "
            f"the samples of an image {within:.4g}, as weighted {seen[name]:.4g}"
        )
    largest = max(seen.values())
    small = [
        name
        for name in seen
        if reward.weights[name] and seen[name] * MAX_RATIO < largest
    ]
    if small:
        lines.append(
            f"warning: weighted scores spread over {MAX_RATIO:g} times less in {', '.join(small)} "
            "than in the largest term: training will hardly see them. If that is not meant, change "
            "the weights, or set reward.normalize to per_term"
        )
    return lines
