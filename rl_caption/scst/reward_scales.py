"""How large the terms of a reward are, and how much they differ: what decides which of them a policy learns from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from tqdm import tqdm

from rewards.base import RewardError
from rewards.mixed import MixedReward, moments
from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.data.base import Row
from rl_caption.engines import autocast
from rl_caption.scst.rollout import sample_captions
from rl_caption.scst.scoring import reward_inputs, term_scores
from rl_caption.tracking import announce
from rl_caption.training.accumulation import dropout_off
from rl_caption.types import CaptionBatch

IMAGES = 64
"""Training images that are looked at."""
HARDLY_SEEN = 10.0
"""Terms whose weighted spread is so many times below the largest one are warned of."""


@dataclass(frozen=True)
class Scale:
    """A term's raw scores over captions of one kind, in the term's own unit.

    Attributes:
        captions: how many.
        mean, std: over all of them (divisor N).
        within: standard deviation among the captions of an image (divisor K), mean over images with at least two.
    """

    captions: int
    mean: float
    std: float
    within: float


@dataclass(frozen=True)
class TermScale:
    """One term of a reward. ``references`` or ``samples`` is None where there was nothing to score."""

    name: str
    weight: float
    bounds: tuple[float, float]
    references: Scale | None
    samples: Scale | None
    weighted: float | None
    """|weight| times ``samples.within``, of z-scores divided by ``samples.std``: what an advantage sees of the term."""


def scale_of(groups: Sequence[Sequence[float]]) -> Scale | None:
    """The scale of scores that are grouped by image; None where there are none."""
    scores = [score for group in groups for score in group]
    if not scores:
        return None
    over_all = moments(scores)
    within = [moments(group).std for group in groups if len(group) > 1]
    return Scale(len(scores), over_all.mean, over_all.std, sum(within) / len(within) if within else 0.0)


def some_rows(rows: Sequence[Row], count: int = IMAGES) -> list[Row]:
    """At most ``count`` rows, evenly spaced: data sets are often sorted by content."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def reference_scores(reward: MixedReward, rows: Sequence[Row]) -> tuple[dict[str, list[list[float]]], int]:
    """Score every reference as if it were a caption; a term that uses references gets the image's other ones.

    Args:
        reward: its terms are scored one by one.
        rows: the images.

    Returns:
        Term -> one list of scores an image; and how many images have too few references for a term that uses them.

    Raises:
        RewardError: a term failed.
    """
    scores, left_out = {}, 0
    for name, term in reward.rewards.items():
        compares = "references" in term.columns
        used = [row for row in rows if len(row["references"]) > int(compares)]
        left_out = max(left_out, len(rows) - len(used))
        pairs = [(row, place) for row in used for place in range(len(row["references"]))]
        prompts, columns = reward_inputs([row for row, _ in pairs], finished=[True] * len(pairs))
        if compares:
            columns["references"] = [_others(row["references"], place) for row, place in pairs]
        captions = [row["references"][place] for row, place in pairs]
        values = MixedReward({name: (term, 1.0)}).terms(prompts, captions, **columns)[name]
        remaining = iter(values)
        scores[name] = [[next(remaining) for _ in row["references"]] for row in used]
    return scores, left_out


def sample_scores(
    reward: MixedReward,
    rows: Sequence[Row],
    captioner: Captioner,
    decoding: Decoding,
    seed: int,
    accelerator: Accelerator,
    batch_size: int,
) -> dict[str, list[list[float]]]:
    """Score samples of the policy as it is, dropout off. No random state is used: samples depend on ``seed`` alone.

    Args:
        reward: its terms are scored.
        rows: the images.
        captioner: its policy samples, in this process, on the accelerator's device.
        decoding: K samples an image; no greedy caption.
        seed: of the samples.
        accelerator: tells the device and the precision.
        batch_size: images at a time.

    Returns:
        Term -> one list of K scores an image.
    """
    policy = captioner.policy.to(accelerator.device)
    scores: dict[str, list[list[float]]] = {name: [] for name in reward.rewards}
    starts = range(0, len(rows), batch_size)
    with torch.no_grad(), dropout_off(policy), autocast(accelerator):
        for start in tqdm(starts, "sampling", unit="batch", leave=False, delay=2, disable=not sys.stderr.isatty()):
            part = rows[start : start + batch_size]
            batch = CaptionBatch(part, captioner.preprocess(part)).to(accelerator.device)
            rollout = sample_captions(captioner, policy, batch, decoding, seed, 0)
            for name, values in term_scores(reward, rollout, batch).items():
                per_image = decoding.num_samples
                scores[name] += [values[i * per_image : (i + 1) * per_image] for i in range(len(part))]
    return scores


