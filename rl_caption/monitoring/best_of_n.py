"""Best of n: what the choice of the best of n samples by a reward does to a gold score, without any training.

Gao, Schulman and Hilton 2023 ("Scaling Laws for Reward Model Overoptimization"), section 2: the best of n samples of
a policy diverges from it by log n - (n - 1) / n nats. N images, K samples each; all from one set of samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_caption.evaluation.confidence import ENDS, RESAMPLES, Floats, drawn_weights

ROUNDING = 1e-12
"""Falls below this fraction of a score are rounding."""


@dataclass(frozen=True)
class Curve:
    """A score of the best of n samples, for each n: means over images, with 95 % bootstrap intervals.

    Args:
        mean, low, high: for each n.
        peak: the n of the highest mean.
        change: the score at the last n less that of one sample, and its interval.
        fall: the score at ``peak`` less that at the last n, at least 0, and its interval.
        lost: share of the gain possible at the last n (the choice by the score itself) that the choice by the rewards
            does not bring: 0 chooses as well, 1 by chance, more is worse than that. None where no choice matters.
    """

    mean: list[float]
    low: list[float]
    high: list[float]
    peak: int
    change: float
    change_interval: tuple[float, float]
    fall: float
    fall_interval: tuple[float, float]
    lost: float | None
    lost_interval: tuple[float, float] | None

    @property
    def turns(self) -> bool:
        """Whether the score falls after its peak, beyond its interval.

        The peak is chosen on the same images: of scores that do not depend on the rewards, 1 in 20 turns.
        """
        return self.fall_interval[0] > ROUNDING * max(map(abs, self.mean))


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
    below = np.stack(
        [np.searchsorted(row, own, "left") for row, own in zip(ordered, rewards, strict=True)]
    )
    up_to = np.stack(
        [np.searchsorted(row, own, "right") for row, own in zip(ordered, rewards, strict=True)]
    )
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

    ``sizes`` are the values of n, ascending from 1; ``images`` are N ids, which are drawn with replacement. With equal
    rewards in every image (``is_constant``) curves are flat but for rounding. Raises as ``check_scores``.
    """
    check_scores({"rewards": rewards, **scores}, images)
    draws = np.array(list(drawn_weights(images, resamples, seed)), np.float64) / len(images)
    return {
        name: _curve(
            best_of_n_scores(rewards, values, sizes),
            best_of_n_scores(values, values, sizes),
            sizes,
            draws,
        )
        for name, values in scores.items()
    }


def check_scores(scores: Mapping[str, Floats], images: Sequence[str]) -> None:
    """Raise ``ValueError`` unless all ``scores`` are [N, K], N the number of ``images``, and finite.

    It names the scores, and the image and sample of the first that is not finite.
    """
    shape = (
        len(images),
        next((values.shape[-1] for values in scores.values() if values.ndim == 2), 0),
    )
    for name, values in scores.items():
        if values.shape != shape or not values.size:
            raise ValueError(
                f"{name} has the shape {values.shape}: expected {shape}, images and samples"
            )
        if not np.isfinite(values).all():
            row, sample = np.argwhere(~np.isfinite(values))[0]
            raise ValueError(
                f"{name} of image {images[row]!r}, sample {sample}, is {values[row, sample]}: expected a finite number"
            )


def is_constant(scores: Floats) -> bool:
    """Whether [N, K] scores do not tell the samples of any image apart, so that nothing can be chosen by them."""
    return bool((scores == scores[:, :1]).all())


def _curve(per_image: Floats, possible: Floats, sizes: Sequence[int], draws: Floats) -> Curve:
    means, drawn = per_image.mean(0), draws @ per_image
    peak = int(means.argmax())
    low, high = np.quantile(drawn, ENDS, axis=0).tolist()
    change = np.quantile(drawn[:, -1] - drawn[:, 0], ENDS).tolist()
    fall = np.quantile(drawn[:, peak] - drawn[:, -1], ENDS).tolist()
    lost, lost_interval = _lost(per_image, possible, draws)
    return Curve(
        mean=means.tolist(),
        low=low,
        high=high,
        peak=sizes[peak],
        change=float(means[-1] - means[0]),
        change_interval=(change[0], change[1]),
        fall=float(means[peak] - means[-1]),
        fall_interval=(fall[0], fall[1]),
        lost=lost,
        lost_interval=lost_interval,
    )


def _lost(
    per_image: Floats, possible: Floats, draws: Floats
) -> tuple[float, tuple[float, float]] | tuple[None, None]:
    """Share of the possible gain that is lost, and its interval; None where some resample has no possible gain."""
    missing, gain = possible[:, -1] - per_image[:, -1], possible[:, -1] - possible[:, 0]
    drawn_gain = draws @ gain
    if np.isclose(gain, 0).all() or (drawn_gain <= 0).any():
        return None, None
    low, high = np.quantile(draws @ missing / drawn_gain, ENDS).tolist()
    return float(missing.sum() / gain.sum()), (low, high)


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
