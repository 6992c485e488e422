"""Bootstrap intervals of every metric over images, and a paired test between two systems.

Images are drawn with replacement, each with all of its references. Every metric is a function of
sums over the drawn
images: BLEU, METEOR and CHAIR of their counts, all others are means of per-image scores. CIDEr's
document frequencies, and so its per-image scores, stay those of the whole set.

Sources: Efron 1979 and Koehn 2004 ("Statistical Significance Tests for Machine Translation
Evaluation") for the bootstrap; Noreen 1989 and Riezler and Maxwell 2005 for the permutation test.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BeforeValidator
from typing_extensions import TypedDict

from rl_caption.evaluation.hallucination import CHAIR_KEYS, chair_of_sums
from rl_caption.evaluation.metrics import METRIC_KEYS, Evaluation, EvaluationError

Floats = NDArray[np.float64]
Weights = NDArray[np.int64]
Interval = Annotated[tuple[float, float], BeforeValidator(lambda ends: tuple(ends))]
"""Both ends; a list in JSON."""

RESAMPLES = 1000
_CHUNK = 200
"""Resamples that are computed at a time."""


class Estimate(NamedTuple):
    """A value and the ends of its interval; None without one, or where it is not defined."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends; NaN in place of None."""
        if self.low is None or self.high is None:
            return math.nan, math.nan
        return self.low, self.high


class Statistic(NamedTuple):
    """K metrics of one system as a function of sums over its N images."""

    keys: tuple[str, ...]
    per_image: Floats
    """[N, C] what is summed."""
    of_sums: Callable[[Floats, int], Floats]
    """([S, C] sums, N) -> [S, K] metrics."""

    def of_drawn(self, drawn: Weights) -> Floats:
        """[K] metrics of a resample; ``drawn`` [N] is how often each image is in it."""
        return self.of_sums(drawn[None] @ self.per_image, len(drawn))[0]


class Difference(TypedDict):
    """One metric of two systems A and B on the same images, as in ``comparison.json``:
    ``difference`` is B - A.

    ``interval`` is that of the paired bootstrap, ``p`` the two-sided p-value of a permutation test,
    in (0, 1].
    """

    first: float
    second: float
    difference: float
    interval: Interval
    p: float


