"""Figures of agreement of a metric with a set of judgements, with bootstrap intervals over images,
as tables.

Judgements of one image are not independent, so images are drawn with replacement, each with all of
its judgements (Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics
1979).
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from rewards.text.tokenize import tokenize
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation.confidence import ENDS, drawn_weights
from rl_caption.evaluation.results import LEFT_OUT as UNDEFINED
from rl_caption.evaluation.results import csv_text, markdown
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.correlation import (
    group_numbers,
    grouped_tau_b,
    inverse_r_squared,
    kendall_tau_b,
    kendall_tau_c,
    pearson,
    spearman,
    tau_of_table,
    unexplained_variance,
)
from rl_caption.lab.meta_evaluation.sets import JudgementSet

Floats = NDArray[np.float64]
Weights = NDArray[np.int64]
Interval = tuple[float, float]
NO_REFERENCES = ""
"""The condition of metrics that see no references."""
BLIND = {"blind: chance": 0, "blind: longer": 1, "blind: shorter": -1}
"""Heading of a baseline that sees neither image nor references -> factor of the length of the
caption, its score.
"""
COST_HEADINGS = ("captions/s", "calls", "tokens", "seconds")
"""Columns of the table of costs (``costs.cost_cells``)."""
LENGTHS = (10, 20, 40, 60, 100)
"""Largest numbers of words of all classes of captions by length but the last."""
CORRELATIONS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "tau_b": kendall_tau_b,
    "tau_c": kendall_tau_c,
    "pearson": pearson,
    "spearman": spearman,
    "1 / r^2": inverse_r_squared,
    "1 - R^2 of ratings": lambda scores, ratings: unexplained_variance(ratings, scores),
    "1 - R^2 of scores": unexplained_variance,
}
PLAIN = ("1 / r^2", "1 - R^2")
"""Beginnings of the names of figures that are printed as they are, all others times 100."""
WITHIN = "tau_b within images"
MAX_CELLS = 5_000_000
"""Largest table of ratings by scores: 40 MB. Where nearly all ratings differ, resamples are
correlated item by item.
"""


@dataclass(frozen=True)
class Figure:
    """One number of one metric on one set, such as ``tau_c``, ``HC`` or ``4 references, all
    pairs``.
    """

    name: str
    value: float | None
    """A correlation in [-1, 1] or an accuracy in [0, 1]; None where it is not defined."""
    count: int
    """Judgements or pairs that it is computed from."""
    low: float | None = None
    """Ends of the 95 % bootstrap interval; None where it was not asked for or is not defined."""
    high: float | None = None
    published: bool = False
    """Whether papers print this one for the set."""
    note: str = ""
    table: Literal["main", "correlations", "lengths"] = "main"
    """The table that it stands in."""


@dataclass
class SetResult:
    """All metrics on one set, or on one part of it, by the heading of the metric."""

    name: str
    description: str
    convention: str
    count: int
    excluded: dict[str, int]
    """Why judgements of the files are not among them -> how many."""
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Why a metric could not be computed."""
    drawn: str = "images"
    """What is drawn with replacement for the intervals."""
    blind: list[str] = field(default_factory=list)
    """Headings of metrics and baselines that see neither image nor references."""
    costs: dict[str, list[str]] = field(default_factory=dict)
    """Heading of a metric -> its cells of the table of costs, where that was asked for."""


