"""Bootstrap intervals of metrics over images, and a paired test between two systems.

Images are drawn with replacement, each with all of its references. BLEU is a function
of counts summed over the drawn images, other metrics are means of per-image scores;
METEOR, whose score of a set is no mean, has no interval. CIDEr's document frequencies,
and so its per-image scores, stay as counted on the whole set.

Sources: Efron 1979 and Koehn 2004 ("Statistical Significance Tests for Machine
Translation Evaluation") for the bootstrap; Noreen 1989 and Riezler and Maxwell 2005 for
the permutation test.
"""

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BeforeValidator
from typing_extensions import TypedDict

from rl_caption.evaluation.metrics import METRIC_KEYS, Evaluation, EvaluationError

BLEU = METRIC_KEYS["bleu"]

Floats = NDArray[np.float64]
Weights = NDArray[np.int64]
Interval = Annotated[tuple[float, float], BeforeValidator(lambda ends: tuple(ends))]
"""Both ends; a list in JSON."""

RESAMPLES = 1000
_CHUNK = 200
"""Resamples that are computed at a time."""


class Estimate(NamedTuple):
    """A value and the ends of its interval, which are None without an interval, or
    where it is not defined.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends; NaN in place of None."""
        if self.low is None or self.high is None:
            return math.nan, math.nan
        return self.low, self.high


class Sums(NamedTuple):
    """K metrics of one system as a function of sums over its N images."""

    keys: list[str]
    """Metric keys; BLEU's come first, if any."""
    per_image: Floats
    """Summands [N, C]: BLEU's 10 counts, scores."""

    def metrics(self, sums: Floats) -> Floats:
        """[S, K] metrics of [S, C] sums over N images."""
        means = sums / len(self.per_image)
        if self.keys[0] != BLEU[0]:
            return means
        return np.hstack([bleu_of_sums(sums[:, :10]), means[:, 10:]])

    def of_drawn(self, drawn: Weights) -> Floats:
        """[K] metrics of a resample; ``drawn`` [N] is how often each image is in it."""
        return self.metrics(drawn[None] @ self.per_image)[0]


