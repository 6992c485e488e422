"""Figures of agreement of a metric with a set of judgements, with bootstrap intervals over images,
as tables.

Judgements of one image are not independent, so images are drawn with replacement, each with all of
its judgements (Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics
1979). Kendall's tau of n items with C concordant and D discordant pairs, n_s pairs whose scores
differ, n_r pairs whose ratings differ, and m the smaller of the numbers of distinct scores and
ratings:

    tau_b = (C - D) / sqrt(n_s n_r)                  (Kendall, Biometrika 1945)
    tau_c = 2 (C - D) / (n^2 (m - 1) / m)            (Stuart, Biometrika 1953)
"""

import math
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from rewards.text.tokenize import tokenize
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation.confidence import ENDS, drawn_weights
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.sets import JudgementSet

Floats = NDArray[np.float64]
Weights = NDArray[np.int64]
Estimate = tuple[float, float | None, float | None]
"""Value, and the ends of its interval; None without one, or where it is not defined."""
NO_REFERENCES = ""
"""The condition of metrics that see no references."""
BLIND = {"blind: chance": 0, "blind: longer": 1, "blind: shorter": -1}
"""Heading of a baseline that sees neither image nor references -> factor of the length of the
caption, its score.
"""
LENGTHS = (10, 20, 40, 60, 100)
"""Largest numbers of words of all classes of captions by length but the last."""
PLAIN = ("1 / r^2", "1 - R^2")
"""Beginnings of the names of figures that are printed as they are, all others times 100."""
WITHIN = "tau_b within images"


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


def unexplained_variance(truth: ArrayLike, predictions: ArrayLike) -> float:
    """1 - R^2 without a fit, sum (t - p)^2 / sum (t - mean t)^2 of [N] values; 0 is perfect, no
    upper bound.
    """
    true, predicted = np.asarray(truth, np.float64), np.asarray(predictions, np.float64)
    spread = float(((true - true.mean()) ** 2).sum())
    return float(((true - predicted) ** 2).sum()) / spread if spread else math.nan


def inverse_r_squared(scores: ArrayLike, ratings: ArrayLike) -> float:
    """1 / r^2 of Pearson's r, at least 1: what the SPECS paper prints as "1 - R^2" in its own rows."""
    correlation = stats.pearsonr(scores, ratings).statistic
    return float(1 / correlation**2) if correlation else math.nan


CORRELATIONS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    "tau_b": lambda scores, ratings: stats.kendalltau(scores, ratings).statistic,
    "tau_c": lambda scores, ratings: (
        stats.kendalltau(scores, ratings, variant="c").statistic
    ),
    "pearson": lambda scores, ratings: stats.pearsonr(scores, ratings).statistic,
    "spearman": lambda scores, ratings: stats.spearmanr(scores, ratings).statistic,
    "1 / r^2": inverse_r_squared,
    "1 - R^2 of ratings": lambda scores, ratings: unexplained_variance(ratings, scores),
    "1 - R^2 of scores": unexplained_variance,
}


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
    names = ["tau_b", "tau_c"]
    if judged.text_alone:
        names += ["pearson", "spearman"]
    both = np.array([scores, ratings], np.float64)

    def resample(weights: Weights) -> list[float]:
        drawn = np.repeat(both, weights, axis=1)
        with warnings.catch_warnings():  # a resample may have one value only: NaN
            warnings.simplefilter("ignore")
            return [CORRELATIONS[name](*drawn) for name in names]

    figures = []
    bounds = estimates(resample, image_ids, resamples, seed)
    for name, (_, low, high) in zip(names, bounds, strict=True):
        figure = _correlation(name, scores, ratings)
        published = name in judged.published
        figures.append(
            replace(figure, low=low, high=high, published=published, table="main")
        )
    figures.sort(key=lambda figure: not figure.published)
    others = [
        _correlation(name, scores, ratings)
        for name in CORRELATIONS
        if name not in names
    ]
    within = _within_images(scores, ratings, image_ids)
    if judged.within_images:
        figures.append(within)
    elif not judged.text_alone and len(set(image_ids)) < len(image_ids):
        others.append(replace(within, table="correlations", note=""))
    figures += others
    for title, rows in rows_by_length(judged.captions, lengths).items():
        for name in ("pearson", "tau_b"):
            figure = _correlation(
                name, [scores[row] for row in rows], [ratings[row] for row in rows]
            )
            figures.append(replace(figure, name=f"{name}, {title}", table="lengths"))
    return figures


def _correlation(
    name: str, scores: Sequence[float], ratings: Sequence[float]
) -> Figure:
    """One of ``CORRELATIONS``; with a note in place of a value where it is not defined."""
    note, value = "", math.nan
    for what, values in (("scores", scores), ("ratings", ratings)):
        if len(set(values)) == 1:
            note = f"all {len(values)} {what} are {values[0]:g}: {name} is not defined"
    if not note or name.startswith("1 - R^2"):
        value = float(CORRELATIONS[name](scores, ratings))
    if math.isfinite(value):
        return Figure(name, value, len(scores), table="correlations")
    return Figure(name, None, len(scores), note=note, table="correlations")