def rated_figures(
    judged: JudgementSet,
    scores: Sequence[float],
    resamples: int = 0,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
) -> list[Figure]:
    """Correlate [N] scores with the ratings of a set, in three tables.

    ``main``: tau_b and tau_c; for captions without images Pearson's and Spearman's r; tau_b within
    images where the set asks for it. Published figures come first, with intervals of ``resamples``
    draws of images. ``correlations``: the other ones of ``CORRELATIONS``. ``lengths``: Pearson's r
    and tau_b of the captions of each class by number of words. Source of the latter two: Chen et
    al., "SPECS", EMNLP 2025, table 2 and figure 3.
    """
    ratings, image_ids = judged.ratings, judged.image_ids
    published: set[str | None] = {judged.published}
    names = ["tau_b", "tau_c"]
    if judged.text_alone:
        published = {"pearson", "spearman", "tau_b"}
        names += ["pearson", "spearman"]
    resample = _resampled(scores, ratings, judged.text_alone)
    bounds = intervals(resample, image_ids, resamples, seed) or [None] * len(names)
    figures = []
    for name, ends in zip(names, bounds, strict=True):
        figure = _correlation(name, scores, ratings, "main")
        low, high = ends or (None, None)
        figures.append(replace(figure, low=low, high=high, published=name in published))
    figures.sort(key=lambda figure: not figure.published)
    others = [_correlation(name, scores, ratings) for name in CORRELATIONS if name not in names]
    if judged.within_images:
        figures.append(_within_images(scores, ratings, image_ids))
    elif not judged.text_alone and len(set(image_ids)) < len(image_ids):
        others.append(
            replace(_within_images(scores, ratings, image_ids), table="correlations", note="")
        )
    figures += others
    for title, rows in rows_by_length(judged.captions, lengths).items():
        columns = [scores[row] for row in rows], [ratings[row] for row in rows]
        for name in ("pearson", "tau_b"):
            figure = _correlation(name, *columns, "lengths")
            figures.append(replace(figure, name=f"{name}, {title}"))
    return figures


def _correlation(
    name: str, scores: Sequence[float], ratings: Sequence[float], table: Any = "correlations"
) -> Figure:
    """One of ``CORRELATIONS``; with a note in place of a value where it is not defined."""
    note, value = "", math.nan
    for what, values in (("scores", scores), ("ratings", ratings)):
        if len(set(values)) == 1:
            note = f"all {len(values)} {what} are {values[0]:g}: {name} is not defined"
    if not note or name.startswith("1 - R^2"):
        value = CORRELATIONS[name](scores, ratings)
    if math.isfinite(value):
        return Figure(name, value, len(scores), table=table)
    return Figure(name, None, len(scores), note=note, table=table)


def _within_images(
    scores: Sequence[float], ratings: Sequence[float], image_ids: Sequence[str]
) -> Figure:
    grouped = grouped_tau_b(scores, ratings, image_ids)
    if not grouped.groups:
        return Figure(WITHIN, None, len(scores), note="no image has different ratings")
    note = (
        f"mean over {grouped.groups} images; {grouped.constant_scores} of them, scored all alike, "
        "count 0"
    )
    return Figure(WITHIN, grouped.mean, len(scores), note=note)


def _resampled(
    scores: Sequence[float], ratings: Sequence[float], with_r: bool
) -> Callable[[Weights], list[float]]:
    """How often each caption is drawn, [N] -> tau_b and tau_c, and ``with_r`` Pearson's and
    Spearman's r; NaN where they are not defined.
    """
    both = np.array([scores, ratings], np.float64)
    levels, score_ranks = np.unique(both[0], return_inverse=True)
    rated, rating_ranks = np.unique(both[1], return_inverse=True)
    cells = rating_ranks * len(levels) + score_ranks
    size = len(rated) * len(levels)

    def resample(weights: Weights) -> list[float]:
        drawn = np.repeat(both, weights, axis=1)
        if size > MAX_CELLS:
            values = [kendall_tau_b(*drawn), kendall_tau_c(*drawn)]
        else:
            table = np.bincount(cells, weights, size).reshape(len(rated), len(levels))
            values = [*tau_of_table(table)]
        if with_r:
            with np.errstate(invalid="ignore"):  # a resample may have one value only: NaN
                for columns in (drawn, rankdata(drawn, axis=1)):
                    matrix: Any = np.corrcoef(columns)
                    values.append(float(matrix[0, 1]))
        return values

    return resample


