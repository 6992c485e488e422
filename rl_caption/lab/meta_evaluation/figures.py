"""Figures of agreement of a metric with a set of judgements, with bootstrap intervals over images.

Judgements of one image are not independent, so images are drawn with replacement, each
with all of its judgements (Efron, "Bootstrap Methods: Another Look at the Jackknife",
Annals of Statistics 1979). Kendall's tau of n items with C concordant and D discordant
pairs, n_s pairs whose scores differ, n_r pairs whose ratings differ, and m the smaller
of the numbers of distinct scores and ratings:

    tau_b = (C - D) / sqrt(n_s n_r)                  (Kendall, Biometrika 1945)
    tau_c = 2 (C - D) / (n^2 (m - 1) / m)            (Stuart, Biometrika 1953)
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np
from scipy import stats

from rewards.text.tokenize import tokenize
from rl_caption.evaluation.confidence import Floats, Weights, estimates
from rl_caption.lab.meta_evaluation.sets import JudgementSet

LENGTHS = (10, 20, 40, 60, 100)
"""Largest numbers of words of the classes of captions by length; the last class has
none.
"""


@dataclass(frozen=True)
class Figure:
    """One number of one metric on one set, such as ``tau_c``, ``HC`` or ``4 references,
    all pairs``.
    """

    name: str
    value: float | None
    """A correlation in [-1, 1] or an accuracy in [0, 1]; None where it is not defined."""
    count: int
    """Number of judgements or pairs that it is computed from."""
    low: float | None = None
    """Lower end of the 95 % bootstrap interval; None without one."""
    high: float | None = None
    published: bool = False
    """Whether it is the correlation that papers print for the set."""
    note: str = ""
    table: Literal["main", "correlations", "lengths"] = "main"
    """The table that shows it."""


CORRELATIONS: dict[str, Callable[[Floats, Floats], float]] = {
    "tau_b": lambda scores, ratings: stats.kendalltau(scores, ratings).statistic,
    "tau_c": lambda scores, ratings: (
        stats.kendalltau(scores, ratings, variant="c").statistic
    ),
    "pearson": lambda scores, ratings: stats.pearsonr(scores, ratings).statistic,
    "spearman": lambda scores, ratings: stats.spearmanr(scores, ratings).statistic,
    "1 / r^2": lambda scores, ratings: stats.pearsonr(scores, ratings).statistic ** -2,
}
"""Name -> correlation of [N] scores and ratings; infinite or NaN where it is not
defined. The SPECS paper prints the last one as "1 - R^2" in its own rows.
"""


def rated_figures(
    judged: JudgementSet,
    scores: Sequence[float],
    resamples: int = 0,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
) -> list[Figure]:
    """Correlate [N] scores with the ratings of a set, in three tables.

    ``main``: the published figures, tau_b and tau_c, with intervals of ``resamples``
    draws of images; tau_b within images where the set asks for it. ``correlations``:
    the other ``CORRELATIONS``. ``lengths``: Pearson's r and tau_b of the captions of
    each class by number of words. Source of the latter two tables: Chen et al.,
    "SPECS", EMNLP 2025, table 2 and figure 3.
    """
    both = np.array([scores, judged.ratings], np.float64)
    main = list(dict.fromkeys([*judged.published, "tau_b", "tau_c"]))

    def statistic(weights: Weights) -> list[float]:
        """Correlations of a resample that contains item i ``weights[i]`` times."""
        drawn = np.repeat(both, weights, axis=1)
        return [_correlate(name, drawn) for name in main]

    figures = []
    results = estimates(statistic, judged.image_ids, resamples, seed)
    for name, (_, low, high) in zip(main, results, strict=True):
        ends = {"low": low, "high": high}
        published = name in judged.published
        figures.append(_correlation(name, both, published=published, **ends))
    within = _within_images(judged.image_ids, both)
    if judged.within_images:
        figures.append(within)
    for name in CORRELATIONS:
        if name not in main:
            figures.append(_correlation(name, both, table="correlations"))
    if not judged.within_images and len(set(judged.image_ids)) < len(scores):
        figures.append(replace(within, table="correlations", note=""))
    words = np.array([len(tokenize(caption)) for caption in judged.captions])
    for below, most in pairwise([-1, *lengths, math.inf]):
        chosen = both[:, (below < words) & (words <= most)]
        if 2 <= chosen.shape[1] < len(scores):
            title = (
                f"{below + 1} to {most}" if most < math.inf else f"{below + 1} or more"
            )
            for name in ("pearson", "tau_b"):
                figure = _correlation(name, chosen, table="lengths")
                figures.append(replace(figure, name=f"{name}, {title} words"))
    return figures


def _correlate(name: str, both: Floats) -> float:
    """One of ``CORRELATIONS`` of scores and ratings, [2, N]; not finite where it is not defined."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(CORRELATIONS[name](*both)) if both.shape[1] > 1 else math.nan


def _correlation(name: str, both: Floats, **options: Any) -> Figure:
    value = _correlate(name, both)
    defined = value if math.isfinite(value) else None
    return Figure(name, defined, both.shape[1], **options)


