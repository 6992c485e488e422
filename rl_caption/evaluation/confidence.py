"""Bootstrap intervals of every metric over images, and a paired test between two systems.

Images are drawn with replacement, each with all of its references. Every metric is a function of sums over the drawn
images: BLEU, METEOR and CHAIR of their counts, all others are means of per-image scores. CIDEr's document frequencies,
and so its per-image scores, stay those of the whole set.

Sources: Efron 1979 and Koehn 2004 ("Statistical Significance Tests for Machine Translation Evaluation") for the
bootstrap; Noreen 1989 and Riezler and Maxwell 2005 for approximate randomisation.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from rl_caption.evaluation.hallucination import CHAIR_KEYS, chair_of_sums
from rl_caption.evaluation.metrics import METRIC_KEYS, Evaluation, EvaluationError

Floats = NDArray[np.float64]

RESAMPLES = 1000
ENDS = ((1 - 0.95) / 2, (1 + 0.95) / 2)
"""Quantiles of the ends of a 95 % interval."""
_CHUNK = 200


class Statistic(NamedTuple):
    """K metrics of one system as a function of sums over its N images."""

    keys: tuple[str, ...]
    per_image: Floats
    """[N, C] what is summed."""
    of_sums: Callable[[Floats, int], Floats]
    """([S, C] sums, N) -> [S, K] metrics."""


class Difference(TypedDict):
    """One metric of two systems A and B on the same images, as in ``comparison.json``: ``difference`` is B - A.

    ``interval`` is that of the paired bootstrap, ``p`` the two-sided p-value of approximate randomisation, in (0, 1].
    """

    first: float
    second: float
    difference: float
    interval: tuple[float, float]
    p: float


def drawn_weights(
    groups: Sequence[Hashable], resamples: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Yield, for each resample, [N] how often each item is in it when groups (images) are drawn with replacement.

    Groups are drawn in the order of their names where these are texts, else in that of the items: draws do not depend
    on the order of rows that name their images.
    """
    names = list(dict.fromkeys(groups))
    if all(isinstance(name, str) for name in names):
        names.sort(key=str)
    numbers = {name: number for number, name in enumerate(names)}
    owners = np.array([numbers[group] for group in groups])
    generator = np.random.default_rng(seed)
    count = len(numbers)
    for _ in tqdm(
        range(resamples), "bootstrap", unit="resample", leave=False, delay=2, disable=None
    ):
        yield np.bincount(generator.integers(count, size=count), minlength=count)[owners]


def statistics_of(evaluation: Evaluation) -> list[Statistic]:
    """Return the metrics that can be resampled: those of summed counts, and means of scores that every image has."""
    statistics = []
    for name, counts in evaluation.counts.items():
        keys, of_sums = OF_SUMS[name]
        if all(key in evaluation.metrics for key in keys):
            statistics.append(Statistic(keys, counts, of_sums))
    counted = {key for statistic in statistics for key in statistic.keys}
    rows = list(evaluation.per_image.values())
    keys = tuple(
        key
        for key in evaluation.metrics
        if key not in counted and rows and all(key in row for row in rows)
    )
    if keys:
        statistics.append(
            Statistic(keys, np.array([[row[key] for key in keys] for row in rows]), means_of_sums)
        )
    return statistics


def with_intervals(
    evaluation: Evaluation, resamples: int = RESAMPLES, *, seed: int = 0
) -> Evaluation:
    """Add 95 % percentile bootstrap intervals to an evaluation, in the units of its metrics.

    An evaluation of one image is returned as it is, and so is any with ``resamples`` 0.
    """
    if resamples == 0 or evaluation.n < 2:
        return evaluation
    evaluation, original = _in_order(evaluation, sorted(evaluation.per_image)), evaluation
    statistics = statistics_of(evaluation)
    intervals = {}
    for statistic, values in zip(
        statistics, _bootstrap(statistics, evaluation.n, resamples, seed), strict=True
    ):
        for key, column in zip(statistic.keys, values.T, strict=True):
            low, high = np.quantile(column, ENDS).tolist()
            intervals[key] = low, high
    how = f"95 % percentile bootstrap over images, {resamples} resamples, seed {seed}"
    return replace(original, intervals=intervals, interval=how)