def _within_images(
    scores: Sequence[float], ratings: Sequence[float], image_ids: Sequence[str]
) -> Figure:
    """tau_b within each group (the captions of one image), averaged over groups.

    Groups whose ratings are all equal are left out, for every metric the same ones. Where only the
    scores are equal, tau_b is 0 / 0 and counts as 0: the metric orders nothing, and leaving such
    groups out would reward it.
    """
    members: dict[str, list[int]] = {}
    for index, image_id in enumerate(image_ids):
        members.setdefault(image_id, []).append(index)
    taus, constant = [], 0
    for indices in members.values():
        scored = [scores[index] for index in indices]
        rated = [ratings[index] for index in indices]
        if len(set(rated)) == 1:
            continue
        if len(set(scored)) == 1:
            constant += 1
            taus.append(0.0)
        else:
            taus.append(CORRELATIONS["tau_b"](scored, rated))
    if not taus:
        return Figure(WITHIN, None, len(scores), note="no image has different ratings")
    note = (
        f"mean over {len(taus)} images; {constant} of them, scored all alike, count 0"
    )
    return Figure(WITHIN, math.fsum(taus) / len(taus), len(scores), note=note)


def rows_by_length(
    captions: Sequence[str], lengths: Sequence[int] = LENGTHS
) -> dict[str, list[int]]:
    """Class of captions by number of words, such as ``11 to 20 words`` -> which of the N
    ``captions`` are in it.

    Classes with fewer than two captions are left out; empty where all captions are of one class.
    """
    classes = np.digitize(
        [len(tokenize(caption)) for caption in captions], lengths, right=True
    )
    starts = [0, *(length + 1 for length in lengths)]
    titles = [
        f"{start} to {end} words" for start, end in zip(starts, lengths, strict=False)
    ]
    titles.append(f"{starts[-1]} or more words")
    rows = {
        title: np.flatnonzero(classes == number).tolist()
        for number, title in enumerate(titles)
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
    shows them, and a summary.
    """
    if judged.by_image:
        judged, scores = _summed(judged, scores)
    won: dict[str, Floats] = {}
    tied: dict[str, float] = {}
    for condition, values in scores.items():
        orders = {}
        for name, pairs in judged.above.items():
            orders[name] = [(values[:, i], values[:, j]) for i, j in pairs]
        if cosines is not None:
            for name, quads in judged.texts_above.items():
                orders[name] = [
                    (cosines[:, i, j], cosines[:, k, m]) for (i, j), (k, m) in quads
                ]
        for name, order in orders.items():
            title = _joined(condition, name)
            won[title] = wins(order, [row.better for row in judged.rows], judged.ties)
            tied[title] = float(
                np.any([high == low for high, low in order], axis=0).mean()
            )
    if judged.averaged and len(won) > 1:
        won, tied = {"": np.mean(list(won.values()), axis=0)}, {"": 0.0}
    figures = []
    for title, values in won.items():
        figures += _accuracies(judged, title, values, tied[title], resamples, seed)
    return figures


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
    random = replace(judged, ties="half", texts_above={})
    lengths = np.array(
        [[len(text) for text in row.captions] for row in judged.rows], np.float64
    )
    figures = {}
    for heading, factor in BLIND.items():
        scores = {NO_REFERENCES: factor * lengths}
        found = order_figures(random, scores, None, resamples, seed)
        figures[heading] = [replace(figure, note="") for figure in found]
    return figures


def _summed(
    judged: JudgementSet, scores: Mapping[str, Floats]
) -> tuple[JudgementSet, dict[str, Floats]]:
    """A row for each image, and the sums of its rows' scores."""
    _, places, numbers = np.unique(
        judged.image_ids, return_index=True, return_inverse=True
    )
    rows = [judged.rows[place] for place in places]
    sums = {
        name: np.zeros((len(rows), values.shape[1])) for name, values in scores.items()
    }
    for name, values in scores.items():
        np.add.at(sums[name], numbers, values)
    return replace(judged, rows=rows, by_image=False), sums


def wins(
    order: Sequence[tuple[Floats, Floats]], better: ArrayLike, ties: str = "wrong"
) -> Floats:
    """What each of N rows counts, [N]: 1 if the scores are in order, 0 if not.

    ``order`` are pairs ([N], [N]) of which the first must be the higher one, the same one of the
    captions in all. ``better`` is 1 where that is so and 0 where the second must; rows on which
    people are divided evenly (0.5) count 0.5. Equal scores are wrong or right (``ties``); ``half``
    is the probability of the order if equal scores are in a random one.
    """
    preference = np.asarray(better)
    highs, lows = np.swapaxes(np.array(order), 0, 1)
    flipped = preference == 0
    highs, lows = np.where(flipped, lows, highs), np.where(flipped, highs, lows)
    won = np.all(highs > lows if ties == "wrong" else highs >= lows, axis=0).astype(
        np.float64
    )
    if ties == "half":
        won /= 1 + (highs == lows).sum(axis=0)
    won[preference == 0.5] = 0.5
    return won


def _accuracies(
    judged: JudgementSet,
    title: str,
    won: Floats,
    tied: float,
    resamples: int,
    seed: int,
) -> list[Figure]:
    """The accuracy of each kind, then the summary; ``tied``: share of rows with equal scores."""
    kinds = [row.kind for row in judged.rows]
    names = list(dict.fromkeys(kinds))
    numbers = np.array([names.index(kind) for kind in kinds])

    def rates(weights: Weights) -> Floats:
        counts = np.bincount(numbers, weights, len(names))
        with np.errstate(
            invalid="ignore"
        ):  # a resample may lack a kind, which its mean leaves out
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
        note = _joined(title, share)
    summary = "all pairs" if is_pair else ""
    if judged.summary == "kinds" and len(names) > 1:
        summary = "mean of kinds"
    counts = [*np.bincount(numbers).tolist(), len(won)]
    found = estimates(rates, judged.image_ids, resamples, seed)
    figures = []
    for name, count, (value, low, high) in zip(
        [*names, summary], counts, found, strict=True
    ):
        heading = _joined(title, name)
        figures.append(Figure(heading, value, count, low, high, True, note))
    return figures if judged.shown_kinds and names != [""] else figures[-1:]


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words))


