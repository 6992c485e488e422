"""How large the scores of each reward term are and how much they vary among the captions of one
image: the terms that vary most, times their weights, are those that a policy learns from.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from rewards.base import RewardError
from rewards.mixed import MixedReward, moments
from rewards.text.cider import CIDER_DIFFERENCES, CiderD
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import Row, reward_inputs
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


class Scale(NamedTuple):
    """Statistics of one term's raw scores: mean and standard deviation (divisor N) over all
    captions; ``within`` is the standard deviation among the captions of one image (divisor K),
    averaged over the images with at least two.
    """

    mean: float
    std: float
    within: float


def scale_of(groups: Sequence[Sequence[float]]) -> Scale | None:
    """The scale of scores that are grouped by image; None where there are none."""
    scores = [score for group in groups for score in group]
    within = [moments(group).std for group in groups if len(group) > 1]
    total = moments(scores)
    return (
        Scale(total.mean, total.std, sum(within) / len(within) if within else 0.0)
        if scores
        else None
    )


def reference_scores(reward: MixedReward, rows: Sequence[Row]) -> Groups:
    """Score every reference as if it were a caption.

    A term that uses references gets the image's other ones; an image without others has an empty
    list.

    Raises:
        RewardError: a term failed.
    """
    scores = {}
    for name, term in reward.rewards.items():
        compares = "references" in term.columns
        groups = [
            row["references"] if len(row["references"]) > int(compares) else [] for row in rows
        ]
        captions = [caption for group in groups for caption in group]
        repeated = [row for row, group in zip(rows, groups, strict=True) for _ in group]
        prompts, columns = reward_inputs(repeated, finished=[True] * len(captions))
        if compares:
            columns["references"] = [
                [*group[:i], *group[i + 1 :]] for group in groups for i in range(len(group))
            ]
        scores_of_captions = iter(
            MixedReward({name: (term, 1.0)}).terms(prompts, captions, **columns)[name]
        )
        scores[name] = [[next(scores_of_captions) for _ in group] for group in groups]
    return scores


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
        num_samples=k, temperature=decoding.temperature, max_new_tokens=decoding.max_new_tokens
    )
    policy = captioner.policy.to(accelerator.device)
    scores: Groups = {name: [] for name in reward.rewards}
    starts = range(0, len(rows), batch_size)
    with torch.no_grad(), dropout_off(policy):
        for start in tqdm(starts, "sampling", unit="batch", leave=False, delay=2, disable=None):
            chunk = rows[start : start + batch_size]
            batch = CaptionBatch(chunk, captioner.preprocess(chunk)).to(accelerator.device)
            with autocast(accelerator):  # of the policy alone, as in a step
                rollout = sample_captions(captioner, policy, batch, decoding, seed, 0)
            for name, values in term_scores(reward, rollout, batch).items():
                scores[name] += [values[i * k : (i + 1) * k] for i in range(len(chunk))]
    return scores


def weighted_variation(
    reward: MixedReward, samples: Mapping[str, Scale | None]
) -> dict[str, float]:
    """Term -> |weight| x ``within`` of its samples, after ``normalize``: how much of the term an
    advantage sees.
    """
    variation = {}
    for name, scale in samples.items():
        if scale is not None:
            unit = {"none": 1.0, "per_term": scale.std, "per_group": scale.within}[reward.normalize]
            variation[name] = abs(reward.weights[name]) * scale.within / unit if unit else 0.0
    return variation


def scale_warning(reward: MixedReward, weighted: Mapping[str, float]) -> str | None:
    """A warning that names the terms with a weight that vary over ``MAX_RATIO`` times less than the
    largest one.

    None where there are none.
    """
    compared = {name: value for name, value in weighted.items() if reward.weights[name]}
    largest = max(compared, key=lambda name: compared[name], default="")
    small = []
    for name, value in compared.items():
        if value * MAX_RATIO < compared[largest]:
            small.append(f"{value:.2g} in {name}")
            if value:
                equal = reward.weights[name] * compared[largest] / value
                small[-1] += f" (a weight of {equal:.2g} would make it equal)"
    if not small:
        return None
    remedy = "change the weights" + (
        ", or set reward.normalize to per_term" if reward.normalize == "none" else ""
    )
    return (
        f"warning: among the samples of an image, weighted scores spread by "
        f"{compared[largest]:.2g} in {largest}, but "
        f"only by {', '.join(small)}. Training will hardly see a term whose spread is over "
        f"{MAX_RATIO:g} times "
        f"smaller. If that is not meant, {remedy}"
    )


def scale_report(
    reward: MixedReward,
    rows: Sequence[Row],
    sample: Callable[[MixedReward, Sequence[Row]], Groups] | None,
) -> list[str]:
    """A table of the scales of references and of samples in ``IMAGES`` of the training images, as
    lines to print.

    ``sample`` is ``sample_scores`` with all arguments bound but the last two; None leaves samples
    out.

    Raises:
        RewardError: a term failed on samples, as it would in training.
    """
    count = min(IMAGES, len(rows))
    rows = [rows[index * len(rows) // count] for index in range(count)]
    references: Groups = {}
    notes = []
    try:
        references = reference_scores(reward, rows)
    except RewardError as error:  # training may never score a reference
        notes.append(f"references are left out: {error}")
    empty = max((sum(not group for group in groups) for groups in references.values()), default=0)
    if empty:
        notes.append(
            f"{empty} image(s) with fewer than two references are left out where a term compares "
            f"with them"
        )
    samples = sample(reward, rows) if sample is not None else {}
    scales = {
        name: (scale_of(references.get(name, [])), scale_of(samples.get(name, [])))
        for name in reward.rewards
    }
    weighted = weighted_variation(reward, {name: sampled for name, (_, sampled) in scales.items()})
    table = [
        ["", "", "", "references", "", "", "samples", "", "", ""],
        ["term", "range", "weight", *("mean", "std", "within") * 2, "weighted"],
    ]
    for name, term in reward.rewards.items():
        numbers = [number for scale in scales[name] for number in (scale or (None,) * 3)] + [
            weighted.get(name)
        ]
        bounds = f"{term.bounds[0]:.4g} to {term.bounds[1]:.4g}"
        cells = ["-" if number is None else f"{number:.4g}" for number in numbers]
        table.append([name, bounds, f"{reward.weights[name]:g}", *cells])
    if any(isinstance(term, CiderD) for term in reward.rewards.values()):
        notes.append(CIDER_DIFFERENCES)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    divided = {"none": "", "per_term": " / std", "per_group": " / within"}[reward.normalize]
    warning = scale_warning(reward, weighted)
    return [
        f"scales of the terms on {len(rows)} training images (within: standard deviation among the "
        f"captions of an "
        f"image; weighted: weight x within{divided}, which is what an advantage sees)",
        *(f"  {line}" for line in [*lines, *notes]),
        *([warning] if warning else []),
    ]