def rows_by_length(
    captions: Sequence[str], lengths: Sequence[int] = LENGTHS
) -> dict[str, list[int]]:
    """Class of captions by number of words, such as ``11 to 20 words`` -> which of the N
    ``captions`` are in it.

    Classes with fewer than two captions are left out; empty where all captions are of one class.
    """
    classes = np.digitize([len(tokenize(caption)) for caption in captions], lengths, right=True)
    starts = [0, *(length + 1 for length in lengths)]
    titles = [f"{start} to {end} words" for start, end in zip(starts, lengths, strict=False)]
    titles.append(f"{starts[-1]} or more words")
    rows = {
        title: np.flatnonzero(classes == number).tolist() for number, title in enumerate(titles)
    }
    return {title: own for title, own in rows.items() if 2 <= len(own) < len(captions)}


def order_figures(
    judged: JudgementSet,
    scores: Mapping[str, Floats],
    cosines: Floats | None = None,
    resamples: int = 0,
    seed: int = 0,
) -> list[Figure]:
    """Share of N rows whose captions' scores are in order, by condition and figure of the set.

    ``scores`` is condition of the references -> [N, K]; a metric without references has the one
    condition ``NO_REFERENCES``. ``cosines``, [N, K, K], are between the captions of a row; without
    them the figures of texts alone are left out. Each has a figure for each kind, where the set
    shows them, and a summary. Rows of a set that is judged ``by_image`` are put together first.
    """
    if judged.by_image:
        judged, scores = _by_image(judged, scores)
    better = [row.better for row in judged.rows]
    won: dict[str, Floats] = {}
    tied: dict[str, float] = {}
    for condition, values in scores.items():
        orders = {
            name: [(values[:, i], values[:, j]) for i, j in pairs]
            for name, pairs in judged.above.items()
        }
        if cosines is not None:
            for name, quads in judged.texts_above.items():
                orders[name] = [(cosines[:, i, j], cosines[:, k, m]) for (i, j), (k, m) in quads]
        for name, order in orders.items():
            title = ", ".join(filter(None, [condition, name]))
            if judged.ties == "random":
                won[title] = in_random_order(values, judged.above[name])
            else:
                won[title] = np.min([wins(*one, better, judged.ties) for one in order], axis=0)
            tied[title] = float(np.any([high == low for high, low in order], axis=0).mean())
    if judged.averaged and len(won) > 1:
        won, tied = {"": np.mean(list(won.values()), axis=0)}, {"": 0.0}
    figures = []
    for title, values in won.items():
        figures += _accuracies(judged, title, values, tied[title], resamples, seed)
    return figures


def _by_image(
    judged: JudgementSet, scores: Mapping[str, Floats]
) -> tuple[JudgementSet, dict[str, Floats]]:
    """A row for each image, and its scores: the sums over the rows of the image."""
    numbers = group_numbers(judged.image_ids)
    places = np.unique(numbers, return_index=True)[1]
    rows = [judged.rows[place] for place in places]
    summed: dict[str, Floats] = {
        name: np.stack([np.bincount(numbers, column) for column in np.transpose(values)], axis=1)
        for name, values in scores.items()
    }
    return replace(judged, rows=rows, by_image=False), summed


def in_random_order(values: Floats, above: Sequence[tuple[int, int]]) -> Floats:
    """Probability [N] that i is ahead of j in all pairs (i, j) of ``above``, by the [N, K] values
    of K captions.

    Equal values are in random order, for which all K! orders are tried.
    """
    orders = list(permutations(range(values.shape[1])))
    held = np.zeros(len(values))
    for order in orders:
        ahead = [
            (values[:, i] > values[:, j]) | ((values[:, i] == values[:, j]) & (order[i] > order[j]))
            for i, j in above
        ]
        held += np.all(ahead, axis=0)
    return held / len(orders)


def blind_figures(
    judged: JudgementSet, resamples: int = 0, seed: int = 0
) -> dict[str, list[Figure]]:
    """Figures of the ``BLIND`` baselines: chance, the longer and the shorter caption.

    Lengths are in characters, and equal ones count by their expectation in a random order, whatever
    ties count in the set. The baselines are for sets of hard negatives: captions in order, of which
    the first is always the better one. For other sets the result is empty.
    """
    if judged.is_rated or {row.better for row in judged.rows} != {1.0}:
        return {}
    random = replace(judged, ties="random", texts_above={})
    lengths = np.array([[len(text) for text in row.captions] for row in judged.rows], np.float64)
    figures = {}
    for heading, factor in BLIND.items():
        scores = {NO_REFERENCES: factor * lengths}
        found = order_figures(random, scores, None, resamples, seed)
        figures[heading] = [replace(figure, note="") for figure in found]
    return figures


