"""Figures of agreement of a metric with a set of judgements, with bootstrap intervals over images,
as tables.

Judgements of one image are not independent, so images are drawn with replacement, each with all of
its judgements (Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics
1979).
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, permutations, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from rewards.text.tokenize import tokenize
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation.confidence import ENDS, drawn_weights
from rl_caption.evaluation.results import LEFT_OUT as UNDEFINED
from rl_caption.evaluation.results import csv_text, markdown
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.correlation import (
    UndefinedCorrelation,
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
from rl_caption.lab.meta_evaluation.sets import (
    CaptionGroups,
    CaptionPairs,
    JudgementSet,
    RatedCaptions,
)

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Table = Literal["main", "correlations", "lengths"]
NO_REFERENCES = ""
"""The condition of metrics that see no references."""
CHANCE = "blind: chance"
BLIND = {CHANCE: 0, "blind: longer": 1, "blind: shorter": -1}
"""Heading of a baseline that sees neither image nor references -> factor of the length of the
caption, its score.
"""
COST_HEADINGS = ("captions/s", "calls", "tokens", "seconds")
"""Columns of the table of costs (``costs.cost_cells``)."""
LENGTHS = (10, 20, 40, 60, 100)
"""Largest numbers of words of all classes of captions by length but the last."""
INVERSE_R_SQUARED = "1 / r^2"
"""What the SPECS paper prints as "1 - R^2" in its own rows."""
PLAIN = (INVERSE_R_SQUARED, "1 - R^2")
"""Beginnings of the names of figures that are printed as they are, all others times 100."""
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
    table: Table = "main"
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


Measured = tuple[Sequence[float | None], Sequence[Interval | None], str]
"""Values, their intervals (none where they were not asked for), and a note."""


def rated_figures(
    judgements: RatedCaptions, scores: Sequence[float], resamples: int = 0, seed: int = 0
) -> list[Figure]:
    """Correlate [N] scores with the ratings of a set.

    Returns ``tau_b`` and ``tau_c``; ``pearson`` or ``spearman`` where papers print that for the
    set, and both for captions without images; and ``tau_b within images`` where the set asks for
    it. Published figures come first. Intervals are of ``resamples`` draws of images; 0 computes
    none.
    """
    published: set[str | None] = {judgements.published}
    if judgements.text_alone:
        published = {"pearson", "spearman", "tau_b"}
    statistics: dict[tuple[str, ...], Callable[..., Measured]] = {("tau_b", "tau_c"): _taus}
    if judgements.published == "pearson":
        statistics["pearson",] = partial(_correlation, False)
    if judgements.text_alone:
        statistics["spearman",] = partial(_correlation, True)
    if judgements.within_images:
        statistics["tau_b within images",] = _within_images
    figures: list[Figure] = []
    count = len(judgements.captions)
    for names, compute in statistics.items():
        try:
            values, bounds, note = compute(judgements, scores, resamples, seed)
        except UndefinedCorrelation as error:
            values, bounds, note = [None] * len(names), [], str(error)
        for name, value, ends in zip_longest(names, values, bounds):
            low, high = ends or (None, None)
            figures.append(Figure(name, value, count, low, high, name in published, note))
    return sorted(figures, key=lambda figure: not figure.published)


def further_figures(
    judgements: RatedCaptions, scores: Sequence[float], lengths: Sequence[int] = LENGTHS
) -> list[Figure]:
    """Compute what ``rated_figures`` leaves out, without intervals: two further tables.

    Pearson's and Spearman's r, 1 / r^2, 1 - R^2 without a fit in both directions, and tau_b within
    images; then Pearson's r and tau_b of the captions of each class by number of words
    (``rows_by_length``). Source: Chen et al., "SPECS", EMNLP 2025, table 2 and figure 3.
    """
    statistics: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
        "pearson": pearson,
        "spearman": spearman,
        INVERSE_R_SQUARED: inverse_r_squared,
        "1 - R^2 of ratings": lambda values, ratings: unexplained_variance(ratings, values),
        "1 - R^2 of scores": unexplained_variance,
    }
    images = judgements.image_ids
    if judgements.published == "pearson":
        del statistics["pearson"]
    if judgements.text_alone:
        del statistics["spearman"]
    if not judgements.within_images and len(set(images)) < len(images):
        statistics["tau_b within images"] = lambda values, rated: (
            grouped_tau_b(values, rated, images).mean
        )
    ratings = judgements.ratings
    figures = [_statistic(name, statistics[name], scores, ratings) for name in statistics]
    for title, rows in rows_by_length(judgements.captions, lengths).items():
        columns = [scores[row] for row in rows], [ratings[row] for row in rows]
        for name, correlation in (("pearson", pearson), ("tau_b", kendall_tau_b)):
            figures.append(_statistic(f"{name}, {title}", correlation, *columns, table="lengths"))
    return figures


def _statistic(
    name: str,
    compute: Callable[[Sequence[float], Sequence[float]], float],
    scores: Sequence[float],
    ratings: Sequence[float],
    table: Table = "correlations",
) -> Figure:
    value, note = None, ""
    try:
        value = compute(scores, ratings)
    except UndefinedCorrelation as error:
        note = str(error)
    return Figure(name, value, len(scores), note=note, table=table)


def rows_by_length(
    captions: Sequence[str], lengths: Sequence[int] = LENGTHS
) -> dict[str, list[int]]:
    """Class of captions by number of words, such as ``11 to 20 words`` -> which of the N
    ``captions`` are in it.

    Classes with fewer than two captions are left out; empty where all captions are of one class.
    """
    classes = np.digitize([len(tokenize(caption)) for caption in captions], lengths, right=True)
    starts = [0, *(length + 1 for length in lengths)]
    spans = [f"{start} to {end}" for start, end in zip(starts, lengths, strict=False)]
    members = {
        f"{span} words": np.flatnonzero(classes == number).tolist()
        for number, span in enumerate(spans)
    }
    members[f"{starts[-1]} or more words"] = np.flatnonzero(classes == len(lengths)).tolist()
    return {title: rows for title, rows in members.items() if 2 <= len(rows) < len(captions)}


def _taus(
    judgements: RatedCaptions, scores: Sequence[float], resamples: int, seed: int
) -> Measured:
    values = kendall_tau_b(scores, judgements.ratings), kendall_tau_c(scores, judgements.ratings)
    levels, score_ranks = np.unique(np.asarray(scores, np.float64), return_inverse=True)
    rated, rating_ranks = np.unique(np.asarray(judgements.ratings, np.float64), return_inverse=True)
    cells = rating_ranks * len(levels) + score_ranks

    def resample(weights: NDArray[np.int64]) -> Sequence[float]:
        """tau_b and tau_c of a resample that has caption n ``weights[n]`` times; NaN where they are
        undefined.
        """
        try:
            if len(rated) * len(levels) > MAX_CELLS:
                items = np.repeat(np.arange(len(cells)), weights)
                drawn = score_ranks[items].tolist(), rating_ranks[items].tolist()
                return kendall_tau_b(*drawn), kendall_tau_c(*drawn)
            table = np.bincount(cells, weights, len(rated) * len(levels))
            return tau_of_table(table.reshape(len(rated), len(levels)))
        except UndefinedCorrelation:
            return np.nan, np.nan

    return values, intervals(resample, judgements.image_ids, resamples, seed), ""


def _correlation(
    ranked: bool, judgements: RatedCaptions, scores: Sequence[float], resamples: int, seed: int
) -> Measured:
    """Pearson's correlation over all, or with ``ranked`` Spearman's."""
    both = np.array([scores, judgements.ratings], np.float64)

    def resample(weights: NDArray[np.int64]) -> Floats:
        drawn = np.repeat(both, weights, axis=1)
        with np.errstate(invalid="ignore"):  # a resample may have one value only: NaN
            return np.asarray(np.corrcoef(rankdata(drawn, axis=1) if ranked else drawn))[:1, 1]

    value = (spearman if ranked else pearson)(scores, judgements.ratings)
    return [value], intervals(resample, judgements.image_ids, resamples, seed), ""


def _within_images(
    judgements: RatedCaptions, scores: Sequence[float], resamples: int, seed: int
) -> Measured:
    grouped = grouped_tau_b(scores, judgements.ratings, judgements.image_ids)
    note = f"mean over {grouped.groups} images; {grouped.constant_scores} of them, scored all alike, count 0"
    return [grouped.mean], [], note


def pair_figures(
    judgements: CaptionPairs,
    first: Mapping[str, Sequence[float] | Floats],
    second: Mapping[str, Sequence[float] | Floats],
    resamples: int = 0,
    seed: int = 0,
) -> list[Figure]:
    """Compute how often scores prefer the better caption of a pair.

    ``first`` and ``second`` are condition of the references -> [P] scores of the first and of the
    second captions; a metric without references has the one condition ``NO_REFERENCES``. Returns,
    for each condition or for the average over conditions that are draws, a figure for each kind,
    where the set shows them, and a summary: ``all pairs`` or ``mean of kinds``. Pairs of a set that
    is judged ``by_image`` are put together first.
    """
    if judgements.by_image:
        judgements, (first, second) = _by_image(judgements, [first, second])
    won = {
        name: wins(first[name], second[name], judgements.preference, judgements.ties)
        for name in first
    }
    if judgements.averaged:
        won = {NO_REFERENCES: np.mean(list(won.values()), axis=0)}
    figures = []
    for name, values in won.items():
        prefix = f"{name}, " if name else ""
        tied = np.mean(np.equal(first[name], second[name])) if name in first else 0.0
        note = f"{prefix}{100 * tied:.1f} % of pairs" if tied else ""
        title = f"{prefix}all pairs"
        figures += _accuracies(judgements, values, prefix, title, note, resamples, seed)
    return figures


def _by_image(
    judgements: CaptionPairs, scores: Sequence[Mapping[str, Sequence[float] | Floats]]
) -> tuple[CaptionPairs, list[dict[str, Any]]]:
    """One pair for each image, and its scores: the sums over the pairs of the image."""
    numbers = group_numbers(judgements.image_ids)
    places = np.unique(numbers, return_index=True)[1].tolist()
    summed = [
        {name: np.bincount(numbers, values) for name, values in side.items()} for side in scores
    ]
    columns: dict[str, Any] = {}
    for name in ("first", "second", "preference", "kinds", "image_ids"):
        column = getattr(judgements, name)
        columns[name] = [column[place] for place in places]
    return replace(judgements, images=None, references={}, by_image=False, **columns), summed


def group_figures(
    judgements: CaptionGroups,
    scores: Sequence[float],
    cosines: Floats | None = None,
    resamples: int = 0,
    seed: int = 0,
) -> list[Figure]:
    """Compute the share of G groups whose scores are in order: for each figure of a set, its kinds,
    then the summary.

    ``scores`` is [G * K]. ``cosines``, [G, K, K], are between the captions of a group; without them
    the figures of texts alone are left out.
    """
    count = len(judgements.kinds)
    values = np.asarray(scores, np.float64).reshape(count, -1)
    orders = {
        name: [(values[:, i], values[:, j]) for i, j in comparisons]
        for name, comparisons in judgements.above.items()
    }
    if cosines is not None:
        for name, comparisons in judgements.texts_above.items():
            orders[name] = [(cosines[:, i, j], cosines[:, k, m]) for (i, j), (k, m) in comparisons]
    figures = []
    for name, order in orders.items():
        if judgements.ties == "random":
            won = in_random_order(values, judgements.above[name])
        else:
            won = np.min([wins(*pair, np.ones(count), judgements.ties) for pair in order], axis=0)
        tied = np.any([high == low for high, low in order], axis=0).mean()
        note = f"{name}: {100 * tied:.1f} % of groups" if tied else ""
        figures += _accuracies(judgements, won, f"{name}, ", name, note, resamples, seed)
    return figures


def in_random_order(values: Floats, above: Sequence[tuple[int, int]]) -> Floats:
    """Probability [G] that i is ahead of j in all pairs (i, j) of ``above``, by the [G, K] values
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
    judgements: JudgementSet, resamples: int = 0, seed: int = 0
) -> dict[str, list[Figure]]:
    """Compute the figures of the ``BLIND`` baselines, by their headings: chance, the longer and the
    shorter caption.

    Lengths are in characters, and equal ones count by their expectation in a random order, whatever
    ties count in the
    set. The baselines are for sets of hard negatives: groups, and pairs of which the first caption
    is always the better one. For other sets the result is empty.
    """
    figures = {}
    for heading, factor in BLIND.items():
        if isinstance(judgements, CaptionGroups):
            random = replace(judgements, ties="random")
            scores = _lengths(judgements.captions, factor)
            found = group_figures(random, scores, None, resamples, seed)
        elif isinstance(judgements, CaptionPairs) and set(judgements.preference) == {1.0}:
            half = replace(judgements, ties="half")
            first = {NO_REFERENCES: _lengths(judgements.first, factor)}
            second = {NO_REFERENCES: _lengths(judgements.second, factor)}
            found = pair_figures(half, first, second, resamples, seed)
        else:
            return {}
        figures[heading] = [replace(figure, note="") for figure in found]
    return figures


