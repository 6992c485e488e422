"""What to mix a reward with: mixtures scored on samples that are there, without new samples or training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_caption.evaluation.confidence import ENDS, RESAMPLES, Floats, drawn_weights
from rl_caption.monitoring.best_of_n import best_of_n_scores, check_scores

WEIGHTS = tuple(round(0.1 * tenths, 1) for tenths in range(11))
NORMALIZE: tuple[Literal["none", "per_term"], ...] = ("none", "per_term")
FEWEST_IMAGES = 4
"""Half of the images choose the mixture, the others judge it."""


@dataclass(frozen=True)
class Mixture:
    """The best mixture of a reward with another one; weights of both sum to 1.

    Args:
        other: name of the other reward.
        weight: of the other reward, in [0, 1]; 0 is the reward alone.
        weight_interval: smallest and largest weight, with this ``normalize``, whose gold may be that of ``weight``: the
            95 % bootstrap interval of the difference, over the images that chose it, is not below 0.
        normalize: as ``reward.normalize``: ``per_term`` divides both by their standard deviation over all samples.
        gold: of the best of all samples by the mixture, mean over the images that did not choose it.
        gain: that, less the same by the reward alone, and its 95 % bootstrap interval over these images.
    """

    other: str
    weight: float
    weight_interval: tuple[float, float]
    normalize: Literal["none", "per_term"]
    gold: float
    gain: float
    gain_interval: tuple[float, float]


def best_mixtures(
    rewards: Floats,
    others: Mapping[str, Floats],
    gold: Floats,
    images: Sequence[str],
    resamples: int = RESAMPLES,
    *,
    seed: int = 0,
) -> list[Mixture]:
    """For each of the ``others``, the weight and normalisation with the most gold at the best of all K samples.

    All scores are [N, K], of K samples of N images, whose ids are ``images``. The weight is chosen on one half of the
    images, drawn by ``seed``, and its gain measured on the other half, so that the choice does not flatter it. The
    first mixture of the result has the largest gain. Raises ``ValueError`` with fewer than four images, and as
    ``check_scores``.
    """
    check_scores({"rewards": rewards, **others, "gold": gold}, images)
    if len(images) < FEWEST_IMAGES:
        raise ValueError(f"{len(images)} images: expected at least {FEWEST_IMAGES}")
    order = np.random.default_rng(seed).permutation(len(images))
    choosing, judging = order[: len(images) // 2], order[len(images) // 2 :]
    sizes = [rewards.shape[1]]
    alone = best_of_n_scores(rewards, gold, sizes)[:, 0]
    choosing_draws, judging_draws = (
        np.array(list(drawn_weights([images[at] for at in half], resamples, seed)), np.float64)
        / len(half)
        for half in (choosing, judging)
    )
    mixtures = []
    for name, other in others.items():
        trials = {(0.0, NORMALIZE[0]): alone}
        for normalize in NORMALIZE:
            first, second = (
                scaled(scores) if normalize == "per_term" else scores for scores in (rewards, other)
            )
            for weight in WEIGHTS[1:]:
                mixed = (1 - weight) * first + weight * second
                trials[weight, normalize] = best_of_n_scores(mixed, gold, sizes)[:, 0]
        weight, normalize = max(trials, key=lambda trial: trials[trial][choosing].mean())
        chosen = trials[weight, normalize]
        as_good = [
            other_weight
            for (other_weight, scaling), scores in trials.items()
            if (scaling == normalize or other_weight == 0)
            and np.quantile(choosing_draws @ (scores - chosen)[choosing], ENDS[1]) >= 0
        ]
        gains = (chosen - alone)[judging]
        low, high = np.quantile(judging_draws @ gains, ENDS).tolist()
        mixtures.append(
            Mixture(
                other=name,
                weight=weight,
                weight_interval=(min(as_good), max(as_good)),
                normalize=normalize,
                gold=float(chosen[judging].mean()),
                gain=float(gains.mean()),
                gain_interval=(low, high),
            )
        )
    return sorted(mixtures, key=lambda mixture: -mixture.gain)


def scaled(scores: Floats) -> Floats:
    """Scores over their standard deviation; as they are where that is 0."""
    deviation = float(scores.std())
    return scores / deviation if deviation > 0 else scores