def wins(first: ArrayLike, second: ArrayLike, better: ArrayLike, ties: str = "wrong") -> Floats:
    """What each of N pairs of scores counts, [N]: 1 if they prefer the better caption, 0 if not.

    ``better`` is 1 where the first caption is better and 0 where the second is; pairs on which
    people are divided evenly (0.5) count 0.5. Equal scores count 0 with ``ties`` ``wrong``, 0.5
    with ``half`` and 1 with ``right``.
    """
    left, right, preference = (np.asarray(values, np.float64) for values in (first, second, better))
    if not np.isfinite([left, right]).all():
        raise ValueError("a score is not finite")
    won = np.where(preference == 1, left > right, right > left).astype(np.float64)
    won[left == right] = {"wrong": 0.0, "half": 0.5, "right": 1.0}[ties]
    won[preference == 0.5] = 0.5
    return won


def _accuracies(
    judged: JudgementSet, title: str, won: Floats, tied: float, resamples: int, seed: int
) -> list[Figure]:
    """The accuracy of each kind, then the summary; ``tied``: share of rows with equal scores."""
    kinds = [row.kind for row in judged.rows]
    names, numbers = list(dict.fromkeys(kinds)), group_numbers(kinds)

    def rates(weights: Weights) -> Floats:
        counts = np.bincount(numbers, weights, len(names))
        with np.errstate(invalid="ignore"):  # a resample may lack a kind, which its mean leaves out
            accuracies = np.bincount(numbers, weights * won, len(names)) / counts
        summary = (weights * won).sum() / weights.sum()
        if judged.summary == "kinds":
            summary = np.nanmean(accuracies)
        return np.append(accuracies, summary)

    is_pair = len(judged.rows[0].captions) == 2
    note = ""
    if tied:
        unit = "pairs" if is_pair else "groups"
        share = f"{100 * tied:.1f} % of {unit} have equal scores, which count as {judged.ties}"
        note = ", ".join(filter(None, [title, share]))
    summary = "all pairs" if is_pair else ""
    if judged.summary == "kinds" and len(names) > 1:
        summary = "mean of kinds"
    counts = [*np.bincount(numbers).tolist(), len(won)]
    values = rates(np.ones(len(won), np.int64)).tolist()
    bounds = intervals(rates, judged.image_ids, resamples, seed) or [None] * len(values)
    figures = []
    for name, value, count, ends in zip([*names, summary], values, counts, bounds, strict=True):
        low, high = ends or (None, None)
        heading = ", ".join(filter(None, [title, name]))
        figures.append(Figure(heading, value, count, low, high, True, note))
    return figures if judged.shown_kinds else figures[-1:]


def intervals(
    statistic: Callable[[Weights], Sequence[float] | Floats],
    groups: Sequence[Hashable],
    resamples: int = 1000,
    seed: int = 0,
) -> list[Interval | None]:
    """The 95 % percentile intervals of K statistics; empty with 0 resamples.

    ``statistic`` takes how often each item is drawn, [N], and returns [K] values; where one is ever
    NaN (not defined), its interval is None. ``groups`` is [N], the image (or another group) of each
    item, by which items are drawn.
    """
    draws = [statistic(weights) for weights in drawn_weights(groups, resamples, seed)]
    bounds: list[Interval | None] = []
    for column in np.array(draws, np.float64).T:
        low, high = np.quantile(column, ENDS).tolist()
        bounds.append((low, high) if np.isfinite(column).all() else None)
    return bounds