def _lengths(texts: Sequence[str], factor: int) -> list[float]:
    return [factor * float(len(text)) for text in texts]


def wins(
    first: Sequence[float] | Floats,
    second: Sequence[float] | Floats,
    preference: Sequence[float] | Floats,
    ties: str = "wrong",
) -> Floats:
    """Return what each of P pairs counts, [P]: 1 if scores prefer the better caption, 0 if not.

    Pairs on which people are divided evenly (preference 0.5) count 0.5. Equal scores count 0 with
    ``ties`` ``wrong``, 0.5 with ``half`` and 1 with ``right``.
    """
    left, right, better = (np.asarray(values, np.float64) for values in (first, second, preference))
    if not np.isfinite([left, right]).all():
        raise ValueError("a score is not finite")
    won = np.where(better == 1, left > right, right > left).astype(np.float64)
    won[left == right] = {"wrong": 0.0, "half": 0.5, "right": 1.0}[ties]
    won[better == 0.5] = 0.5
    return won


def _accuracies(
    judgements: CaptionPairs | CaptionGroups,
    won: Floats,
    prefix: str,
    title: str,
    note: str,
    resamples: int,
    seed: int,
) -> list[Figure]:
    image_ids = judgements.image_ids[:: len(judgements.image_ids) // len(won)]
    kinds, kind_indices = list(dict.fromkeys(judgements.kinds)), group_numbers(judgements.kinds)

    def rates(weights: NDArray[np.int64]) -> Floats:
        """The accuracy of each kind, then the summary."""
        counts = np.bincount(kind_indices, weights, len(kinds))
        with np.errstate(
            invalid="ignore"
        ):  # a resample may lack a kind: NaN, which its mean leaves out
            accuracies = np.bincount(kind_indices, weights * won, len(kinds)) / counts
        summary = (
            (weights * won).sum() / weights.sum()
            if judgements.summary == "pairs"
            else np.nanmean(accuracies)
        )
        return np.append(accuracies, summary)

    if note:
        note += f" have equal scores, which count as {judgements.ties}"
    values = rates(np.ones(len(won), np.int64))
    if judgements.summary == "kinds" and len(kinds) > 1:
        title = f"{prefix}mean of kinds"
    names = [*(prefix + kind for kind in kinds), title]
    counts = [*np.bincount(kind_indices).tolist(), len(won)]
    bounds = intervals(rates, image_ids, resamples, seed)
    figures = []
    for name, value, count, ends in zip_longest(names, values.tolist(), counts, bounds):
        low, high = ends or (None, None)
        figures.append(Figure(name, value, count, low, high, True, note))
    return figures if judgements.shown_kinds else figures[-1:]


def intervals(
    statistic: Callable[[NDArray[np.int64]], Sequence[float] | Floats],
    groups: Sequence[Hashable],
    resamples: int = 1000,
    seed: int = 0,
) -> list[Interval | None]:
    """Return the 95 % percentile intervals of K statistics; empty with 0 resamples.

    ``statistic`` takes how often each item is drawn, [N], and returns [K] values; where one is ever
    NaN (not defined), its interval is None. ``groups`` is [N], the image (or another group) of each
    item, by which items are drawn.
    """
    statistics = np.array(
        [statistic(weights) for weights in drawn_weights(groups, resamples, seed)], np.float64
    )
    bounds: list[Interval | None] = []
    for column in statistics.T:
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
    write_json(paths[2], {"config": asdict(config), "sets": [asdict(result) for result in results]})
    return paths


def as_markdown(result: SetResult, resamples: int) -> str:
    """A line for each metric, a column for each figure, times 100 as papers print them; further
    tables; notes.
    """
    figures = [figure for column in result.figures.values() for figure in column]
    published = {figure.name for figure in figures if figure.published}
    if published == {figure.name for figure in figures if figure.table == "main"}:
        published = set()  # all of them: nothing is marked
    notes = [f"- Convention: {result.convention}"]
    notes += [
        f"- Excluded: {count}, {reason}" for reason, count in result.excluded.items() if count
    ]
    if resamples:
        notes.append(
            f"- In brackets: 95 % bootstrap interval, {resamples} resamples of {result.drawn}"
        )
    if published:
        notes.append(f"- Bold: what papers print for {result.name}")
    if result.blind:
        notes.append(f"- See neither image nor references: {', '.join(result.blind)}")
    for metric, column in result.figures.items():
        notes += dict.fromkeys(f"- {metric}: {figure.note}" for figure in column if figure.note)
    notes += [f"- {UNDEFINED} {metric}: {reason}" for metric, reason in result.left_out.items()]
    notes += [f"- {metric}: `{signature}`" for metric, signature in result.signatures.items()]
    tables = [_table(result, "main", published)]
    tables += [
        _table(result, name)
        for name in ("correlations", "lengths")
        if any(f.table == name for f in figures)
    ]
    if result.costs:
        tables.append(
            markdown(
                ["metric", *COST_HEADINGS], [[name, *cells] for name, cells in result.costs.items()]
            )
        )
    return (
        "\n\n".join([f"## {result.name}: {result.description}", *tables, "\n".join(notes)]) + "\n"
    )


def _table(result: SetResult, name: str, bold: Collection[str] = ()) -> str:
    columns = {
        metric: {figure.name: figure for figure in figures if figure.table == name}
        for metric, figures in result.figures.items()
    }
    names = list(dict.fromkeys(chain.from_iterable(columns.values())))
    head = ["metric"]
    for figure in names:
        unit = ", x100" if figure.startswith(("tau", "pearson", "spearman")) else ", % right"
        title = figure + ("" if figure.startswith(PLAIN) else unit)
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