class Difference(TypedDict):
    """One metric of two systems A and B on the same images, as in ``comparison.json``:
    ``difference`` is B - A.

    ``interval`` is from the paired bootstrap, ``p`` the two-sided p-value of a
    permutation test, in (0, 1].
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
    """K statistics with 95 % percentile intervals; without intervals for 0 resamples or
    a single group.

    ``statistic`` takes how often each item is drawn, [N], and returns [K] values; where
    one is ever NaN (not defined), it has no interval. ``groups`` is [N], the image (or
    another group) of each item, by which items are drawn. Groups are drawn in the order
    of their names: draws depend on their number and ``seed`` alone.
    """
    from scipy import stats  # not before: it takes a while to import

    names, owners = np.unique(groups, return_inverse=True)

    def of_images(images: NDArray[np.int64]) -> Sequence[float] | Floats:
        """The statistic of drawn groups, whose indices are given."""
        return statistic(np.bincount(images, minlength=len(names))[owners])

    with warnings.catch_warnings():  # of resamples in which a statistic is not defined
        warnings.simplefilter("ignore")
        values = list(map(float, of_images(np.arange(len(names)))))
        if not resamples or len(names) < 2:
            return list(map(Estimate, values))
        interval = stats.bootstrap(
            (np.arange(len(names)),),
            of_images,
            n_resamples=resamples,
            batch=_CHUNK,
            vectorized=False,
            method="percentile",
            rng=seed,
        ).confidence_interval
    ends = zip(values, interval.low.tolist(), interval.high.tolist(), strict=True)
    return [
        Estimate(value, low, high) if math.isfinite(low) else Estimate(value)
        for value, low, high in ends
    ]


def sums_of(evaluation: Evaluation, keys: Collection[str]) -> Sums | None:
    """The metrics among ``keys`` that can be resampled: BLEU, and means of scores that
    every image has; None if there is none. Images are sorted by id: draws do not depend
    on the rows of files.
    """
    scores, counts = evaluation.per_image, evaluation.bleu_counts
    means = [key for key in keys if key not in (*BLEU, "METEOR")]
    means = [key for key in means if all(key in row for row in scores.values())]
    per_image = np.array([[row[key] for key in means] for row in scores.values()])
    if counts is not None and BLEU[0] in keys:
        means = [*BLEU, *means]
        per_image = np.hstack([counts, per_image])
    if not per_image.size:
        return None
    return Sums(means, per_image[np.argsort(list(scores))])


def with_intervals(
    evaluation: Evaluation, resamples: int = RESAMPLES, *, seed: int = 0
) -> Evaluation:
    """Add 95 % percentile bootstrap intervals to an evaluation, in the units of its metrics.

    An evaluation of one image is returned unchanged; so is any, if ``resamples`` is 0.
    """
    sums = sums_of(evaluation, evaluation.metrics)
    if resamples == 0 or evaluation.n < 2 or sums is None:
        return evaluation
    results = estimates(sums.of_drawn, np.arange(evaluation.n), resamples, seed)
    intervals = {
        key: estimate.interval for key, estimate in zip(sums.keys, results, strict=True)
    }
    how = f"95 % percentile bootstrap over images, {resamples} resamples, seed {seed}"
    return replace(evaluation, intervals=intervals, interval=how)


def compare(
    first: Evaluation, second: Evaluation, resamples: int = RESAMPLES, *, seed: int = 0
) -> dict[str, Difference]:
    """Compare systems A and B on the same images, in any order: metric key -> ``Difference``.

    The interval is from the paired bootstrap: images are drawn for both systems
    together. The p-value is from ``scipy.stats.permutation_test``, two-sided: the two
    systems' captions of each image are exchanged by the toss of a coin; with few images
    all exchanges are made. It is not corrected for the number of metrics.

    Raises:
        EvaluationError: the systems have other images.
    """
    check_same_images(first.per_image, second.per_image, ("the first", "the second"))
    shared = [key for key in first.metrics if key in second.metrics]
    a, b = sums_of(first, shared), sums_of(second, shared)
    if a is None or b is None:
        return {}
    results = estimates(
        lambda drawn: b.of_drawn(drawn) - a.of_drawn(drawn),
        np.arange(first.n),
        resamples,
        seed,
    )
    differences = {}
    p_values = _p_values(a, b, resamples, seed)
    for key, estimate, p in zip(a.keys, results, p_values, strict=True):
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
    """Raise ``EvaluationError``, with counts and examples, where two systems have
    captions of different images.
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


def _p_values(a: Sums, b: Sums, resamples: int, seed: int) -> list[float]:
    """Two-sided p-values of the K differences of two systems."""
    from scipy import stats

    moved = b.per_image - a.per_image
    total_a, total_b = a.per_image.sum(axis=0), b.per_image.sum(axis=0)

    def difference(exchanged: Weights, _: Weights, axis: int) -> Floats:
        """The K differences where the systems have exchanged captions of images."""
        shift = exchanged.reshape(-1, len(moved)).astype(np.float64) @ moved
        metrics = b.metrics(total_b - shift) - a.metrics(total_a + shift)
        return metrics if exchanged.ndim > 1 else metrics[0]

    result = stats.permutation_test(
        (np.zeros(len(moved), np.int64), np.ones(len(moved), np.int64)),
        difference,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=_CHUNK,
        rng=seed,
    )
    return [float(p) for p in result.pvalue]


def bleu_of_sums(sums: Floats) -> Floats:
    """BLEU-1 to BLEU-4, [S, 4] in [0, 1], of [S, 10] summed counts (``rewards.text.bleu``)."""
    correct, possible = sums[:, :4], sums[:, 4:8]
    precisions = np.cumsum(np.log((correct + 1e-15) / (possible + 1e-9)), axis=1)
    ratio = (sums[:, -2] + 1e-15) / (sums[:, -1] + 1e-9)
    brevity = np.minimum(0.0, 1 - 1 / ratio)
    return np.exp(precisions / np.arange(1, 5) + brevity[:, None])