def write_results(folder: Path, config: JudgeSetConfig, results: Sequence[SetResult]) -> list[Path]:
    """Write ``agreement.md``, ``agreement.csv`` and ``agreement.json``; return their paths in this
    order.
    """
    paths = [folder / f"agreement.{suffix}" for suffix in ("md", "csv", "json")]
    write_text(paths[0], "\n".join(as_markdown(result, config.bootstrap) for result in results))
    write_text(paths[1], _csv(results))
    write_json(
        paths[2],
        {"config": config.model_dump(mode="json"), "sets": [asdict(result) for result in results]},
    )
    return paths


def as_markdown(result: SetResult, resamples: int) -> str:
    """A line for each metric, a column for each figure, times 100 as papers print them; further
    tables; notes.
    """
    figures = [figure for column in result.figures.values() for figure in column]
    published = {figure.name for figure in figures if figure.published}
    if published == {figure.name for figure in figures if figure.table == "main"}:
        published = set()  # all of them: nothing is marked
    tables = [_table(result, "main", published)]
    for name in ("correlations", "lengths"):
        if any(figure.table == name for figure in figures):
            tables.append(_table(result, name))
    if result.costs:
        rows = [[name, *cells] for name, cells in result.costs.items()]
        tables.append(markdown(["metric", *COST_HEADINGS], rows))
    notes = [f"Convention: {result.convention}"]
    for reason, count in result.excluded.items():
        notes += [f"Excluded: {count}, {reason}"] if count else []
    if resamples:
        notes.append(
            f"In brackets: 95 % bootstrap interval, {resamples} resamples of {result.drawn}"
        )
    if published:
        notes.append(f"Bold: what papers print for {result.name}")
    if result.blind:
        notes.append(f"See neither image nor references: {', '.join(result.blind)}")
    for metric, column in result.figures.items():
        notes += dict.fromkeys(f"{metric}: {figure.note}" for figure in column if figure.note)
    notes += [f"{UNDEFINED} {metric}: {reason}" for metric, reason in result.left_out.items()]
    notes += [f"{metric}: `{signature}`" for metric, signature in result.signatures.items()]
    title = f"## {result.name}: {result.description}"
    return "\n\n".join([title, *tables, "\n".join(f"- {note}" for note in notes)]) + "\n"


def _table(result: SetResult, name: str, bold: Collection[str] = ()) -> str:
    columns = {
        metric: {figure.name: figure for figure in figures if figure.table == name}
        for metric, figures in result.figures.items()
    }
    names = list(dict.fromkeys(figure for column in columns.values() for figure in column))
    head = ["metric"]
    for figure in names:
        unit = ", x100" if figure.startswith(("tau", "pearson", "spearman")) else ", % right"
        title = figure if figure.startswith(PLAIN) else figure + unit
        head.append(f"**{title}**" if figure in bold else title)
    lines = [
        [metric, *(_cell(figures.get(figure)) for figure in names)]
        for metric, figures in columns.items()
    ]
    lines += [[metric, *[UNDEFINED] * len(names)] for metric in result.left_out]
    return markdown(head, lines)


def _cell(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return UNDEFINED
    if figure.name.startswith(PLAIN):
        return f"{figure.value:.4g}"
    text = f"{100 * figure.value:z.1f}"
    if figure.low is None or figure.high is None:
        return text
    return f"{text} [{100 * figure.low:z.1f}, {100 * figure.high:z.1f}]"


def _csv(results: Sequence[SetResult]) -> str:
    """All figures, unrounded: correlations in [-1, 1], accuracies in [0, 1]; undefined ones empty."""
    fields = ["value", "low", "high", "count", "published"]
    lines: list[list[Any]] = [
        ["set", "metric", "figure", *fields[:-1], "published_convention", "signature", "note"]
    ]
    for result in results:
        for metric, figures in result.figures.items():
            signature = result.signatures[metric]
            for figure in figures:
                values = [getattr(figure, name) for name in fields]
                lines.append([result.name, metric, figure.name, *values, signature, figure.note])
        for metric, reason in result.left_out.items():
            lines.append([result.name, metric, *[None] * 7, reason])
    return csv_text(lines)