def compare(
    first: Evaluation, second: Evaluation, resamples: int = RESAMPLES, *, seed: int = 0
) -> dict[str, Difference]:
    """Compare systems A and B on the same images, in any order: metric key -> difference, 95 % interval, p-value.

    The interval is that of the paired bootstrap: both systems of the same drawn images. The p-value is that of
    approximate randomisation: how often a difference as large, in either direction, comes out when the two systems'
    captions of each image are exchanged by the toss of a coin, (c + 1) / (resamples + 1). It is not corrected for the
    number of metrics. ``EvaluationError`` where the systems have other images.
    """
    _check_images(first, second)
    order, count = sorted(first.per_image), first.n
    first, second = _in_order(first, order), _in_order(second, order)
    pairs = list(_pair_statistics(statistics_of(first), statistics_of(second)))
    drawn = _bootstrap([statistic for pair in pairs for statistic in pair], count, resamples, seed)
    as_large = _count_exchanges(pairs, count, resamples, seed)
    differences = {}
    for number, (statistic, _) in enumerate(pairs):
        moved = drawn[2 * number + 1] - drawn[2 * number]
        for key, column in zip(statistic.keys, moved.T, strict=True):
            one, other = first.metrics[key], second.metrics[key]
            low, high = np.quantile(column, ENDS).tolist()
            p = (as_large[key] + 1) / (resamples + 1)
            differences[key] = Difference(
                first=one, second=other, difference=other - one, interval=(low, high), p=p
            )
    return {key: differences[key] for key in first.metrics if key in differences}


def _bootstrap(
    statistics: Sequence[Statistic], count: int, resamples: int, seed: int
) -> list[Floats]:
    """[resamples, K] of each statistic, all of the same drawn images."""
    draws = drawn_weights(range(count), resamples, seed)
    resampled: list[list[Floats]] = [[] for _ in statistics]
    for _ in range(0, resamples, _CHUNK):
        weights = np.array(list(islice(draws, _CHUNK)), np.float64)
        for statistic, chunks in zip(statistics, resampled, strict=True):
            chunks.append(statistic.of_sums(weights @ statistic.per_image, count))
    return [np.concatenate(chunks) for chunks in resampled]


def _check_images(first: Evaluation, second: Evaluation) -> None:
    if first.per_image.keys() != second.per_image.keys():
        only = [
            len(a.per_image.keys() - b.per_image.keys())
            for a, b in ((first, second), (second, first))
        ]
        raise EvaluationError(
            f"systems must be compared on the same images: {only[0]} of {first.n} images of the first are not among "
            f"those of the second, and {only[1]} of {second.n} the other way round"
        )


def _in_order(evaluation: Evaluation, order: Sequence[str]) -> Evaluation:
    """``evaluation`` with its images in the ``order`` of ids, so that what is drawn does not depend on files' rows."""
    positions = {image_id: position for position, image_id in enumerate(evaluation.per_image)}
    rows = [positions[image_id] for image_id in order]
    return replace(
        evaluation,
        per_image={image_id: evaluation.per_image[image_id] for image_id in order},
        counts={name: counts[rows] for name, counts in evaluation.counts.items()},
    )


def _pair_statistics(
    first: Sequence[Statistic], second: Sequence[Statistic]
) -> Iterator[tuple[Statistic, Statistic]]:
    """Pairs of the statistics that both systems have, with the keys that both have."""
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


def _count_exchanges(
    pairs: Sequence[tuple[Statistic, Statistic]], count: int, resamples: int, seed: int
) -> dict[str, int]:
    """Metric key -> how often exchanging captions gives a difference at least as large as the observed one."""
    generator = np.random.default_rng([seed, 1])
    as_large = {key: 0 for a, _ in pairs for key in a.keys}
    with tqdm(
        total=resamples, desc="randomisation", unit="toss", leave=False, delay=2, disable=None
    ) as progress:
        for start in range(0, resamples, _CHUNK):
            size = min(_CHUNK, resamples - start)
            exchanged = generator.integers(0, 2, size=(size, count)).astype(np.float64)
            both = np.vstack([np.zeros(count), exchanged])  # the first row is what was observed
            for a, b in pairs:
                shift = both @ (b.per_image - a.per_image)
                one = a.of_sums(a.per_image.sum(axis=0) + shift, count)
                other = b.of_sums(b.per_image.sum(axis=0) - shift, count)
                gap = np.abs(other - one)
                # Sums in another order may miss a tie by their last bits.
                reached = gap[1:] >= gap[:1] - 1e-12 * (1 + np.abs(one[:1]) + np.abs(other[:1]))
                for key, times in zip(a.keys, reached.sum(axis=0), strict=True):
                    as_large[key] += int(times)
            progress.update(size)
    return as_large


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

    The statistics as the program prints them: words and function words of the caption and its reference (4), matched
    content and function words of both for each of four matchers (16), chunks, and matched words of both. Denkowski and
    Lavie 2014, section 2; alpha 0.85, beta 0.2, gamma 0.6, delta 0.75, matcher weights 1, 0.6, 0.8, 0.6.
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


OF_SUMS: Mapping[str, tuple[tuple[str, ...], Callable[[Floats, int], Floats]]] = {
    "bleu": (METRIC_KEYS["bleu"], bleu_of_sums),
    "meteor": (METRIC_KEYS["meteor"], meteor_of_sums),
    "chair": (CHAIR_KEYS, chair_of_sums),
}
"""Key of ``Evaluation.counts`` -> the metrics that are functions of these counts, and that function."""
