"""Best of n: what the choice of the best of n samples by a reward does to a gold score, without any training.

Gao, Schulman and Hilton 2023 ("Scaling Laws for Reward Model Overoptimization"), section 2: the best of n samples of
a policy diverges from it by log n - (n - 1) / n nats. N images, K samples each; all from one set of samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_caption.evaluation.confidence import ENDS, RESAMPLES, Floats, drawn_weights


@dataclass(frozen=True)
class Curve:
    """A score of the best of n samples, for each n: means over images, with 95 % bootstrap intervals.

    Args:
        mean, low, high: for each n.
        peak: the n of the highest mean.
        change: the score at the last n less that of one sample, and its interval.
        fall: the score at ``peak`` less that at the last n, at least 0, and its interval.
    """

    mean: list[float]
    low: list[float]
    high: list[float]
    peak: int
    change: float
    change_interval: tuple[float, float]
    fall: float
    fall_interval: tuple[float, float]

    @property
    def turns(self) -> bool:
        """Whether the score falls after its peak, beyond chance."""
        return self.fall_interval[0] > 0


def kl_of_best_of_n(n: int) -> float:
    """KL divergence of the best of ``n`` samples from the policy, log n - (n - 1) / n, in nats a caption."""
    return math.log(n) - (n - 1) / n


def sample_sizes(samples: int) -> list[int]:
    """Powers of two up to the number of samples, and that number."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def best_of_n_weights(rewards: Floats, n: int) -> Floats:
    """Probability of each of K samples to be the best of ``n`` of them drawn without replacement: [N, K] of [N, K].

    Of equal rewards each is as likely. The expectation of any score under these weights is an unbiased estimate of its
    mean at best of n, of all K >= n samples (Nakano et al. 2021, "WebGPT", appendix I). Raises ``ValueError`` where
    ``n`` is not 1 to K.
    """
    count = rewards.shape[1]
    if not 1 <= n <= count:
        raise ValueError(f"n is {n}: expected 1 to {count}, the number of samples")
    ordered = np.sort(rewards, axis=1)
    below = np.stack([np.searchsorted(row, own, "left") for row, own in zip(ordered, rewards, strict=True)])
    up_to = np.stack([np.searchsorted(row, own, "right") for row, own in zip(ordered, rewards, strict=True)])
    chosen = np.array([math.comb(number, n) / math.comb(count, n) for number in range(count + 1)])
    weights: Floats = (chosen[up_to] - chosen[below]) / (up_to - below)
    return weights


def best_of_n_scores(rewards: Floats, scores: Floats, sizes: Sequence[int]) -> Floats:
    """Expected score of the best of n samples by ``rewards``, both [N, K], of each image: [N, len(sizes)]."""
    return np.stack([(best_of_n_weights(rewards, n) * scores).sum(1) for n in sizes], axis=1)


def best_of_n(
    rewards: Floats,
    scores: Mapping[str, Floats],
    sizes: Sequence[int],
    images: Sequence[str],
    resamples: int = RESAMPLES,
    *,
    seed: int = 0,
) -> dict[str, Curve]:
    """Curves of each of the ``scores`` [N, K], by name, when the best of n samples by ``rewards`` [N, K] is taken.

    ``sizes`` are the values of n, ascending from 1; ``images`` are ids, which are drawn with replacement.
    """
    draws = np.array(list(drawn_weights(images, resamples, seed)), np.float64) / len(images)
    return {name: _curve(best_of_n_scores(rewards, own, sizes), sizes, draws) for name, own in scores.items()}


def _curve(per_image: Floats, sizes: Sequence[int], draws: Floats) -> Curve:
    means, drawn = per_image.mean(0), draws @ per_image
    peak = int(means.argmax())
    low, high = np.quantile(drawn, ENDS, axis=0).tolist()
    change = np.quantile(drawn[:, -1] - drawn[:, 0], ENDS).tolist()
    fall = np.quantile(drawn[:, peak] - drawn[:, -1], ENDS).tolist()
    return Curve(
        mean=means.tolist(),
        low=low,
        high=high,
        peak=sizes[peak],
        change=float(means[-1] - means[0]),
        change_interval=(change[0], change[1]),
        fall=float(means[peak] - means[-1]),
        fall_interval=(fall[0], fall[1]),
    )


def needed_kl_coef(rewards: Curve, gold: Curve, sizes: Sequence[int]) -> float:
    """The KL penalty, reward per nat a caption, above which going beyond gold's peak does not pay; 0 without a turn.

    With that penalty the best of n samples beyond the peak gains less reward than its divergence costs.
    """
    if not gold.turns:
        return 0.0
    at = sizes.index(gold.peak)
    divergence = [kl_of_best_of_n(n) for n in sizes]
    gains = zip(rewards.mean[at + 1 :], divergence[at + 1 :], strict=True)
    return max((reward - rewards.mean[at]) / (kl - divergence[at]) for reward, kl in gains)