def _within_images(image_ids: Sequence[str], both: Floats) -> Figure:
    """tau_b within each group (the captions of one image), averaged over groups.

    Groups whose ratings are all equal are left out, the same groups for every metric.
    Where only the scores are equal, tau_b is 0 / 0 and counts as 0: the metric orders
    nothing, and would gain if these groups were left out.
    """
    groups = defaultdict[str, list[Floats]](list)
    for image_id, pair in zip(image_ids, both.T, strict=True):
        groups[image_id].append(pair)
    taus = []
    for pairs in groups.values():
        group = np.transpose(pairs)
        if np.ptp(group[1]):
            taus.append(_correlate("tau_b", group))
    alike = np.isnan(taus).sum()
    note = f"mean over {len(taus)} images; {alike} of them, scored all alike, count 0"
    value = fmean(np.nan_to_num(taus)) if taus else None
    return Figure("tau_b within images", value, len(image_ids), note=note)


def order_figures(
    judged: JudgementSet,
    scores: Mapping[str, Floats],
    cosines: Floats | None = None,
    resamples: int = 0,
    seed: int = 0,
) -> list[Figure]:
    """Fraction of N rows whose captions' scores are in order, by condition and order.

    ``scores`` maps a condition of the references to [N, K]; a metric without references
    has the one condition "". ``cosines`` [N, K (K - 1) / 2] are between the captions of
    a row; without them the figures of texts alone are left out. Each condition and
    order has a figure for each kind, if the set shows kinds, and a summary.
    """
    if judged.by_image:
        _, places, images = np.unique(
            judged.image_ids, return_index=True, return_inverse=True
        )
        judged = judged._replace(rows=[judged.rows[place] for place in places])
        scores = {
            name: np.stack([np.bincount(images, column) for column in values.T], axis=1)
            for name, values in scores.items()
        }
    better = np.array([row.better for row in judged.rows])
    unit = "pairs" if len(judged.rows[0].captions) == 2 else "groups"
    compared = [(name, values, judged.above) for name, values in scores.items()]
    if cosines is not None:
        compared.append(("", cosines, judged.texts_above))
    won, notes = {}, {}
    for condition, values, orders in compared:
        for name, pairs in orders.items():
            margins = np.stack([values[:, i] - values[:, j] for i, j in pairs], axis=1)
            title = _join(condition, name)
            won[title] = wins(margins, better, judged.ties)
            tied = (margins == 0).any(axis=1).mean()
            if tied:
                share = f"{100 * tied:.1f} % of {unit} have equal scores"
                notes[title] = _join(title, f"{share}, which count as {judged.ties}")
    if judged.averaged and len(won) > 1:
        won, notes = {"": np.mean([*won.values()], axis=0)}, {}
    figures = []
    for title, counts in won.items():
        accuracies = _accuracies(judged, title, counts, resamples, seed)
        figures += [replace(figure, note=notes.get(title, "")) for figure in accuracies]
    return figures


def wins(margins: Floats, better: Floats, ties: str = "wrong") -> Floats:
    """Credit of each of N rows, [N] in [0, 1]: 1 if the scores are in order, 0 if not.

    ``margins`` [N, P] are differences of P pairs of scores, the first less the second.
    ``better`` [N] is 1 where the first score must be higher and 0 where the second
    must; rows on which people are divided evenly (0.5) count 0.5. Equal scores are
    wrong; with ``half`` they count by the probability of the right order if equal
    scores are ordered at random.
    """
    signed = np.where(better == 0, -1, 1)[:, None] * margins
    in_order = signed >= 0 if ties == "half" else signed > 0
    won = in_order.all(axis=1).astype(np.float64)
    if ties == "half":
        won /= 1 + (margins == 0).sum(axis=1)
    return np.where(better == 0.5, 0.5, won)


def _accuracies(
    judged: JudgementSet, title: str, won: Floats, resamples: int, seed: int
) -> list[Figure]:
    """Accuracy of each kind, then the summary, from the credit [N] of rows (``wins``)."""
    kinds = [row.kind for row in judged.rows]
    names = list(dict.fromkeys(kinds))
    numbers = np.array(list(map(names.index, kinds)))
    by_kind = judged.summary == "kinds"

    def rates(weights: Weights) -> Floats:
        """Accuracies of a resample: of each kind, then of all."""
        accuracies = np.bincount(numbers, weights * won) / np.bincount(numbers, weights)
        # A resample may lack a kind, which its mean leaves out.
        summary = (
            np.nanmean(accuracies) if by_kind else np.average(won, weights=weights)
        )
        return np.append(accuracies, summary)

    summary = "all pairs" if len(judged.rows[0].captions) == 2 else ""
    names.append("mean of kinds" if by_kind and len(names) > 1 else summary)
    counts = [*np.bincount(numbers).tolist(), len(won)]
    results = estimates(rates, judged.image_ids, resamples, seed)
    figures = []
    for name, count, estimate in zip(names, counts, results, strict=True):
        value, low, high = estimate
        figures.append(
            Figure(
                _join(title, name),
                value,
                count,
                low,
                high,
            )
        )
    return figures if judged.shown_kinds and any(kinds) else figures[-1:]


def _join(*words: str) -> str:
    return ", ".join(filter(None, words))
