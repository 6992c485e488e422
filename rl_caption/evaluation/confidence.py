"""Confidence over images: bootstrap intervals of every metric, and a paired test between two systems.

Images are drawn with replacement, each with all of its references, and every metric is computed of what was drawn, in
sums: BLEU and METEOR are functions of counts summed over images, all other metrics are means over images. CIDEr's
document frequencies stay those of the whole set; so do its scores of one image.

Sources: Efron 1979 and Koehn 2004 ("Statistical Significance Tests for Machine Translation Evaluation") for the
bootstrap; Noreen 1989 and Riezler and Maxwell 2005 for approximate randomisation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from rl_caption.evaluation.errors import EvaluationError
from rl_caption.evaluation.judge import Evaluation
from rl_caption.evaluation.toolkit import METRIC_KEYS

Floats = NDArray[np.float64]

RESAMPLES = 1000
LEVEL = 0.95
_CHUNK = 200


class Statistic(NamedTuple):
    """Metrics that are a function of sums over images."""

    keys: tuple[str, ...]
    """K metric keys."""
    per_image: Floats
    """[N, C] what is summed."""
    of_sums: Callable[[Floats, int], Floats]
    """([S, C] sums, N) -> [S, K] metrics."""


class Difference(NamedTuple):
    """System B minus system A on the same images."""

    first: float
    """A's metric."""
    second: float
    """B's."""
    low: float
    """The interval of B - A by the paired bootstrap."""
    high: float
    p: float
    """Two-sided p-value of approximate randomisation, in (0, 1]."""

    @property
    def value(self) -> float:
        """B - A."""
        return self.second - self.first