def estimates(
    statistic: Callable[[Weights], Sequence[float] | Floats],
    groups: ArrayLike,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """K statistics with 95 % percentile intervals; without any of 0 resamples or of one group.

    ``statistic`` takes how often each item is drawn, [N], and returns [K] values; where one is ever
    NaN (not defined), it has no interval. ``groups`` is [N], the image (or another group) of each
    item, by which items are drawn. Groups are drawn in the order of their names: draws depend on
    their number and ``seed`` alone.
    """
    from scipy import stats  # not before: it takes a while to import

    names, owners = np.unique(groups, return_inverse=True)

    def of_images(images: NDArray[np.int64]) -> Sequence[float] | Floats:
        return statistic(np.bincount(images, minlength=len(names))[owners])

    with warnings.catch_warnings():  # of resamples in which a statistic is not defined
        warnings.simplefilter("ignore")
        values = list(map(float, of_images(np.arange(len(names)))))
        if not resamples or len(names) < 2:
            return list(map(Estimate, values))
        found = stats.bootstrap(
            (np.arange(len(names)),),
            of_images,
            n_resamples=resamples,
            batch=_CHUNK,
            vectorized=False,
            method="percentile",
            rng=seed,
        ).confidence_interval
    ends = zip(values, found.low.tolist(), found.high.tolist(), strict=True)
    return [
        Estimate(value, low, high) if math.isfinite(low) else Estimate(value)
        for value, low, high in ends
    ]


def statistics_of(evaluation: Evaluation, keys: Collection[str]) -> list[Statistic]:
    """Return those of the metrics ``keys`` that can be resampled: functions of summed counts, and
    means of scores that every image has. Images are sorted by id: draws do not depend on the rows
    of files.
    """
    scores = evaluation.per_image
    order = sorted(scores)
    means = [key for key in keys if all(key in row for row in scores.values())]
    statistics = []
    for name, counts in evaluation.counts.items():
        counted, of_sums = OF_SUMS[name]
        if set(counted) <= set(keys):
            by_image = dict(zip(scores, counts, strict=True))
            of_images = np.array([by_image[image_id] for image_id in order])
            statistics.append(Statistic(counted, of_images, of_sums))
            means = [key for key in means if key not in counted]
    if means and order:
        rows = [[scores[image_id][key] for key in means] for image_id in order]
        statistics.append(Statistic(tuple(means), np.array(rows), means_of_sums))
    return statistics


def with_intervals(
    evaluation: Evaluation, resamples: int = RESAMPLES, *, seed: int = 0
) -> Evaluation:
    """Add 95 % percentile bootstrap intervals to an evaluation, in the units of its metrics.

    An evaluation of one image is returned as it is, and so is any with ``resamples`` 0.
    """
    if resamples == 0 or evaluation.n < 2:
        return evaluation
    intervals: dict[str, tuple[float, float]] = {}
    for statistic in statistics_of(evaluation, evaluation.metrics):
        images = np.arange(evaluation.n)
        found = estimates(statistic.of_drawn, images, resamples, seed)
        for key, estimate in zip(statistic.keys, found, strict=True):
            intervals[key] = estimate.interval
    how = f"95 % percentile bootstrap over images, {resamples} resamples, seed {seed}"
    return replace(evaluation, intervals=intervals, interval=how)


def compare(
    first: Evaluation, second: Evaluation, resamples: int = RESAMPLES, *, seed: int = 0
) -> dict[str, Difference]:
    """Compare systems A and B on the same images, in any order: metric key -> ``Difference``.

    The interval is that of the paired bootstrap: both systems of the same drawn images. The p-value
    is that of ``scipy.stats.permutation_test``, two-sided: the two systems' captions of each image
    are exchanged by the toss of a coin; with few images all exchanges are made. It is not corrected
    for the number of metrics.

    Raises:
        EvaluationError: the systems have other images.
    """
    check_same_images(first.per_image, second.per_image, ("the first", "the second"))
    shared = [key for key in first.metrics if key in second.metrics]
    pairs = zip(
        statistics_of(first, shared), statistics_of(second, shared), strict=True
    )
    differences: dict[str, Difference] = {}
    for a, b in pairs:

        def difference(drawn: Weights, a: Statistic = a, b: Statistic = b) -> Floats:
            return b.of_drawn(drawn) - a.of_drawn(drawn)

        found = estimates(difference, np.arange(first.n), resamples, seed)
        p_values = _p_values(a, b, first.n, resamples, seed)
        for key, estimate, p in zip(a.keys, found, p_values, strict=True):
            differences[key] = Difference(
                first=first.metrics[key],
                second=second.metrics[key],
                difference=second.metrics[key] - first.metrics[key],
                interval=estimate.interval,
                p=p,
            )
    return {key: differences[key] for key in shared if key in differences}


def check_same_images(
    first: Collection[str], second: Collection[str], names: Sequence[str]
) -> None:
    """Raise ``EvaluationError``, with counts and examples, where two systems have captions of
    different images.
    """
    for captions, others, name in (
        (first, set(second), f"{names[0]} have no caption in {names[1]}"),
        (second, set(first), f"{names[1]} have no caption in {names[0]}"),
    ):
        lost = [image_id for image_id in captions if image_id not in others]
        if lost:
            raise EvaluationError(
                f"{len(lost)} of {len(captions)} images of {name}, such as {lost[:3]}: systems are "
                "compared on the same images"
            )


def _p_values(
    a: Statistic, b: Statistic, count: int, resamples: int, seed: int
) -> list[float]:
    """Two-sided p-values of the K differences of two systems."""
    moved = b.per_image - a.per_image
    total_a, total_b = a.per_image.sum(axis=0), b.per_image.sum(axis=0)

    def difference(
        exchanged: NDArray[np.int64], _: NDArray[np.int64], axis: int
    ) -> Floats:
        shift = exchanged.reshape(-1, count).astype(np.float64) @ moved
        metrics = b.of_sums(total_b - shift, count) - a.of_sums(total_a + shift, count)
        return metrics if exchanged.ndim > 1 else metrics[0]

    from scipy import stats

    found = stats.permutation_test(
        (np.zeros(count, np.int64), np.ones(count, np.int64)),
        difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=_CHUNK,
        rng=seed,
    )
    return [float(p) for p in found.pvalue]


def means_of_sums(sums: Floats, count: int) -> Floats:
    """Means over ``count`` images, [S, K], of [S, K] sums."""
    return sums / count


def bleu_of_sums(sums: Floats, count: int) -> Floats:
    """BLEU-1 to BLEU-4, [S, 4] in [0, 1], of [S, 10] summed counts (``rewards.text.bleu``)."""
    correct, possible = sums[:, :4], sums[:, 4:8]
    precisions = np.cumsum(np.log((correct + 1e-15) / (possible + 1e-9)), axis=1)
    ratio = (sums[:, -2] + 1e-15) / (sums[:, -1] + 1e-9)
    brevity = np.minimum(0.0, 1 - 1 / ratio)
    return np.exp(precisions / np.arange(1, 5) + brevity[:, None])


def meteor_of_sums(sums: Floats, count: int) -> Floats:
    """METEOR 1.5, [S, 1] in [0, 1], of [S, 23] summed statistics, with its parameters for English.

    The statistics as the program prints them: words and function words of the caption and its
    reference (4), matched content and function words of both for each of four matchers (16),
    chunks, and matched words of both. Denkowski and Lavie 2014, section 2; alpha 0.85, beta 0.2,
    gamma 0.6, delta 0.75, matcher weights 1, 0.6, 0.8, 0.6.
    """
    alpha, beta, gamma, delta, weights = (
        0.85,
        0.2,
        0.6,
        0.75,
        np.array([1.0, 0.6, 0.8, 0.6]),
    )
    length, reference, function, reference_function = sums[:, :4].T
    matched = sums[:, 4:20].reshape(-1, 4, 4)
    chunks, words, reference_words = sums[:, 20:].T
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = (
            delta * matched[:, :, 0] + (1 - delta) * matched[:, :, 2]
        ) @ weights
        precision /= delta * (length - function) + (1 - delta) * function
        recall = (delta * matched[:, :, 1] + (1 - delta) * matched[:, :, 3]) @ weights
        recall /= (
            delta * (reference - reference_function) + (1 - delta) * reference_function
        )
        mean = precision * recall / (alpha * precision + (1 - alpha) * recall)
        fragmentation = chunks / ((words + reference_words) / 2)
    fragmentation[
        (words == length) & (reference_words == reference) & (chunks == 1)
    ] = 0.0
    score = mean * (1 - gamma * fragmentation**beta)
    return np.where(np.isfinite(score), score, 0.0)[:, None]


OF_SUMS: Mapping[str, tuple[tuple[str, ...], Callable[[Floats, int], Floats]]] = {
    "bleu": (METRIC_KEYS["bleu"], bleu_of_sums),
    "meteor": (METRIC_KEYS["meteor"], meteor_of_sums),
    "chair": (CHAIR_KEYS, chair_of_sums),
}
"""Key of ``Evaluation.counts`` -> the metrics that are functions of these counts, and that
function.
"""
