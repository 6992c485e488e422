"""Best of n: what the choice of the best of n samples by a reward does to a gold score, without any
training.

Gao, Schulman and Hilton 2023 ("Scaling Laws for Reward Model Overoptimization"), section 2: the
best of n samples of a policy diverges from it by log n - (n - 1) / n nats. N images, K samples
each; all from one set of samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_caption.evaluation.confidence import RESAMPLES, Floats, Weights, estimates

Interval = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A score of the best of n samples, for each n: means over images, with 95 % bootstrap
    intervals.

    Args:
        n: numbers of samples, ascending from 1.
        mean, low, high: for each n.
        peak: the n of the highest mean.
        change: the score at the last n less that of one sample, and its interval.
        fall: the score at ``peak`` less that at the last n, at least 0, and its interval.
    """

    n: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    peak: int
    change: float
    change_interval: Interval
    fall: float
    fall_interval: Interval

    @property
    def turns(self) -> bool:
        """Whether the score falls after its peak, beyond its interval.

        The peak is chosen on the same images: of scores that do not depend on the rewards, 1 in 20
        turns.
        """
        return self.fall_interval[0] > 1e-12 * max(
            map(abs, self.mean)
        )  # less is rounding


def kl_of_best_of_n(n: int) -> float:
    """KL divergence of the best of ``n`` samples from the policy, log n - (n - 1) / n, in nats a
    caption.
    """
    return math.log(n) - (n - 1) / n


def sample_sizes(samples: int) -> list[int]:
    """Powers of two up to the number of samples, and that number."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def best_of_n_weights(rewards: Floats, n: int) -> Floats:
    """Probability of each of K samples to be the best of ``n`` of them drawn without replacement:
    [N, K] of [N, K].

    Of equal rewards each is as likely. The expectation of any score under these weights is an
    unbiased estimate of its mean at best of n, of all K >= n samples (Nakano et al. 2021, "WebGPT",
    appendix I).
    """
    from scipy.stats import rankdata  # slow to import

    count = rewards.shape[1]
    below = rankdata(rewards, "min", axis=1).astype(int) - 1
    up_to = rankdata(rewards, "max", axis=1).astype(int)
    chosen = np.array(
        [math.comb(number, n) / math.comb(count, n) for number in range(count + 1)]
    )
    weights: Floats = (chosen[up_to] - chosen[below]) / (up_to - below)
    return weights


def best_of_n(
    rewards: Floats,
    scores: Mapping[str, Floats],
    images: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Curve]:
    """Curves of each of the ``scores`` [N, K], by name, when the best of n samples by ``rewards``
    [N, K] is taken.

    ``images`` are N ids, which are drawn with replacement. Raises ``ValueError`` for a score that
    is not finite, with its name and image.
    """
    for name, values in {"rewards": rewards, **scores}.items():
        for row in np.flatnonzero(~np.isfinite(values).all(1))[:1]:
            raise ValueError(
                f"{name} of image {images[row]!r} are not finite: {values[row]}"
            )
    sizes = sample_sizes(rewards.shape[1])
    weights = [best_of_n_weights(rewards, n) for n in sizes]
    curves = {}
    for name, values in scores.items():
        per_image = np.stack([(own * values).sum(1) for own in weights], axis=1)
        curves[name] = _curve(sizes, per_image, images, resamples, seed)
    return curves


def _curve(
    sizes: list[int],
    per_image: Floats,
    images: Sequence[str],
    resamples: int,
    seed: int,
) -> Curve:
    peak = int(per_image.mean(0).argmax())

    def statistic(drawn: Weights) -> list[float]:
        means = (drawn @ per_image / len(drawn)).tolist()
        return [*means, means[-1] - means[0], means[peak] - means[-1]]

    *points, change, fall = estimates(statistic, images, resamples, seed)
    return Curve(
        n=sizes,
        mean=[point.value for point in points],
        low=[point.interval[0] for point in points],
        high=[point.interval[1] for point in points],
        peak=sizes[peak],
        change=change.value,
        change_interval=change.interval,
        fall=fall.value,
        fall_interval=fall.interval,
    )