def estimates(
    statistic: Callable[[Weights], Sequence[float] | Floats],
    groups: Sequence[Hashable],
    resamples: int = 1000,
    seed: int = 0,
) -> list[Estimate]:
    """K statistics with 95 % percentile intervals; without any of 0 resamples.

    ``statistic`` takes how often each item is drawn, [N], and returns [K] values; where one is ever
    NaN (not defined), it has no interval. ``groups`` is [N], the image (or another group) of each
    item, by which items are drawn.
    """
    values = list(map(float, statistic(np.ones(len(groups), np.int64))))
    if not resamples:
        return [(value, None, None) for value in values]
    draws = [statistic(weights) for weights in drawn_weights(groups, resamples, seed)]
    found: list[Estimate] = []
    for value, column in zip(values, np.array(draws, np.float64).T, strict=True):
        low, high = np.quantile(column, ENDS).tolist()
        found.append(
            (value, low, high) if np.isfinite(column).all() else (value, None, None)
        )
    return found


def write_results(
    folder: Path, config: JudgeSetConfig, results: Sequence[SetResult]
) -> list[Path]:
    """Write ``agreement.md`` and ``agreement.json``; return their paths in this order."""
    paths = [folder / "agreement.md", folder / "agreement.json"]
    write_text(
        paths[0], "\n".join(as_markdown(result, config.bootstrap) for result in results)
    )
    content = {
        "config": config.model_dump(mode="json"),
        "sets": [asdict(result) for result in results],
    }
    write_json(paths[1], content)
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
        notes += dict.fromkeys(
            f"{metric}: {figure.note}" for figure in column if figure.note
        )
    notes += [
        f"{LEFT_OUT} {metric}: {reason}" for metric, reason in result.left_out.items()
    ]
    notes += [
        f"{metric}: `{signature}`" for metric, signature in result.signatures.items()
    ]
    title = f"## {result.name}: {result.description}"
    return (
        "\n\n".join([title, *tables, "\n".join(f"- {note}" for note in notes)]) + "\n"
    )


def _table(result: SetResult, name: str, bold: Collection[str] = ()) -> str:
    columns = {
        metric: {figure.name: figure for figure in figures if figure.table == name}
        for metric, figures in result.figures.items()
    }
    names = list(
        dict.fromkeys(figure for column in columns.values() for figure in column)
    )
    head = ["metric"]
    for figure in names:
        unit = (
            ", x100"
            if figure.startswith(("tau", "pearson", "spearman"))
            else ", % right"
        )
        title = figure if figure.startswith(PLAIN) else figure + unit
        head.append(f"**{title}**" if figure in bold else title)
    lines = [
        [metric, *(_cell(figures.get(figure)) for figure in names)]
        for metric, figures in columns.items()
    ]
    lines += [[metric, *[LEFT_OUT] * len(names)] for metric in result.left_out]
    return markdown(head, lines)


def _cell(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return LEFT_OUT
    if figure.name.startswith(PLAIN):
        return f"{figure.value:.4g}"
    text = f"{100 * figure.value:z.1f}"
    if figure.low is None or figure.high is None:
        return text
    return f"{text} [{100 * figure.low:z.1f}, {100 * figure.high:z.1f}]"