def term_scales(
    reward: MixedReward,
    references: Mapping[str, list[list[float]]],
    samples: Mapping[str, list[list[float]]],
) -> list[TermScale]:
    """The scales of a reward's terms from what ``reference_scores`` and ``sample_scores`` returned (or nothing)."""
    scales = []
    for name, term in reward.rewards.items():
        sampled = scale_of(samples.get(name, []))
        weighted = None
        if sampled is not None:
            weighted = abs(reward.weights[name]) * sampled.within
            if reward.normalize == "per_term":
                weighted = weighted / sampled.std if sampled.std else 0.0
        scales.append(
            TermScale(name, reward.weights[name], term.bounds, scale_of(references.get(name, [])), sampled, weighted)
        )
    return scales


def scale_table(scales: Sequence[TermScale]) -> list[str]:
    """The scales as lines of a table."""
    rows = [
        ["", "", "", "references", "", "", "samples", "", "", ""],
        ["term", "range", "weight", *("mean", "std", "within") * 2, "weighted"],
    ]
    for term in scales:
        rows.append(
            [
                term.name,
                f"{term.bounds[0]:.4g} to {term.bounds[1]:.4g}",
                f"{term.weight:g}",
                *_cells(term.references),
                *_cells(term.samples),
                "-" if term.weighted is None else f"{term.weighted:.4g}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def scale_warning(scales: Sequence[TermScale], normalize: str) -> str | None:
    """One sentence if the weighted spread of some term is more than ``HARDLY_SEEN`` times below the largest one.

    Terms of weight 0 are only watched, and not compared.
    """
    seen = {term.name: term.weighted for term in scales if term.weight and term.weighted is not None}
    if not seen:
        return None
    largest = max(seen, key=lambda name: seen[name])
    small = [term for term in scales if term.name in seen and seen[term.name] * HARDLY_SEEN < seen[largest]]
    if not small:
        return None
    told = [
        f"{seen[term.name]:.2g} in {term.name}{_weight_for(term, seen[term.name], seen[largest])}" for term in small
    ]
    remedy = "change the weights" + (", or set reward.normalize to per_term" if normalize == "none" else "")
    return (
        f"warning: among the samples of an image, weighted scores spread by {seen[largest]:.2g} in {largest}, but only "
        f"by {', '.join(told)}. Training will hardly see a term whose spread is over {HARDLY_SEEN:g} times smaller. "
        f"If that is not meant, {remedy}"
    )


def scale_report(
    reward: MixedReward,
    rows: Sequence[Row],
    captioner: Captioner | None,
    decoding: Decoding,
    seed: int,
    accelerator: Accelerator,
    batch_size: int,
) -> list[str]:
    """Measure the terms on the references and on samples of the policy, if there is one; lines to be printed.

    Args:
        reward: the mixture.
        rows: the training images, of which at most ``IMAGES`` are looked at.
        captioner, decoding, seed, accelerator, batch_size: as for ``sample_scores``; of a single sample, two are drawn.

    Raises:
        RewardError: a term failed on samples, as it would in training.
    """
    rows = some_rows(rows)
    notes = []
    try:
        references, left_out = reference_scores(reward, rows)
    except RewardError as error:  # training may never score a reference
        references, left_out = {}, 0
        notes.append(f"references are left out: {error}")
    if left_out:
        notes.append(f"{left_out} image(s) with fewer than two references are left out where a term compares with them")
    samples = {}
    if captioner is not None:
        drawn = replace(decoding, num_samples=max(decoding.num_samples, 2), with_greedy=False)
        samples = sample_scores(reward, rows, captioner, drawn, seed, accelerator, batch_size)
    scales = term_scales(reward, references, samples)
    divided = " / std" if reward.normalize == "per_term" else ""
    warning = scale_warning(scales, reward.normalize)
    return [
        f"scales of the terms on {len(rows)} training images (within: standard deviation among the captions of an "
        f"image; weighted: weight x within{divided}, which is what an advantage sees)",
        *(f"  {line}" for line in [*scale_table(scales), *notes]),
        *([warning] if warning else []),
    ]


def announce_scales(
    reward: MixedReward,
    rows: Sequence[Row],
    captioner: Captioner,
    decoding: Decoding,
    seed: int,
    accelerator: Accelerator,
    batch_size: int,
) -> None:
    """Print the scales of a reward of several terms from the main process; the arguments are those of ``scale_report``.

    Called before the model is prepared for distributed training, so that one process can sample alone.
    """
    if len(reward.rewards) > 1 and accelerator.is_main_process:
        report = scale_report(reward, rows, captioner, decoding, seed, accelerator, batch_size)
        announce(accelerator, "reward: " + "\n".join(report))


def _others(references: Sequence[str], place: int) -> list[str]:
    return [*references[:place], *references[place + 1 :]]


def _cells(scale: Scale | None) -> list[str]:
    return ["-"] * 3 if scale is None else [f"{value:.4g}" for value in (scale.mean, scale.std, scale.within)]


def _weight_for(term: TermScale, seen: float, largest: float) -> str:
    return f" (a weight of {term.weight * largest / seen:.2g} would make it equal)" if seen else ""