def drawn_weights(groups: Sequence[Hashable], resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield, for each resample, how often each of [N] items is in it when groups are drawn with replacement.

    Args:
        groups: [N] what each item belongs to (its image).
        resamples: how many.
        seed: of the draws.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    owners = np.array([numbers[group] for group in groups])
    generator = np.random.default_rng(seed)
    count = len(numbers)
    for _ in tqdm(range(resamples), "bootstrap", unit="resample", leave=False, delay=2, disable=None):
        yield np.bincount(generator.integers(count, size=count), minlength=count)[owners]


def statistics_of(evaluation: Evaluation) -> list[Statistic]:
    """What can be resampled: BLEU and METEOR by their counts, and every metric that all images have by its mean."""
    found = [
        Statistic(METRIC_KEYS[name], counts, OF_SUMS[name])
        for name, counts in evaluation.counts.items()
        if all(key in evaluation.metrics for key in METRIC_KEYS[name])
    ]
    counted = {key for statistic in found for key in statistic.keys}
    rows = list(evaluation.per_image.values())
    keys = tuple(
        key for key in evaluation.metrics if key not in counted and rows and all(key in values for values in rows)
    )
    if keys:
        values = np.array([[row[key] for key in keys] for row in rows])
        found.append(Statistic(keys, values, means_of_sums))
    return found


def with_intervals(
    evaluation: Evaluation, resamples: int = RESAMPLES, *, level: float = LEVEL, seed: int = 0
) -> Evaluation:
    """Add percentile bootstrap intervals to an evaluation, in the units of its metrics.

    Args:
        evaluation: of at least two images; of one it is returned as it is.
        resamples: how many sets of images are drawn; 0 draws none.
        level: share of the resamples that lie within, in (0, 1).
        seed: of the draws.

    Raises:
        EvaluationError: ``resamples`` or ``level`` is out of range.
    """
    _check_range(resamples, level)
    if resamples == 0 or evaluation.n < 2:
        return evaluation
    statistics = statistics_of(evaluation)
    found: dict[str, list[Floats]] = {}
    for weights in _chunks(drawn_weights(range(evaluation.n), resamples, seed), resamples):
        for statistic in statistics:
            values = statistic.of_sums(weights @ statistic.per_image, evaluation.n)
            for key, column in zip(statistic.keys, values.T, strict=True):
                found.setdefault(key, []).append(column)
    ends = [(1 - level) / 2, (1 + level) / 2]
    intervals = {key: tuple(map(float, np.quantile(np.concatenate(parts), ends))) for key, parts in found.items()}
    how = f"{100 * level:g} % percentile bootstrap over images, {resamples} resamples, seed {seed}"
    return replace(evaluation, intervals={key: (low, high) for key, (low, high) in intervals.items()}, interval=how)


def compare(
    first: Evaluation, second: Evaluation, resamples: int = RESAMPLES, *, level: float = LEVEL, seed: int = 0
) -> dict[str, Difference]:
    """Compare two systems on the same images: differences, their intervals, and p-values, by metric key.

    The interval is that of the paired bootstrap: both systems are computed of the same drawn images. The p-value is
    that of approximate randomisation: how often a difference as large, in either direction, comes out when the two
    systems' captions of each image are exchanged by the toss of a coin; (c + 1) / (resamples + 1), so that its
    smallest value is 1 / (resamples + 1). Several metrics are several tests; no correction is made for that.

    Args:
        first: system A.
        second: system B, of the same images in any order.
        resamples: drawn sets of images, and tosses.
        level: of the interval.
        seed: of the draws.

    Raises:
        EvaluationError: the systems have other images, or ``resamples`` or ``level`` is out of range.
    """
    _check_range(resamples, level)
    if resamples == 0:
        raise EvaluationError("resamples is 0: a comparison needs at least 1")
    second = _in_order_of(first, second)
    count = first.n
    found: dict[str, Difference] = {}
    pairs = list(_paired(statistics_of(first), statistics_of(second)))
    boot: dict[str, list[Floats]] = {}
    for weights in _chunks(drawn_weights(range(count), resamples, seed), resamples):
        for a, b in pairs:
            moved = b.of_sums(weights @ b.per_image, count) - a.of_sums(weights @ a.per_image, count)
            for key, column in zip(a.keys, moved.T, strict=True):
                boot.setdefault(key, []).append(column)
    as_large = _exchanged(pairs, count, resamples, seed)
    ends = [(1 - level) / 2, (1 + level) / 2]
    for key, parts in boot.items():
        low, high = np.quantile(np.concatenate(parts), ends)
        p = (as_large[key] + 1) / (resamples + 1)
        found[key] = Difference(first.metrics[key], second.metrics[key], float(low), float(high), p)
    return {key: found[key] for key in first.metrics if key in found}


def _in_order_of(first: Evaluation, second: Evaluation) -> Evaluation:
    if first.per_image.keys() != second.per_image.keys():
        only = [len(a.per_image.keys() - b.per_image.keys()) for a, b in ((first, second), (second, first))]
        raise EvaluationError(
            f"two systems are compared on the same images: {only[0]} of {first.n} images of the first are not among "
            f"those of the second, and {only[1]} of {second.n} the other way round"
        )
    places = {image_id: place for place, image_id in enumerate(second.per_image)}
    order = [places[image_id] for image_id in first.per_image]
    return replace(
        second,
        per_image={image_id: second.per_image[image_id] for image_id in first.per_image},
        counts={name: counts[order] for name, counts in second.counts.items()},
    )


def _exchanged(pairs: Sequence[tuple[Statistic, Statistic]], count: int, resamples: int, seed: int) -> dict[str, int]:
    """How often a difference at least as large comes out of exchanged captions."""
    generator = np.random.default_rng([seed, 1])
    as_large = {key: 0 for a, _ in pairs for key in a.keys}
    done = tqdm(total=resamples, desc="randomisation", unit="toss", leave=False, delay=2, disable=None)
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        exchanged = generator.integers(0, 2, size=(size, count)).astype(np.float64)
        for a, b in pairs:
            both = np.vstack([np.zeros(count), exchanged])  # the first row is what was observed
            shift = both @ (b.per_image - a.per_image)
            one = a.of_sums(a.per_image.sum(axis=0) + shift, count)
            other = b.of_sums(b.per_image.sum(axis=0) - shift, count)
            gap = np.abs(other - one)
            # Sums in another order may miss a tie by their last bits.
            reached = gap[1:] >= gap[:1] - 1e-12 * (1 + np.abs(one[:1]) + np.abs(other[:1]))
            for key, times in zip(a.keys, reached.sum(axis=0), strict=True):
                as_large[key] += int(times)
        done.update(size)
    done.close()
    return as_large


def _paired(first: Sequence[Statistic], second: Sequence[Statistic]) -> Iterator[tuple[Statistic, Statistic]]:
    """Statistics that both systems have."""
    for a in first:
        for b in second:
            if a.of_sums is not b.of_sums:
                continue
            if a.of_sums is not means_of_sums:
                yield a, b
            elif keys := tuple(key for key in a.keys if key in b.keys):
                yield _only(a, keys), _only(b, keys)


def _only(statistic: Statistic, keys: tuple[str, ...]) -> Statistic:
    columns = [statistic.keys.index(key) for key in keys]
    return Statistic(keys, statistic.per_image[:, columns], statistic.of_sums)


def _chunks(weights: Iterator[NDArray[np.int64]], resamples: int) -> Iterator[Floats]:
    """Rows of weights, some at a time."""
    for start in range(0, resamples, _CHUNK):
        yield np.array([next(weights) for _ in range(min(_CHUNK, resamples - start))], np.float64)


def _check_range(resamples: int, level: float) -> None:
    if resamples < 0:
        raise EvaluationError(f"resamples is {resamples}: expected 0 (none) or more")
    if not 0 < level < 1:
        raise EvaluationError(f"level is {level}: expected a share between 0 and 1, such as 0.95")


def means_of_sums(sums: Floats, count: int) -> Floats:
    """Means over images, [S, K], of [S, K] sums over ``count`` images."""
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

    The statistics of a caption, as the program prints them: words and function words of the caption and its reference
    (4), matched content and function words on either side for each of four matchers (16), chunks, and matched words
    on either side. Denkowski and Lavie 2014, section 2; alpha 0.85, beta 0.2, gamma 0.6, delta 0.75, matcher weights
    1, 0.6, 0.8, 0.6.
    """
    alpha, beta, gamma, delta, weights = 0.85, 0.2, 0.6, 0.75, np.array([1.0, 0.6, 0.8, 0.6])
    length, reference, function, reference_function = sums[:, :4].T
    matched = sums[:, 4:20].reshape(-1, 4, 4)
    chunks, words, reference_words = sums[:, 20:].T
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = (delta * matched[:, :, 0] + (1 - delta) * matched[:, :, 2]) @ weights
        precision /= delta * (length - function) + (1 - delta) * function
        recall = (delta * matched[:, :, 1] + (1 - delta) * matched[:, :, 3]) @ weights
        recall /= delta * (reference - reference_function) + (1 - delta) * reference_function
        mean = precision * recall / (alpha * precision + (1 - alpha) * recall)
        fragmentation = chunks / ((words + reference_words) / 2)
    fragmentation[(words == length) & (reference_words == reference) & (chunks == 1)] = 0.0
    score = mean * (1 - gamma * fragmentation**beta)
    return np.where(np.isfinite(score), score, 0.0)[:, None]


OF_SUMS: Mapping[str, Callable[[Floats, int], Floats]] = {"bleu": bleu_of_sums, "meteor": meteor_of_sums}
